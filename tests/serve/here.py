"""Commands in this process, which has imported what they need."""

import io
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from cli.kept_programs import keep_programs

from llmcli.cli.main import run
from llmcli.cli.terminal import terminal


def run_here(*arguments: object, **environment: str | Path | None) -> subprocess.CompletedProcess[str]:
    """A command's exit code and what it prints; an environment variable that is None is not set."""
    command = [str(argument) for argument in arguments]
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as stdout, io.StringIO() as stderr:
        patch.setattr(terminal, "is_quiet", False)
        patch.setattr(terminal, "is_debug", False)
        keep_programs(patch)
        for name, value in environment.items():
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, str(value))
        with redirect_stdout(stdout), redirect_stderr(stderr):
            exit_code = run(command)
        return subprocess.CompletedProcess(command, exit_code, stdout.getvalue(), stderr.getvalue())
