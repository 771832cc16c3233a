"""Delayed Ctrl-C: it takes effect at the end, once, whatever happens inside; an interrupted step changes nothing."""

import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from interrupted_lines import strike_at
from page_device import PageDevice
from row_steps import GREEDY, PROMPT, WARM, go_on, start
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.runners.base import Span
from llmcli.runners.host.llama import Llama
from llmcli.runners.interrupts import interrupts_held_back
from llmcli.runners.stepping import SteppingRunner
from llmcli.runners.torch.load import load
from llmcli.sampling.params import Sampler, SamplingParams


def strike() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_strikes_at_the_end() -> None:
    done = []

    def work() -> None:
        with interrupts_held_back():
            strike()
            with interrupts_held_back():
                strike()
            done.append(1)
        done.append(2)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("is_struck", [False, True])
def test_an_error_inside_is_told(is_struck: bool) -> None:
    def work() -> None:
        with interrupts_held_back():
            if is_struck:
                strike()
            raise ValueError("own")

    with pytest.raises(KeyboardInterrupt if is_struck else ValueError) as caught:
        work()
    assert "own" in str(caught.value.__context__ if is_struck else caught.value)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("usual", [signal.SIG_IGN, signal.SIG_DFL])
def test_who_handles_none_is_left_alone(usual: Any) -> None:
    before = signal.signal(signal.SIGINT, usual)
    try:
        with interrupts_held_back():
            assert signal.getsignal(signal.SIGINT) is usual
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_get_none() -> None:
    seen = []

    def work() -> None:
        with interrupts_held_back():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("interrupts") / "model", with_tokenizer=False)


MIROSTAT = Sampler(SamplingParams(temperature=1.0, top_p=1.0, mirostat_tau=3, mirostat_eta=0.4), seed=3)


@pytest.mark.parametrize("sampler", [Sampler(WARM, seed=5), MIROSTAT, GREEDY], ids=["warm", "mirostat", "greedy"])
def test_interrupted_steps_are_run_again(folder: Path, sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a random forward pass, and in the moment between the device's work and the row's."""
    runner = load(open_model(folder), max_seq_len=200, num_rows=2)
    expected = [go_on(runner, start(runner, PROMPT[: 20 + row], sampler), 40) for row in range(2)]
    for row in list(runner._rows):
        runner.close(row)
    rows = [start(runner, PROMPT[: 20 + row], sampler) for row in range(2)]
    rng = random.Random(1)
    forward, device = Llama.forward, runner._device
    passes_left = 0

    def interrupted_forward(*arguments: Any) -> Any:
        nonlocal passes_left
        passes_left -= 1
        if passes_left == 0:
            raise KeyboardInterrupt
        return forward(*arguments)

    class Late:
        """Does all of its work, and is interrupted then."""

        def __getattr__(self, name: str) -> Any:
            return getattr(device, name)

        def run(self, works: Any) -> None:
            device.run(works)
            raise KeyboardInterrupt

    monkeypatch.setattr(Llama, "forward", interrupted_forward)
    found: list[list[int]] = [[], []]
    num_interrupts = 0
    while len(found[0]) < 40:
        held = [(runner.num_tokens(row), list(runner.token_ids(row))) for row in rows]
        passes_left = rng.randint(1, 4)
        runner._device = Late() if rng.random() < 0.2 else device  # type: ignore[assignment]
        try:
            step = runner.queue([Span(row) for row in rows])
        except KeyboardInterrupt:
            num_interrupts += 1
            assert [(runner.num_tokens(row), list(runner.token_ids(row))) for row in rows] == held
            continue
        for place, chosen in enumerate(step.choices()):
            found[place].append(chosen[-1].token_id)  # type: ignore[index]
    assert found == expected
    assert num_interrupts > 10


def test_an_interrupted_prompt_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(open_model(folder), max_seq_len=200)
    expected = go_on(runner, start(runner, PROMPT[:50]), 5)
    runner = load(open_model(folder), max_seq_len=200)
    row = runner.open(PROMPT[:50], GREEDY)
    runner.queue([Span(row, tuple(PROMPT[:16]), "none")])
    with monkeypatch.context() as patch:
        patch.setattr(Llama, "forward", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            runner.queue([Span(row, tuple(PROMPT[16:32]), "none")])
    assert runner.num_tokens(row) == 16
    assert runner.open(PROMPT[:50]) != row
    for begin, end in ((16, 32), (32, 48), (48, 50)):
        runner.queue([Span(row, tuple(PROMPT[begin:end]), "last" if end == 50 else "none")])
    assert go_on(runner, row, 5) == expected


@pytest.mark.parametrize("verb", ["open", "fork", "close", "keep", "change_prompt", "reserve"])
def test_a_row_changes_whole_or_not_at_all(verb: str) -> None:
    """A Ctrl-C at each moment: pages and slots are those of the open rows, after any end."""
    for moment in range(40):
        device = PageDevice(lambda history, sampler: 1, num_rows=2, chunk=16)
        runner = SteppingRunner(device)
        row = runner.open(list(range(40)), GREEDY)
        for begin, end in ((0, 16), (16, 32), (32, 40)):
            runner.queue([Span(row, tuple(range(begin, end)), "last" if end == 40 else "none")])
        verbs = {
            "open": lambda runner=runner: runner.open(list(range(50)), GREEDY),
            "fork": lambda runner=runner, row=row: runner.fork(row, 35, GREEDY),
            "close": lambda runner=runner, row=row: runner.close(row),
            "keep": lambda runner=runner, row=row: runner.keep(row, 7),
            "change_prompt": lambda runner=runner, row=row: runner.change_prompt(row, [0, 1, 2, 9], GREEDY),
            "reserve": lambda runner=runner, row=row: runner.reserve(row, 90),
        }
        strike_at(("stepping.py", "pages.py"), moment + 1, verbs[verb])
        for open_row in list(runner._rows):
            runner.close(open_row)
        assert runner.free_pages == runner.limits.num_pages
        assert sorted(runner._free_slots) == [0, 1]
