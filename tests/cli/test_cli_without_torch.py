"""A small model on the CPU needs no torch: every command runs if importing it fails."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


LACKED_FLAGS = ["--dtype float32", "--dtype bfloat16", "--kv-cache int8", "--threads 2"]
NEEDS_TORCH = {flags: f"generate Once --max-new-tokens 2 --device cpu {flags}" for flags in LACKED_FLAGS}
# One process for all commands, which starts once; an import that has failed is tried again.
PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from llmcli.cli.main import run

results = {}
for name, command in json.loads(sys.argv[1]).items():
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"Hello\\n/quit\\n"), "utf-8")
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        results[name] = [run(command.split()), out, err]
print(json.dumps({name: [code, out.getvalue(), err.getvalue()] for name, (code, out, err) in results.items()}))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The exit code, stdout and stderr of every command where torch cannot be imported."""
    folder = tmp_path_factory.mktemp("without-torch")
    (folder / "broken").mkdir()
    (folder / "broken" / "torch.py").write_text("raise ImportError('somebody imports torch')\n")
    (folder / "lines.txt").write_text("Once upon a time\nThe dog\n")
    (folder / "text.txt").write_text(TEXT)
    path = os.pathsep.join([str(folder / "broken"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(COMMANDS | NEEDS_TORCH)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "LLMCLI_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, list[Any]] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("name", COMMANDS)
def test_the_storyteller_runs(results: dict[str, list[Any]], name: str) -> None:
    exit_code, out, err = results[name]
    assert exit_code == 0, err
    assert out or name == "batch"


@pytest.mark.parametrize("flags", LACKED_FLAGS)
def test_a_flag_for_what_numpy_lacks_asks_for_torch(results: dict[str, list[Any]], flags: str) -> None:
    exit_code, _, err = results[flags]
    assert "somebody imports torch" in err
    assert exit_code != 0


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
