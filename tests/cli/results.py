"""The result of a command line, and a stream that says that it is a terminal."""

import io
from collections.abc import Callable
from typing import NamedTuple


class Result(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str

    def expect_error(self, exit_code: int, *parts: str) -> None:
        """Expect one line on stderr with `parts`, nothing on stdout, and this exit code."""
        assert self.stdout == ""
        lines = self.stderr.splitlines()
        assert len(lines) == 1, self.stderr
        assert lines[0].startswith("error: ")
        for part in parts:
            assert part in lines[0]
        assert self.exit_code == exit_code


Llmcli = Callable[..., Result]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True
