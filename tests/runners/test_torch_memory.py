"""Missing memory: refused with figures before anything is read, and in one line when it runs out later."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from row_steps import PROMPT, go_on, logits_of, start
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.errors import InsufficientMemoryError
from llmcli.runners.base import Span
from llmcli.runners.host.llama import Llama
from llmcli.runners.torch.load import load

ROOT = Path(__file__).resolve().parents[2]
UNDER_A_LIMIT = """
import resource, sys
from pathlib import Path
import psutil, torch
from llmcli.checkpoint.model import open_model
from llmcli.runners.torch.load import load
from llmcli.runners.host.memory import available_memory
torch.set_num_threads(int(sys.argv[2]))
used = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_STACK, (2**20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, used + 2**24))
print(available_memory(torch.get_num_threads()))
load(open_model(Path(sys.argv[1])), max_seq_len=100_000)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("memory") / "model", with_tokenizer=False)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space as Linux does")
@pytest.mark.parametrize("num_threads", [1, 5])
def test_a_limit_of_the_address_space(folder: Path, num_threads: int) -> None:
    result = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT, str(folder), str(num_threads)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    left = 2**24 - (num_threads - 1) * 2**20  # each thread wants a stack
    assert abs(int(result.stdout) - left) < 2**20
    last_line = result.stderr.strip().splitlines()[-1]
    assert "InsufficientMemoryError" in last_line
    assert "with context 100000 needs 0." in last_line


def test_memory_that_runs_out_while_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcli.runners.torch.load.check_memory", lambda *arguments, **options: None)
    with pytest.raises(InsufficientMemoryError, match=rf"^loading {folder}: out of memory; close"):
        load(open_model(folder), max_seq_len=10**13)


def test_memory_that_runs_out_in_a_run_leaves_the_row_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(open_model(folder), max_seq_len=128)
    expected = go_on(runner, start(runner, PROMPT[:20]), 4)
    runner = load(open_model(folder), max_seq_len=128)
    row = start(runner, PROMPT[:20])
    begun = runner.open(PROMPT[:30])
    for method in ("forward", "logits"):
        with monkeypatch.context() as patch:
            patch.setattr(Llama, method, lambda *arguments: torch.empty(10**16))
            with pytest.raises(InsufficientMemoryError, match="^running the model: out of memory; close"):
                runner.queue([Span(row), Span(begun, tuple(PROMPT[16:30]), "none")])
        assert (runner.num_tokens(row), runner.num_tokens(begun)) == (20, 16)
    assert go_on(runner, row, 4) == expected


def test_other_errors_of_a_run_stay_what_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(open_model(folder), max_seq_len=128)
    monkeypatch.setattr(Llama, "forward", lambda *arguments: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size|size mismatch"):
        logits_of(runner, PROMPT[:3])
