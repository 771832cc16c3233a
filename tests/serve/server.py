"""A server in a process of its own, and its stderr."""

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120


class ServerProcess:
    """`llmcli serve` on a port chosen by the system."""

    def __init__(
        self, *arguments: object, close_stdin: bool = False, open_files: int | None = None, program: str | None = None
    ):
        start = ["-m", "llmcli"] if program is None else ["-c", program]
        command = [sys.executable, *start, "serve", "--port", 0, "--device", "cpu", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}

        def begin() -> None:
            if close_stdin:
                os.close(0)
            if open_files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))

        self.process = subprocess.Popen(
            [str(part) for part in command],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=begin,
        )
        self.lines: list[str] = []
        self._has_line = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.wait_for_line(r"http://\S+:\d+").group()
        self.port = int(self.url.rpartition(":")[2])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._has_line:
                self.lines.append(line)
                self._has_line.notify_all()

    def wait_for_line(self, pattern: str) -> re.Match[str]:
        """The first match in the server's stderr."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, "".join(self.lines))

        with self._has_line:
            assert self._has_line.wait_for(found, SECONDS), "".join(self.lines)
            match = found()
        assert match is not None
        return match

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and wait for the end."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        return code


@contextmanager
def running_server(*arguments: object, **how: Any) -> Iterator[ServerProcess]:
    """A server that has ended after the `with`."""
    server = ServerProcess(*arguments, **how)
    try:
        yield server
    finally:
        server.end(signal.SIGKILL)
