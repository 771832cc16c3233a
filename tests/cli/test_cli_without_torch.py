"""A small model on the CPU needs no torch: every command runs if importing it fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = "Once upon a time there was a dog. " * 4
COMMANDS = {
    "generate": "generate Once --max-new-tokens 2",
    "samples": "generate Once --max-new-tokens 2 -n 2 --stats=start",
    "why": "generate Once --max-new-tokens 2 --why",
    "chat": "chat --max-new-tokens 2",
    "batch": "batch lines.txt out.jsonl --text --max-new-tokens 2",
    "tokenize": "tokenize Once",
    "info": "info storyteller",
    "plan": "plan",
    "bench": "bench --prompt 4 --depth 4 --tokens 2 --repeats 1",
    "eval": "eval --file text.txt",
    "diff": "diff storyteller storyteller Once --max-new-tokens 2",
    "doctor": "doctor",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder, and in `broken` a torch that cannot be imported."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('somebody imports torch')\n")
    (tmp_path / "lines.txt").write_text("Once upon a time\nThe dog\n")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def run_without_torch(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder / "broken"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "llmcli", *command.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "LLMCLI_HOME": str(folder / "home")},
        input="Hello\n/quit\n",
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_the_storyteller_runs(folder: Path, name: str) -> None:
    result = run_without_torch(folder, COMMANDS[name])
    assert result.returncode == 0, result.stderr
    assert result.stdout or name == "batch"


@pytest.mark.parametrize("flags", ["--dtype float32", "--dtype bfloat16", "--kv-cache int8", "--threads 2"])
def test_a_flag_for_what_numpy_lacks_asks_for_torch(folder: Path, flags: str) -> None:
    result = run_without_torch(folder, f"generate Once --max-new-tokens 2 --device cpu {flags}")
    assert "somebody imports torch" in result.stderr
    assert result.returncode != 0


@pytest.mark.parametrize("chosen", [None, "3"])
def test_numpy_computes_with_one_thread_unless_the_user_says_otherwise(chosen: str | None) -> None:
    """The variable is set before numpy is imported, which reads it then."""
    program = (
        "import os, sys\n"
        "from llmcli.cli.main import main\n"
        "assert 'numpy' not in sys.modules\n"
        "sys.argv = ['llmcli', '--version']\n"
        "main()\n"
        "assert 'numpy' not in sys.modules\n"
        "print(os.environ['OPENBLAS_NUM_THREADS'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    if chosen is not None:
        environment["OPENBLAS_NUM_THREADS"] = chosen
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == (chosen or "1")
