"""Rows are shared between clients: a small request waits for two steps, and every client gets its turn."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from page_device import PageDevice

from llmcli.engine.request import Event, Finished, PromptScored, Request, Token
from llmcli.engine.scheduler import Scheduler
from llmcli.engine.texts import FairOrder
from llmcli.runners.stepping import SteppingRunner
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.base import Tokenizer


def next_token(history: Sequence[int], sampler: Sampler) -> int:
    return 97 + hash((*history, sampler.seed, sampler.sample_index)) % 26


def request(
    client: object, seed: int, most: int, num_samples: int = 1, prompt: Sequence[int] = (97,), *, scores: bool = False
) -> Request:
    sampler = Sampler(SamplingParams(), seed=seed, num_prompt_tokens=len(prompt), eos_token_ids=frozenset())
    views = 0 if scores else None
    how = {"num_alternatives": views, "scores_prompt": scores, "client": client}
    return Request(tuple(prompt), sampler, tuple(range(num_samples)), most, **how)  # type: ignore[arg-type]


def open_scheduler(tokenizer: Tokenizer, **how: Any) -> Scheduler:
    return Scheduler(SteppingRunner(PageDevice(next_token, **how)), tokenizer)


def ids_alone(asked: Request, sample: int) -> list[int]:
    sampler, token_ids = replace(asked.sampler, sample_index=sample), []
    while len(token_ids) < (asked.max_new_tokens or 0):
        token_ids.append(next_token([*asked.prompt_token_ids, *token_ids], sampler))
    return token_ids


@pytest.fixture(params=[False, True], ids=["waits", "works ahead"])
def scheduler(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Scheduler:
    device = PageDevice(next_token, num_rows=4, works_ahead=request.param, joins_prompts=True)
    return Scheduler(SteppingRunner(device), tokenizer)


def steps_until_token(scheduler: Scheduler, number: int) -> int:
    for num_steps in range(1, 1000):
        if any(isinstance(event, Token) and event.request == number for event in scheduler.step()):
            return num_steps
    raise AssertionError("it has no token")


def run_to_end(scheduler: Scheduler) -> list[Event]:
    events: list[Event] = []
    while not scheduler.is_idle:
        events += scheduler.step()
    return events


@pytest.mark.parametrize("num_samples", [1, 128], ids=["200 clients", "200 clients with 128 texts each"])
def test_a_short_request_waits_two_steps(scheduler: Scheduler, num_samples: int) -> None:
    for client in range(200):
        scheduler.submit(request(client, client, 900, num_samples))
    for _ in range(300):
        scheduler.step()
    waits = []
    for index in range(20):
        waits.append(steps_until_token(scheduler, scheduler.submit(request(f"new {index}", index, 1))))
        for _ in range(7):
            scheduler.step()
    assert max(waits) <= 2  # a step that works ahead is read one step later


def test_texts_that_lend_their_rows_stay_the_same(scheduler: Scheduler) -> None:
    rng = random.Random(3)
    asked: dict[int, Request] = {}
    ends: dict[tuple[int, int], list[int]] = {}
    for client in range(6):
        one = request(client, client, 300, num_samples=1 + client % 3)
        asked[scheduler.submit(one)] = one
    while not scheduler.is_idle:
        if len(asked) < 60 and rng.random() < 0.2:
            one = request(f"new {len(asked)}", len(asked), rng.randint(1, 20), prompt=rng.choices(range(97, 123), k=70))
            asked[scheduler.submit(one)] = one
        for event in scheduler.step():
            if isinstance(event, Finished):
                ends[event.request, event.sample] = list(event.token_ids)
    assert ends == {(number, sample): ids_alone(one, sample) for number, one in asked.items() for sample in one.samples}
    assert scheduler.usage.preemptions > 0
    assert scheduler.runner.free_pages == scheduler.runner.limits.num_pages


def test_a_lent_row_computes_little_again(tokenizer: Tokenizer) -> None:
    """The pages of the waiting text are there when it continues."""
    device = PageDevice(next_token, num_rows=1)
    scheduler = Scheduler(SteppingRunner(device), tokenizer)
    long = scheduler.submit(request("a", 1, 600))
    for _ in range(500):
        scheduler.step()
    device.works.clear()
    scheduler.submit(request("b", 2, 1))
    ends = [event.request for event in run_to_end(scheduler) if isinstance(event, Finished)]
    assert ends[-1] == long
    assert scheduler.usage.preemptions == 1
    num_run = sum(len(work.token_ids) for works in device.works for work in works)
    assert num_run < 100 + 2 + 70  # what was left, the other text, and a page


def test_short_requests_without_end_let_long_ones_end(scheduler: Scheduler) -> None:
    """New clients keep 50 texts waiting, the server's bound on its queue; earlier ones end."""
    long = {scheduler.submit(request(client, client, 200)) for client in range(8)}
    num_short = 0
    for _ in range(10_000):
        while scheduler.num_waiting < 50:
            num_short += 1
            scheduler.submit(request(f"new {num_short}", num_short, 4))
        long -= {event.request for event in scheduler.step() if isinstance(event, Finished)}
        if not long:
            return
    raise AssertionError(f"{len(long)} requests wait for ever")


def test_rows_are_shared_out_between_clients(scheduler: Scheduler) -> None:
    """A client with one text of the same length gets a row although another client requested 100 texts first."""
    scheduler.submit(request("greedy", 1, 800, num_samples=100))
    for _ in range(20):
        scheduler.step()
    assert steps_until_token(scheduler, scheduler.submit(request("modest", 2, 800))) <= 4


def test_a_newcomer_finds_pages_that_a_longer_prompt_holds(tokenizer: Tokenizer) -> None:
    """No running text can release pages: the partly filled prompt starts again later."""
    scheduler = open_scheduler(tokenizer, num_rows=4, max_seq_len=1024, num_pages=66)
    asked = [scheduler.submit(request("long", 1, 10, prompt=[97] * 1000))]
    for _ in range(13):
        scheduler.step()
    asked.append(scheduler.submit(request("short", 2, 10, prompt=[98] * 400)))
    ends = []
    for _ in range(3000):
        ends += [event.request for event in scheduler.step() if isinstance(event, Finished)]
    assert ends == asked[::-1]


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 12))])
def test_clients_at_random_all_get_their_texts(tokenizer: Tokenizer, seed: int) -> None:
    """Prompts that run side by side, rows that change owner, cancelled requests: nothing breaks."""
    rng = random.Random(seed)
    scheduler = open_scheduler(
        tokenizer,
        num_rows=4,
        max_seq_len=1024,
        joins_prompts=True,
        works_ahead=seed % 2 == 0,
        num_pages=rng.choice([66, 256]),
    )
    open_texts: dict[tuple[int, int], list[int]] = {}
    for step in range(600):
        if step < 300 and rng.random() < 0.4 and scheduler.num_waiting < 30:
            prompt = [rng.randrange(97, 123) for _ in range(rng.choice([1, 20, 60, 120]))]
            one = request(rng.randrange(6), step, rng.choice([1, 1, 5, 40, 300]), rng.choice([1, 1, 1, 3]), prompt)
            number = scheduler.submit(one)
            if rng.random() < 0.2:
                scheduler.cancel(number)
            else:
                open_texts |= {(number, sample): ids_alone(one, sample) for sample in one.samples}
        for event in scheduler.step():
            if isinstance(event, Finished):
                assert list(event.token_ids) == open_texts.pop((event.request, event.sample))
    for event in run_to_end(scheduler):
        if isinstance(event, Finished):
            assert list(event.token_ids) == open_texts.pop((event.request, event.sample))
    assert open_texts == {}
    assert scheduler.runner.free_pages == scheduler.runner.limits.num_pages
    assert not scheduler._order._ends


def test_scores_come_before_the_end_of_their_request(tokenizer: Tokenizer) -> None:
    """Although another client's scores, which go first, end in between."""
    scheduler = open_scheduler(tokenizer, num_rows=4, max_seq_len=2048)
    num_views = {scheduler.submit(request("long", 1, 0, prompt=[97] * 1500, scores=True)): 0}
    events = [*scheduler.step(), *scheduler.step()]
    num_views[scheduler.submit(request("short", 2, 0, prompt=[98] * 40, scores=True))] = 0
    ended = {}
    for event in [*events, *run_to_end(scheduler)]:
        if isinstance(event, PromptScored):
            num_views[event.request] += len(event.views)
        elif isinstance(event, Finished):
            ended[event.request] = num_views[event.request]
    assert list(ended.values()) == [39, 1499]


def test_what_a_client_has_not_used_is_not_counted(tokenizer: Tokenizer) -> None:
    """A client whose texts ended early or were cancelled waits no longer than others for its next token."""
    scheduler = open_scheduler(tokenizer, num_rows=1, max_seq_len=8192)
    for seed in range(20):
        number = scheduler.submit(request("early", seed, 8000))
        steps_until_token(scheduler, number)
        scheduler.cancel(number)
    for seed in range(5):
        scheduler.submit(request("busy", seed, 50))
    for _ in range(20):
        scheduler.step()
    assert steps_until_token(scheduler, scheduler.submit(request("early", 1, 1))) <= 3


def test_scores_hold_up_no_row(tokenizer: Tokenizer) -> None:
    """They take no row, so a short text gets that of a long one while they run."""
    seconds = 0.03  # of a span: one a step
    scheduler = open_scheduler(tokenizer, num_rows=4, max_seq_len=16384, seconds=lambda position, num_tokens: seconds)
    for client in "abc":
        scheduler.submit(request(client, 1, 500))
    for _ in range(20):
        scheduler.step()
    scheduler.submit(request("scores", 1, 0, prompt=[97 + index % 20 for index in range(16300)], scores=True))
    for _ in range(3):
        scheduler.step()
    assert steps_until_token(scheduler, scheduler.submit(request("new", 1, 1, prompt=[98] * 5))) <= 3


def test_one_client_keeps_its_order() -> None:
    order = FairOrder()
    rng = random.Random(0)
    places = []
    for _ in range(1000):
        places.append(order.enter(None, rng.randint(1, 3000), rng.randint(0, 900)))
        order.pass_time(rng.randint(0, 300))
    assert places == sorted(places)
