"""The parent's side of the child process that renders one chat template: its start, its time limit, its end.

The process starts with the first rendering, serves the later ones, and is killed when it is late or no longer needed.
What it runs is in chat_sandbox.py.
"""

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from llmcli.errors import TokenizerError

TIME_LIMIT_SECONDS = 2
START_LIMIT_SECONDS = 60  # our own program starts in 0.2 s; a cold disk takes longer
# 4 MB of output at up to six bytes a character ("\u0001") and the braces around it.
REPLY_LIMIT_BYTES = 6 * 2**22 + 1024

# The isolated interpreter (-I) leaves out PYTHONPATH, the user's own packages and a source tree, so what the parent
# finds its packages by is added, after the interpreter's own.
BOOTSTRAP = "import sys; sys.path += sys.argv[1:]; from llmcli.tokenizer.chat_sandbox import main; main()"


class TemplateProcess:
    """Renders one template in a child process with bounds on time, memory and output.

    One process serves every rendering: starting it takes 0.1 s, and a short conversation less than 1 ms. It never
    sees the terminal's Ctrl-C, and it ends with this object or with the program, whichever is first.
    """

    def __init__(self, source: str, origin: str) -> None:
        self._source = source
        self._origin = origin
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text that the template writes for these variables, which are JSON values.

        Raises: TokenizerError, naming the origin of the template, if it fails or oversteps a bound.
        """
        request = json.dumps({"source": self._source, "variables": variables}).encode() + b"\n"
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                reply = self._ask(request)
            except BaseException:  # Ctrl-C too: an answer that is not read would be taken for the next one
                self._stop()
                raise
        answer = json.loads(reply)
        if "error" in answer:
            raise TokenizerError(f"{self._origin} failed: {answer['error']}")
        return str(answer["text"])

    def close(self) -> None:
        """Ends the process, if there is one; the next rendering starts another."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._stop()
        command = [sys.executable, "-I", "-c", BOOTSTRAP, *filter(os.path.isabs, sys.path)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # POSIX; the flags are its counterpart on Windows, which takes no notice of it
                creationflags=_windows_flags(),
            )
        except OSError as error:
            raise TokenizerError(f"cannot start {sys.executable} to render {self._origin}: {error.strerror}") from error
        self._finalizer = weakref.finalize(self, _end, self._process)
        if _exchange(self._process, b"", START_LIMIT_SECONDS) != b"\n":
            raise TokenizerError(
                f"the process that renders {self._origin} does not start; see what `{sys.executable} -c "
                f"'import jinja2'` says, and install llmcli again"
            )

    def _ask(self, request: bytes) -> bytes:
        assert self._process is not None
        started = time.monotonic()
        reply = _exchange(self._process, request, TIME_LIMIT_SECONDS)
        is_late = time.monotonic() - started >= TIME_LIMIT_SECONDS
        if not reply.endswith(b"\n"):
            reason = f"it does not end within {TIME_LIMIT_SECONDS} s" if is_late else "its process ended before it did"
            raise TokenizerError(f"{self._origin} failed: {reason}; choose another one with --chat-template FILE")
        if is_late:  # the timer struck while the answer arrived
            self._stop()
        return reply

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _exchange(process: subprocess.Popen[bytes], request: bytes, limit_seconds: float) -> bytes:
    """Sends a request and returns the line that answers it, or less of it if the process ended or was too late."""
    assert process.stdin is not None
    assert process.stdout is not None
    # A timer rather than a wait with a time limit, which pipes do not have on Windows.
    timer = threading.Timer(limit_seconds, process.kill)
    timer.start()
    try:
        process.stdin.write(request)
        process.stdin.flush()
        return process.stdout.readline(REPLY_LIMIT_BYTES)
    except OSError:  # the process ended before it had read all of the request
        return b""
    finally:
        timer.cancel()
        timer.join()


def _windows_flags() -> int:
    if sys.platform == "win32":
        return subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
    return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()  # closes both pipes and collects the exit status, so that no zombie stays
