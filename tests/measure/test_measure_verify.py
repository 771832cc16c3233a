"""Logits on two runners: equal ones are right, small errors are within the bound, wrong ones are found and named."""

import math
from typing import Any

import numpy as np
import pytest

from llmcli.checkpoint.model import open_model
from llmcli.measure.verify import compare_logits
from llmcli.resources import STORYTELLER, resource_folder
from llmcli.runners.base import Runner
from llmcli.runners.numpy.load import load

TOKENS = tuple(range(20, 51))


@pytest.fixture(scope="module")
def runner() -> Runner:
    return load(open_model(resource_folder(STORYTELLER)), max_seq_len=64)


class Changed:
    """A runner whose logits are changed by a function of the number of tokens that ran before, and of the logits."""

    def __init__(self, runner: Runner, change: Any):
        self._runner, self._change, self.spans = runner, change, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def queue(self, spans: Any) -> Any:
        self.spans.append(len(spans[0].token_ids))
        begin, step = self._runner.num_tokens(spans[0].row), self._runner.queue(spans)
        change = self._change

        class Step:
            def logits(self, span: int, first: int = 0) -> Any:
                return change(begin, step.logits(span, first).copy())

        return Step()


def test_equal_logits_are_right(runner: Runner) -> None:
    watched = Changed(runner, lambda begin, logits: logits)
    verdict = compare_logits(watched, runner, TOKENS)  # type: ignore[arg-type]
    assert (verdict.num_tokens, verdict.num_prompt_tokens, verdict.largest) == (31, 15, 0.0)
    assert verdict.is_right
    assert verdict.num_same_choices == 31
    assert watched.spans == [15] + [1] * 16


def test_roundings_to_sixteen_bits_are_right(runner: Runner) -> None:
    halved = Changed(runner, lambda begin, logits: logits.astype(np.float16).astype(np.float32))
    verdict = compare_logits(halved, runner, TOKENS)  # type: ignore[arg-type]
    assert 0 < verdict.part_of_bound < 0.5


@pytest.mark.parametrize(("place", "wrong"), [(3, 1.0), (14, 1.0), (15, 1.0), (30, 1.0), (20, math.nan)])
def test_one_wrong_logit_is_found(runner: Runner, place: int, wrong: float) -> None:
    def change(begin: int, logits: np.ndarray) -> np.ndarray:
        if begin <= place < begin + len(logits):
            logits[place - begin, 7] += wrong * logits[place - begin].std()
        return logits

    verdict = compare_logits(Changed(runner, change), runner, TOKENS)  # type: ignore[arg-type]
    assert not verdict.is_right
    assert (verdict.position, verdict.token_id) == (place, 7)
    if not math.isnan(wrong):
        assert verdict.largest == pytest.approx(verdict.spread, rel=1e-3)


def test_one_token_is_too_few(runner: Runner) -> None:
    with pytest.raises(ValueError, match="needed are 2"):
        compare_logits(runner, runner, TOKENS[:1])


@pytest.mark.cuda
@pytest.mark.parametrize("count", [2, 32, 300])
def test_the_storyteller_on_the_card(count: int) -> None:
    from llmcli.kernels.device import Device
    from llmcli.runners.cuda.load import load as load_on_card
    from llmcli.runners.torch.load import load as load_on_torch

    model = open_model(resource_folder(STORYTELLER))
    token_ids = [20 + place * 7 % 200 for place in range(count)]
    on_card = load_on_card(model, device=Device.open(0), max_seq_len=count)
    verdict = compare_logits(on_card, load_on_torch(model, max_seq_len=count, dtype="float32"), token_ids)
    print(f"{count} tokens: {verdict.part_of_bound:.3f} of the bound")
    assert verdict.is_right
    assert verdict.largest > 0, "the two are not the same program"
