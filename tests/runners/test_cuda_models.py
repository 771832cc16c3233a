"""The CUDA runner on models that are not tiny: the built-in storyteller, and random weights of a real shape."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from rounded_torch import load_rounded
from row_steps import GREEDY, PROMPT, relative_error, run_prompt, single_steps
from side_by_side import check_rows_together, tell

from llmcli.checkpoint.model import open_model
from llmcli.checkpoint.random_weights import write_shape
from llmcli.kernels.device import Device
from llmcli.resources import STORYTELLER, resource_folder
from llmcli.runners.base import Runner
from llmcli.runners.torch.load import load as load_on_cpu

pytestmark = pytest.mark.cuda

LENGTHS = (1, 8, 40, 100)  # a token alone, and each way of products


def load_on_card(folder: Path, num_rows: int = 1) -> Any:
    from llmcli.runners.cuda.load.model import load

    return load(open_model(folder), device=Device.open(0), max_seq_len=200, num_rows=num_rows)


def follow(runner: Runner, length: int, answer: list[int]) -> list[Any]:
    """The logits after a prompt of some length, and after each token of an answer that is fed one by one."""
    row = runner.open(PROMPT[:length])
    runner.keep(row, 0)
    found = [run_prompt(runner, row, PROMPT[:length], choose="none"), *single_steps(runner, row, answer)]
    runner.close(row)
    return found


def check(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of prompts and of single tokens against torch with the same roundings; distances are printed."""
    ours = load_on_card(folder)
    answers = {length: tell(ours, PROMPT[:length], GREEDY, 4)[0] for length in LENGTHS}
    found = {length: follow(ours, length, answers[length]) for length in LENGTHS}
    for kind in ("exact", "rounded"):
        model = open_model(folder)
        if kind == "exact":
            reference = load_on_cpu(model, max_seq_len=200)
        else:
            reference = load_rounded(monkeypatch, model, torch.bfloat16, 200)
        errors = [
            relative_error(logits, expected)
            for length in LENGTHS
            for logits, expected in zip(found[length], follow(reference, length, answers[length]), strict=True)
        ]
        del reference
        gc.collect()
        print(f"{name}: at most {max(errors):.2e} from torch, {kind}")
    assert max(errors) < 2e-3


def test_the_storyteller(monkeypatch: pytest.MonkeyPatch) -> None:
    check(resource_folder(STORYTELLER), "storyteller", monkeypatch)


@pytest.mark.parametrize("form", ["int8", "int4", "bf16"])
def test_a_real_shape(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shape("Llama-3.2-1B", form, tmp_path / "model", lambda done, total: None)
    check(tmp_path / "model", f"Llama-3.2-1B {form}", monkeypatch)


@pytest.mark.parametrize("form", ["int8", "int4", "bf16"])
def test_many_rows_of_a_real_shape_have_the_bits_of_each_alone(form: str, tmp_path: Path) -> None:
    """Racing blocks are right in small models, which have few."""
    write_shape("Llama-3.2-1B", form, tmp_path / "model", lambda done, total: None)
    runner = load_on_card(tmp_path / "model", num_rows=256)
    for num_rows in (256, 40):
        check_rows_together(runner, num_rows, 12)
