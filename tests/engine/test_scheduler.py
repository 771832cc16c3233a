"""The scheduler against a plain model of it: every text is its row's text alone, whatever happens around it."""

import random
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
from page_device import PageDevice
from scripted_drafts import ScriptedSource
from tiny_models import EOS_ID

from llmcli.engine.drafts import Drafting
from llmcli.engine.request import (
    Event,
    Failed,
    Finished,
    KeptRow,
    PrefillProgress,
    PromptScored,
    Request,
    Scored,
    ScoreRequest,
    Token,
)
from llmcli.engine.scheduler import Scheduler
from llmcli.errors import CheckpointError
from llmcli.runners.stepping import SteppingRunner
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.base import Tokenizer

EOS = frozenset({EOS_ID, 7})
BROKEN = 99  # a seed whose rows fail at some length


def next_token(history: Sequence[int], sampler: Sampler) -> int:
    """Any function of all inputs: it makes a text long or short."""
    key = hash((tuple(history), sampler.seed, sampler.sample_index))
    if sampler.seed == BROKEN and len(history) % 13 == 12:
        raise CheckpointError("the logits are NaN")
    return EOS_ID if key % 40 == 0 else key % 256


def text_alone(request: Request, sample: int, max_seq_len: int) -> tuple[list[int], str]:
    """The text of a row alone, and why it ends: the plain model."""
    history, said = [*request.prompt_token_ids, *request.said], list(request.said)
    sampler = replace(request.sampler, sample_index=sample)
    while len(history) < max_seq_len:
        try:
            token_id = next_token(history, sampler)
        except CheckpointError:
            return said, "failed"
        history.append(token_id)
        said.append(token_id)
        if token_id in EOS:
            return said, "eos"
        if len(said) == request.max_new_tokens:
            return said, "length"
    return said, "context"


def make_request(prompt: Sequence[int], seed: int, samples: Sequence[int] = (0,), most: int | None = 30) -> Request:
    sampler = Sampler(SamplingParams(temperature=1.0), seed, eos_token_ids=EOS, num_prompt_tokens=len(prompt))
    return Request(tuple(prompt), sampler, tuple(samples), most)


def leave_the_way(rng: random.Random, request: Request, max_seq_len: int) -> Request:
    """A request whose text begins like another, and then differs."""
    sample = rng.choice(request.samples)
    said, _ = text_alone(request, sample, max_seq_len)
    said = [token_id for token_id in said[: rng.randint(0, 40)] if token_id not in EOS]
    if len(request.prompt_token_ids) + len(said) + 1 >= max_seq_len:
        return request
    return replace(request, samples=(sample,), said=(*said, 8), max_new_tokens=rng.choice([60, None]))


def run(scheduler: Scheduler, most_steps: int = 100_000) -> list[Event]:
    events: list[Event] = []
    for _ in range(most_steps):
        if scheduler.is_idle:
            return events
        events += scheduler.step()
    raise AssertionError("some text never ends")


def check(events: Sequence[Event], requests: dict[int, Request], max_seq_len: int) -> None:
    said: dict[tuple[int, int], list[int]] = defaultdict(list)
    ended: dict[tuple[int, int], str] = {}
    for event in events:
        if isinstance(event, Token):
            assert (event.request, event.sample) not in ended
            said[event.request, event.sample].append(event.token_id)
        elif isinstance(event, Finished):
            given = requests[event.request].said if event.request in requests else ()
            assert list(event.token_ids) == [*given, *said[event.request, event.sample]]
            ended[event.request, event.sample] = event.finish_reason
        elif isinstance(event, Failed):
            ended[event.request, event.sample] = "failed"
    expected = {
        (number, sample): text_alone(request, sample, max_seq_len)
        for number, request in requests.items()
        for sample in request.samples
    }
    assert ended == {key: reason for key, (_, reason) in expected.items()}
    chosen = {key: token_ids[len(requests[key[0]].said) :] for key, (token_ids, _) in expected.items()}
    assert {key: said[key] for key in expected} == chosen


BLOCKS = [*range(2), *(pytest.param(block, marks=pytest.mark.long) for block in range(2, 10))]


@pytest.mark.parametrize("block", BLOCKS)
def test_random_schedules(tokenizer: Tokenizer, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred a block: submits and cancels at random moments, rows and pages at random, prompts that begin alike."""
    for module in ("engine.scheduler", "runners.stepping"):  # without interrupts; it takes half of the time
        monkeypatch.setattr(f"llmcli.{module}.interrupts_held_back", nullcontext)
    for number in range(100):
        rng = random.Random(1000 * block + number)
        max_seq_len = rng.choice([40, 70, 130])
        fewest = -(-max_seq_len // 16)
        num_rows = rng.choice([1, 2, 3, 8])
        num_pages = rng.randint(fewest, fewest * num_rows)
        device = PageDevice(
            next_token,
            num_rows=num_rows,
            max_seq_len=max_seq_len,
            num_pages=num_pages,
            chunk=rng.choice([16, 32, 64]),
            works_ahead=rng.random() < 0.5,
            joins_prompts=rng.random() < 0.5,
        )
        runner = SteppingRunner(device)
        drafting = Drafting(ScriptedSource(next_token, chance=rng.random(), seed=number), least=rng.randint(1, 7))
        scheduler = Scheduler(runner, tokenizer, drafting=drafting if rng.random() < 0.5 else None)
        beginnings = [[rng.randrange(256) for _ in range(max_seq_len)] for _ in range(3)]
        requests: dict[int, Request] = {}
        cancelled: set[int] = set()
        events: list[Event] = []
        for _ in range(rng.randint(1, 15)):
            for _ in range(rng.randint(0, 3)):
                length = rng.randint(1, max_seq_len)
                beginning = rng.choice(beginnings)[: rng.randint(0, length)]
                prompt = (beginning + [rng.randrange(256) for _ in range(length)])[:length]
                samples = rng.sample(range(50), rng.choice([1, 1, 1, 2, 5]))
                request = make_request(prompt, rng.choice([1, 2, BROKEN]), samples, rng.choice([1, 5, 60, None]))
                request = replace(request, keeps_pages=rng.random() < 0.5)
                if requests and rng.random() < 0.3:
                    request = leave_the_way(rng, rng.choice(list(requests.values())), max_seq_len)
                requests[scheduler.submit(request)] = request
            for _ in range(rng.randint(0, 20)):
                events += scheduler.step()
                assert len({work.slot for work in device.works[-1]} if device.works else ()) <= num_rows
            if requests and rng.random() < 0.2:
                victim = rng.choice(list(requests))
                scheduler.cancel(victim)
                cancelled.add(victim)
        events += run(scheduler)
        check(
            [event for event in events if event.request not in cancelled],
            {key: request for key, request in requests.items() if key not in cancelled},
            max_seq_len,
        )
        assert runner.free_pages == num_pages, "a page is lost"
        assert runner._rows == {}
        assert scheduler.usage.most_rows <= num_rows


@pytest.mark.parametrize("works_ahead", [False, True])
def test_a_way_that_leaves_a_kept_text_runs_few_tokens(tokenizer: Tokenizer, works_ahead: bool) -> None:
    device = PageDevice(next_token, works_ahead=works_ahead, max_seq_len=200, chunk=16)
    scheduler = Scheduler(SteppingRunner(device), tokenizer)
    for seed in range(1000):  # until one is long enough
        request = replace(make_request(range(37), seed, most=100), keeps_pages=True)
        said, reason = text_alone(request, 0, 200)
        if reason == "length":
            break
    scheduler.submit(request)
    run(scheduler)
    device.works.clear()
    for place in (5, 60, 90):
        other = replace(request, said=(*said[:place], 8))
        number = scheduler.submit(other)
        events = run(scheduler)
        check(events, {number: other}, 200)
        works = [work for step in device.works for work in step if work.token_ids]
        assert sum(work.num_tokens for work in works) == (37 + place) % 16 + 1, (
            "only what lies behind the last full page"
        )
        device.works.clear()


@pytest.mark.parametrize(("said", "reason"), [((3, EOS_ID), "eos"), ((3, 4, 5), "length"), (tuple(b"a stop"), "stop")])
def test_a_text_that_is_over_with_what_it_was_given_ends_at_once(
    tokenizer: Tokenizer, said: tuple[int, ...], reason: str
) -> None:
    device = PageDevice(next_token)
    request = replace(make_request([1, 2], 1), said=said, max_new_tokens=max(len(said), 3), stop_strings=("stop",))
    scheduler = Scheduler(SteppingRunner(device), tokenizer)
    scheduler.submit(request)
    (event,) = run(scheduler)
    assert isinstance(event, Finished)
    assert (event.token_ids, event.finish_reason, event.timings.decode_tokens) == (said, reason, 0)
    assert device.works == []


def test_nothing_follows_a_cancelled_request(tokenizer: Tokenizer) -> None:
    runner = SteppingRunner(PageDevice(next_token, num_rows=2, works_ahead=True))
    scheduler = Scheduler(runner, tokenizer)
    first = scheduler.submit(make_request([1, 2, 3], 1, range(4), None))
    second = scheduler.submit(make_request([4, 5, 6], 2, (0,), 20))
    for _ in range(3):
        scheduler.step()
    scheduler.cancel(first)
    assert {event.request for event in run(scheduler)} <= {second}
    assert runner.free_pages == runner.limits.num_pages


def test_a_free_place_is_taken_at_once(tokenizer: Tokenizer) -> None:
    device = PageDevice(next_token, num_rows=4)
    scheduler = Scheduler(SteppingRunner(device), tokenizer)
    scheduler.submit(make_request([1, 2, 3], 5, range(40), 200))
    run(scheduler)
    usage = scheduler.usage
    lengths = [len(text_alone(make_request([1, 2, 3], 5, (0,), 200), sample, 1000)[0]) for sample in range(40)]
    # Every row is busy until fewer than four texts are left.
    assert usage.steps <= -(-sum(lengths) // 4) + max(lengths)
    assert usage.row_steps == sum(lengths)


def test_what_a_prompt_shares_is_counted(tokenizer: Tokenizer) -> None:
    scheduler = Scheduler(SteppingRunner(PageDevice(next_token, num_rows=2, chunk=16)), tokenizer)
    common = list(range(100))
    for number in range(10):
        scheduler.submit(make_request([*common, number], 1, (0,), 3))
    run(scheduler)
    assert scheduler.usage.prompt_tokens_shared == 9 * 96
    assert scheduler.usage.prompt_tokens_computed == 101 + 9 * 5


def test_the_youngest_gives_its_pages_back(tokenizer: Tokenizer) -> None:
    device = PageDevice(lambda history, sampler: 65, num_rows=2, max_seq_len=160, num_pages=12)
    scheduler = Scheduler(SteppingRunner(device), tokenizer)
    old = scheduler.submit(make_request([1] * 20, 1, (0,), 100))
    young = scheduler.submit(make_request([2] * 20, 1, (0,), 100))
    ends = [event.request for event in run(scheduler) if isinstance(event, Finished)]
    assert ends == [old, young]
    assert scheduler.usage.preemptions == 1


def test_scores_come_chunk_by_chunk(tokenizer: Tokenizer) -> None:
    scheduler = Scheduler(SteppingRunner(PageDevice(next_token, chunk=64)), tokenizer)
    number = scheduler.submit(ScoreRequest(tuple(range(200)), first=100))
    events = run(scheduler)
    assert {type(event) for event in events} == {Scored}
    assert {event.request for event in events} == {number}
    with pytest.raises(ValueError, match="expected 1 to 199"):
        ScoreRequest(tuple(range(200)), first=200)


@pytest.mark.parametrize("most", [0, 5])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_views_of_a_prompt_come_before_its_texts(tokenizer: Tokenizer, most: int, num_samples: int) -> None:
    """All of them, also if older rows take their pages meanwhile; then they are computed again."""
    begun_again = 0
    for num_pages in (14, 40):
        device = PageDevice(lambda history, sampler: 65, num_rows=3, max_seq_len=160, num_pages=num_pages, chunk=16)
        scheduler = Scheduler(SteppingRunner(device), tokenizer, wait_seconds=1e-6)
        scheduler.submit(make_request([1] * 60, 1, (0,), 90))
        events = [event for _ in range(38) for event in scheduler.step()]
        asked = replace(make_request([2] * 140, 1, tuple(range(num_samples)), most), num_alternatives=1)
        number = scheduler.submit(replace(asked, scores_prompt=True))
        events = [event for event in (*events, *run(scheduler)) if event.request == number]
        kinds = [type(event) for event in events]
        is_first = max(index for index, kind in enumerate(kinds) if kind is PromptScored)
        assert is_first < min(index for index, kind in enumerate(kinds) if kind in (Token, Finished))
        scored = [event for event in events if isinstance(event, PromptScored)]
        views = {event.first + index: view for event in scored for index, view in enumerate(event.views)}
        assert sorted(views) == list(range(1, 140))
        assert {view.chosen.token_id for view in views.values()} == {2}
        begun_again += sum(len(event.views) for event in scored) > 139
        ends = [event for event in events if isinstance(event, Finished)]
        assert [(len(event.token_ids), event.finish_reason) for event in ends] == [(most, "length")] * num_samples
        assert scheduler.runner.free_pages == scheduler.runner.limits.num_pages
    assert begun_again == 1


def test_of_a_prompt_the_last_logits_are_read_alone(tokenizer: Tokenizer) -> None:
    """For texts and for samples that share a prompt; for scores, the requested ones."""

    def read(request: Request | ScoreRequest) -> list[tuple[int, int]]:
        """For each span of a prompt: its tokens, and how many of them have readable logits."""
        device = PageDevice(lambda history, sampler: 65, num_rows=3, chunk=64)
        scheduler = Scheduler(SteppingRunner(device), tokenizer)
        scheduler.submit(request)
        run(scheduler)
        works = [work for works in device.works for work in works if len(work.token_ids) > 1]
        return [(work.num_tokens, work.num_tokens - work.logits_from) for work in works]

    assert read(make_request(list(range(150)), 1, (0,), 5)) == [(64, 0), (64, 0), (22, 1)]
    assert read(make_request(list(range(150)), 1, (0, 1), 5)) == [(64, 0), (64, 0), (22, 1)]
    said = replace(make_request(list(range(70)), 1, (0,), 20), said=(65,) * 12)
    assert read(said) == [(64, 0), (6, 0), (8, 0), (4, 1)]
    assert read(ScoreRequest(tuple(range(151)), first=100)) == [(64, 0), (64, 29), (22, 22)]


@pytest.mark.parametrize("works_ahead", [False, True])
def test_a_kept_row_goes_on_from_prompt_to_prompt(tokenizer: Tokenizer, works_ahead: bool) -> None:
    runner = SteppingRunner(PageDevice(next_token, chunk=16, works_ahead=works_ahead))
    kept, history = KeptRow(), list(range(40))
    for turn in range(5):
        request = make_request(history, turn, (0,), 10)
        scheduler = Scheduler(runner, tokenizer)
        number = scheduler.submit(Request(request.prompt_token_ids, request.sampler, (0,), 10, kept_row=kept))
        events = run(scheduler)
        check(events, {number: request}, 1000)
        computed = [event.num_computed for event in events if isinstance(event, PrefillProgress)]
        assert computed[0] == 0
        assert computed[-1] <= (40 if turn == 0 else 6)
        said = next(event.token_ids for event in events if isinstance(event, Finished))
        history = [*history, *said, *range(turn, turn + 5)]
    assert kept.row is not None
    runner.close(kept.row)
    assert runner.free_pages == runner.limits.num_pages


def test_an_interrupt_ends_what_runs_and_forgets_the_rest(tokenizer: Tokenizer) -> None:
    runner = SteppingRunner(PageDevice(lambda history, sampler: 65, num_rows=2))
    scheduler = Scheduler(runner, tokenizer)
    scheduler.submit(make_request([1, 2, 3], 1, range(5), 100))
    for _ in range(4):
        scheduler.step()
    ended = scheduler.interrupt()
    assert [(event.sample, event.finish_reason) for event in ended if isinstance(event, Finished)] == [
        (0, "interrupted"),
        (1, "interrupted"),
    ]
    assert scheduler.is_idle


def test_a_preempted_sample_that_fails_leaves_the_prompt_to_the_others(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = PageDevice(lambda history, sampler: 65, num_rows=2, max_seq_len=160, num_pages=12)
    runner = SteppingRunner(device)
    scheduler = Scheduler(runner, tokenizer)
    scheduler.submit(make_request([1] * 20, 1, (0, 1, 2), 100))
    events: list[Event] = []
    while not scheduler.usage.preemptions:
        events += scheduler.step()

    def fail(prompt: Sequence[int], sampler: Sampler | None = None, said: Sequence[int] = ()) -> int:
        monkeypatch.undo()
        raise CheckpointError("this row cannot be opened")

    monkeypatch.setattr(runner, "open", fail)
    events += run(scheduler)
    ends = {event.sample: type(event) for event in events if isinstance(event, (Finished, Failed))}
    assert ends == {0: Finished, 1: Failed, 2: Finished}
    assert runner.free_pages == runner.limits.num_pages
