"""The child's side of bounded_process.py: one JSON line in, one out, within a bound on memory.

Only a child imports this module.
"""

import contextlib
import faulthandler
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

# Longer than the parent waits: this ends a request only if the parent was killed before it could.
ORPHAN_SECONDS = 1


def serve(answer: Callable[[dict[str, Any]], Any], describe: Callable[[BaseException], str], memory_mb: int) -> None:
    """Answer `{"limit_seconds": ..., "request": {...}}` with `{"result": ...}` or `{"error": ...}` until stdin is
    closed: the result by `answer`, the error by `describe`, for anything it raises.

    Begins with an empty line, which means that it is ready.
    """
    _limit_memory(memory_mb)
    reply = b""
    while True:
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            return
        reply = _reply(line, answer, describe, memory_mb)


def _reply(
    line: bytes, answer: Callable[[dict[str, Any]], Any], describe: Callable[[BaseException], str], memory_mb: int
) -> bytes:
    try:
        question = json.loads(line)
        # A thread of C code, which ends this process even during one endless operation on big numbers.
        faulthandler.dump_traceback_later(question["limit_seconds"] + ORPHAN_SECONDS, exit=True)
        return json.dumps({"result": answer(question["request"])}).encode()
    except MemoryError:
        return json.dumps({"error": f"it needs more than {memory_mb} MB of memory"}).encode()
    except BaseException as error:  # a panic of a library written in Rust is no Exception
        return json.dumps({"error": describe(error)}).encode()
    finally:
        faulthandler.cancel_dump_traceback_later()


def printable(reason: str) -> str:
    """A reason as one printable line of limited length: it goes to a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in reason[:400]).split())


def _limit_memory(memory_mb: int) -> None:
    """POSIX only. The limit counts what the interpreter and its libraries hold, about 11 MB."""
    if sys.platform == "win32":
        return
    resource = importlib.import_module("resource")  # not available on Windows
    limit_bytes = memory_mb * 2**20
    with contextlib.suppress(ValueError, OSError):  # macOS has the call and may refuse it
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
