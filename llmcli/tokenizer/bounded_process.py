"""A child process for work decided by a stranger: its start, its time limits, its end.

The process starts with the first request, serves the later ones, and is killed when it is late or no longer needed.
The programs that it runs, all named `..._sandbox.py`, answer through sandbox.py.
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
from llmcli.patterns import child_program

START_LIMIT_SECONDS = 60  # our own program starts in 0.2 s; a cold disk takes longer
# The longest answers: 4 MB of a template's output at up to six bytes a character ("\u0001"), or the ids of a long text.
REPLY_LIMIT_BYTES = 2**30

# The isolated interpreter (-I) leaves out PYTHONPATH, the user's own packages and a source tree. So the paths where the
# parent finds its packages are added after the interpreter's own.
_ADD_PATHS = "sys.path += sys.argv[1:]; "


class BoundedProcess:
    """Answers requests in a child process with bounds on time and memory.

    One process serves every request: starting it takes 0.1 s, a short request less than 1 ms. It never sees the
    terminal's Ctrl-C, its stderr goes nowhere, and it ends with this object or with the program, whichever is first.

    `module` is the child's program, which needs the package `package`; `origin` names what is at work, and `remedy`
    ends the message when it fails. `setup` is the request that a new process answers first, if any, within its own
    limit.
    """

    def __init__(
        self,
        module: str,
        package: str,
        origin: str,
        remedy: str,
        setup: tuple[Mapping[str, Any], float] | None = None,
    ) -> None:
        self._module = module
        self._package = package
        self._origin = origin
        self._remedy = remedy
        self._setup = setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def ask(self, request: Mapping[str, Any], limit_seconds: float) -> Any:
        """The child's result for a request, which is made of JSON values.

        Raises: TokenizerError, naming the origin, if the work fails or exceeds a bound.
        """
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                reply = self._exchange(request, limit_seconds)
            except BaseException:  # Ctrl-C too: an unread answer would be taken for the next one
                self._stop()
                raise
        return self._result(reply)

    def close(self) -> None:
        """Ends the process, if there is one; the next request starts another."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._stop()
        program = child_program(self._module, before=_ADD_PATHS)
        command = [sys.executable, "-I", "-c", program, *filter(os.path.isabs, sys.path)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # POSIX; the flags do the same on Windows, which ignores this
                creationflags=_windows_flags(),
            )
        except OSError as error:
            raise TokenizerError(f"cannot start {sys.executable} for {self._origin}: {error.strerror}") from error
        self._finalizer = weakref.finalize(self, _end, self._process)
        if _exchange(self._process, b"", START_LIMIT_SECONDS) != b"\n":
            raise TokenizerError(
                f"the process for {self._origin} does not start; see what `{sys.executable} -c "
                f"'import {self._package}'` says, and install llmcli again"
            )
        if self._setup is not None:
            self._result(self._exchange(*self._setup))

    def _exchange(self, request: Mapping[str, Any], limit_seconds: float) -> bytes:
        assert self._process is not None
        line = json.dumps({"limit_seconds": limit_seconds, "request": request}).encode() + b"\n"
        started = time.monotonic()
        reply = _exchange(self._process, line, limit_seconds)
        is_late = time.monotonic() - started >= limit_seconds
        if not reply.endswith(b"\n"):
            reason = f"it does not end within {limit_seconds:g} s" if is_late else "its process ended early"
            raise TokenizerError(f"{self._origin} failed: {reason}; {self._remedy}")
        if is_late:  # the timer fired while the answer arrived
            self._stop()
        return reply

    def _result(self, reply: bytes) -> Any:
        answer = json.loads(reply)
        if "error" in answer:
            raise TokenizerError(f"{self._origin} failed: {answer['error']}")
        return answer["result"]

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _exchange(process: subprocess.Popen[bytes], request: bytes, limit_seconds: float) -> bytes:
    """Send a request; return the line that answers it, or less of it if the process ended or was late."""
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
