"""Errors that can occur anywhere end in one line and a documented exit code."""

import os
import resource
import subprocess
import sys

import pytest


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmcli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_a_folder_that_was_removed_under_the_shell(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    command = f"cd {folder} && rmdir {folder} && exec {sys.executable} -m llmcli generate Once"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 2
    assert result.stderr == (
        "error: the current folder cannot be used (No such file or directory); change to another folder\n"
    )


GENERATE = "generate Once --max-new-tokens 3"


@pytest.mark.parametrize(
    ("mib", "command"),
    [
        *((280, "plan"), (400, GENERATE), (500, "plan"), (540, GENERATE)),  # torch, imported, aborts below 550
        *((140, "plan"), (190, GENERATE), (215, "plan"), (250, GENERATE)),  # without torch
    ],
)
def test_too_little_memory_is_one_line(mib, command):
    command += " --dtype float32" if mib > 250 else ""
    limits = (mib * 1024**2,) * 2
    result = run(*command.split(), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limits))
    assert result.returncode == 4, result.stderr
    errors = [line for line in result.stderr.splitlines() if not line.startswith("Using the built-in storyteller")]
    assert len(errors) == 1, result.stderr
    assert errors[0].startswith("error: ")
    assert "out of memory" in errors[0] or "`ulimit -v` leaves" in errors[0] or "is available: use" in errors[0]


def test_show_completion_succeeds():
    result = run("--show-completion", "bash")
    assert result.returncode == 0, result.stderr
    assert "_LLMCLI_COMPLETE" in result.stdout
