"""After any fault of a draft the text is the text without drafts; the fault is reported once."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from draft_runs import loop, request, run, told
from page_device import PageDevice
from scripted_drafts import ScriptedGuesses, ScriptedSource
from tiny_models import write_broken_llama, write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.engine.draft_sources import DraftModel
from llmcli.engine.drafts import Drafting
from llmcli.engine.request import Finished
from llmcli.errors import DeviceError, LLMCliError
from llmcli.kernels.device import device_errors
from llmcli.runners.base import Runner, Span, Step
from llmcli.runners.numpy.load import load as load_on_numpy
from llmcli.runners.stepping import SteppingRunner
from llmcli.sampling.params import Sampler
from llmcli.tokenizer.base import Tokenizer


class Faulty(ScriptedSource):
    """Fails at its n-th call."""

    def __init__(self, fails_at: int):
        super().__init__(loop, 1.0)
        self.left = fails_at

    def ask(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise DeviceError("the draft model is out of memory")

    def begin(self, prompt: Sequence[int], sampler: Sampler) -> ScriptedGuesses:
        self.ask()
        return FaultyGuesses(self, prompt, sampler)


class FaultyGuesses(ScriptedGuesses):
    source: Faulty

    def extend(self, token_ids: Sequence[int]) -> None:
        self.source.ask()
        super().extend(token_ids)

    def guess(self, count: int) -> tuple[int, ...]:
        self.source.ask()
        return super().guess(count)


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4, 5, 10])
def test_a_fault_of_a_draft_never_costs_the_text(tokenizer: Tokenizer, fails_at: int) -> None:
    problems: list[LLMCliError] = []
    expected = told(run(SteppingRunner(PageDevice(loop, num_rows=2)), tokenizer, request(samples=(0, 1))))
    drafting = Drafting(Faulty(fails_at), least=2, on_problem=problems.append)
    found = told(run(SteppingRunner(PageDevice(loop, num_rows=2)), tokenizer, request(samples=(0, 1)), drafting))
    assert found == expected
    assert [str(problem) for problem in problems] == ["the draft model is out of memory"]


@pytest.mark.parametrize("fault", ["NaN", "memory"])
def test_a_draft_model_that_fails_while_it_runs(
    tokenizer: Tokenizer, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(write_tiny_llama(tmp_path / "model"))
    expected = told(run(load_on_numpy(model, max_seq_len=200), tokenizer, request()))
    drafter = load_on_numpy(model, max_seq_len=200)
    broken = drafter._device._model  # type: ignore[attr-defined]
    logits = type(broken).logits

    def fail(self: Any, hidden: Any) -> Any:
        if self is broken and fault == "memory":
            raise MemoryError
        return logits(self, hidden) * (float("nan") if self is broken else 1)

    monkeypatch.setattr(type(broken), "logits", fail)
    problems: list[LLMCliError] = []
    drafting = Drafting(DraftModel(drafter), least=3, on_problem=problems.append)
    assert told(run(load_on_numpy(model, max_seq_len=200), tokenizer, request(), drafting)) == expected
    assert len(problems) == 1
    assert fault in str(problems[0])


@pytest.mark.parametrize("fault", ["NaN", "the card's memory is full"])
def test_a_draft_model_that_fails_where_the_model_runs(
    tokenizer: Tokenizer, load: Callable[..., Runner], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights give NaN, or CuPy finds no room in the middle of the text."""
    model = open_model(write_tiny_llama(tmp_path / "model"))
    broken = open_model(write_broken_llama(tmp_path / "broken")) if fault == "NaN" else model
    expected = told(run(load(model, max_seq_len=200), tokenizer, request()))
    drafter = load(broken, max_seq_len=200)
    step, num_steps = drafter.queue, 0

    def queue(spans: Sequence[Span]) -> Step:
        nonlocal num_steps
        num_steps += 1
        if fault != "NaN" and num_steps == 9:
            with device_errors():
                raise pytest.importorskip("cupy").cuda.memory.OutOfMemoryError(2**30, 2**35)
        return step(spans)

    monkeypatch.setattr(drafter, "queue", queue)
    problems: list[LLMCliError] = []
    drafting = Drafting(DraftModel(drafter), least=3, on_problem=problems.append)
    assert told(run(load(model, max_seq_len=200), tokenizer, request(), drafting)) == expected
    assert [fault in str(problem) for problem in problems] == [True]
    assert (drafting.usage.num_kept > 0) == (fault != "NaN")


def test_a_runner_that_verifies_nothing_is_given_no_drafts(tokenizer: Tokenizer) -> None:
    device, source = PageDevice(loop, max_drafts=0), ScriptedSource(loop, 1.0)
    events = run(SteppingRunner(device), tokenizer, request(), Drafting(source, least=7))
    assert isinstance(events[-1], Finished)
    assert not any(work.drafts for works in device.works for work in works)
