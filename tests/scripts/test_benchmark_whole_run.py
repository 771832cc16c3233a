"""Whole runs of texts side by side: each has all its tokens, and all of them count."""

import sys
from pathlib import Path

import pytest
from tiny_models import write_tiny_llama

from llmcli.runners.torch.load import load
from scripts import benchmark_whole_run


def test_every_text_is_told_to_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(benchmark_whole_run, "load", load)
    monkeypatch.setattr(benchmark_whole_run, "perf_counter", lambda: 2.0 * next(ticks))  # a run takes 2 s
    folder = write_tiny_llama(tmp_path / "model", with_tokenizer=False)
    sizes = ["--texts", "3", "--prompt", "5", "--tokens", "4", "--runs", "2"]
    monkeypatch.setattr(sys, "argv", ["whole_run", str(folder), *sizes])
    benchmark_whole_run.main()
    assert capsys.readouterr().out == "6 new tokens/s (6 to 6)\n"
