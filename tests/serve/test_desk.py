"""Requests at the desk, the worker that runs the engine, and the engine that is asked from elsewhere."""

import asyncio
import pickle
import random
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
from loop import in_loop
from paged import ENDLESS, hold_to_nothing, ids_alone, make_request, open_desk, open_scheduler
from starlette.requests import ClientDisconnect

from llmcli import __version__
from llmcli.engine.remote.link import EngineState, FrontEnd
from llmcli.engine.remote.worker import AskedEngine, EngineFacts, Job, OpenedEngine, Worker
from llmcli.engine.request import Event, Failed, Finished, Request, Timings, Token
from llmcli.engine.texts import Usage
from llmcli.errors import DeviceError, InsufficientMemoryError, UsageError
from llmcli.schema.constraint import Constraint
from llmcli.serve.refusal import Refusal
from llmcli.serve.service import ClientLimits, Desk, Service, Texts, unless_gone
from llmcli.tokenizer.base import Tokenizer


async def read(texts: Texts) -> dict[tuple[int, int], list[int]]:
    """The tokens of every text, by request and sample, as they came; the ends must repeat them."""
    tokens: dict[tuple[int, int], list[int]] = {}
    ends: dict[tuple[int, int], list[int]] = {}
    with texts:
        async for batch in texts.batches():
            for index, event in batch:
                if isinstance(event, Token):
                    tokens.setdefault((index, event.sample), []).append(event.token_id)
                elif isinstance(event, Finished):
                    ends[index, event.sample] = list(event.token_ids)
    assert tokens == ends
    return ends


@in_loop
async def test_many_clients_read_their_own_texts(tokenizer: Tokenizer) -> None:
    async with open_desk(open_scheduler(tokenizer), max_waiting=100) as desk:
        pairs = [[make_request([97, seed], seed), make_request([98, seed], seed, 2)] for seed in range(20)]
        for pair, read_texts in zip(
            pairs, await asyncio.gather(*(read(desk.submit(pair)) for pair in pairs)), strict=True
        ):
            assert read_texts == {
                (index, sample): ids_alone(request, sample)
                for index, request in enumerate(pair)
                for sample in request.samples
            }
        assert desk.num_texts == 0


@in_loop
async def test_too_many_are_refused_until_others_end(tokenizer: Tokenizer) -> None:
    async with open_desk(open_scheduler(tokenizer, num_rows=2), max_waiting=3) as desk:
        texts = desk.submit([make_request([97], 1, num_samples=5)])
        with pytest.raises(Refusal, match="5 texts are waiting or running") as caught:
            desk.submit([make_request([97], 2)])
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        await read(texts)
        assert await read(desk.submit([make_request([97], 2)])) == {(0, 0): ids_alone(make_request([97], 2), 0)}


@in_loop
async def test_more_texts_than_ever_fit_are_no_matter_of_time(tokenizer: Tokenizer) -> None:
    async with open_desk(open_scheduler(tokenizer, num_rows=2), max_waiting=3) as desk:
        for requests, param in (([make_request([97], 1, num_samples=6)], "n"), ([make_request([97], 1)] * 6, "prompt")):
            with pytest.raises(Refusal, match="6 texts, expected at most 5: 2 that run and 3 that may") as caught:
                desk.submit(requests)
            assert (caught.value.status, caught.value.param) == (400, param)
        with desk.submit([make_request([97], 1)] * 5):  # as many as fit
            pass


@in_loop
async def test_who_leaves_frees_rows_and_queue(tokenizer: Tokenizer) -> None:
    scheduler = open_scheduler(tokenizer, num_rows=2)
    async with open_desk(scheduler, max_waiting=4) as desk:
        for _ in range(50):
            with desk.submit([make_request([97], ENDLESS, num_samples=6, most=900)]) as texts:
                async for _ in texts.batches():
                    break
            assert desk.num_texts == 0
        request = make_request([98], 4)
        assert await read(desk.submit([request])) == {(0, 0): ids_alone(request, 0)}
    assert scheduler.runner.free_pages == scheduler.runner.limits.num_pages


@in_loop
async def test_a_text_that_ended_just_before_the_engine_is_whole() -> None:
    here, there = Pipe()
    engine = FrontEnd(here, EngineState(Usage(1), 0, 0, 0), on_lost=lambda: None)
    desk = Desk(engine, max_waiting=2)
    texts, cut = desk.submit([make_request([97], 1)]), desk.submit([make_request([97], 2)])
    _, key, *_ = there.recv()
    there.send(("events", [(key, Finished(0, "", "b", (98,), "length", Timings(0, 0.0, 0.0, 0, 0.0)))], None))
    there.close()
    async for batch in texts.batches():
        assert [(index, event.text) for index, event in batch if isinstance(event, Finished)] == [(0, "b")]
    with pytest.raises(DeviceError, match="has ended"):
        await read(cut)


class SlowSchemas:
    """A model whose schemas are read when `may_end` is set."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.num_read = 0

    def grammar(self, constraint: Constraint) -> None:
        self.num_read += 1
        self.may_end.wait(30)
        raise UsageError("no schema")


@in_loop
async def test_a_schema_is_waited_for_as_long_as_for_an_answer(tokenizer: Tokenizer) -> None:
    model = SlowSchemas()
    async with open_desk(open_scheduler(tokenizer, num_rows=1), max_waiting=1) as desk:
        service = Service(model, desk, ClientLimits(1000, 0.2))  # type: ignore[arg-type]

        async def ask() -> None:
            with desk.waiting(1, "n"):
                async with service.limits.timed():
                    await service.read_schema("a client", Constraint("regex", "regex", "a"))

        asked = [asyncio.create_task(ask()) for _ in range(3)]
        first, second, third = await asyncio.gather(*asked, return_exceptions=True)
        for refusal, status in ((first, 504), (second, 504), (third, 429)):
            assert isinstance(refusal, Refusal)
            assert refusal.status == status
        assert desk.num_texts == 0
        model.may_end.set()
        with pytest.raises(Refusal, match="no schema"):
            await ask()
        assert model.num_read == 2  # the second never began
        service.close()


@in_loop
async def test_who_leaves_while_a_schema_waits_is_noticed(tokenizer: Tokenizer) -> None:
    model, leaves = SlowSchemas(), asyncio.Event()

    async def receive() -> dict[str, str]:
        await leaves.wait()
        return {"type": "http.disconnect"}

    async with open_desk(open_scheduler(tokenizer, num_rows=1), max_waiting=1) as desk:
        service = Service(model, desk, ClientLimits(1000, None))  # type: ignore[arg-type]

        async def ask() -> None:
            with desk.waiting(1, "n"):
                await unless_gone(service.read_schema("a client", Constraint("regex", "regex", "a")), receive)

        asked = [asyncio.create_task(ask()) for _ in range(2)]
        while not model.num_read:
            await asyncio.sleep(0.01)
        leaves.set()
        first, second = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
        assert isinstance(first, ClientDisconnect)
        assert isinstance(second, ClientDisconnect)
        assert desk.num_texts == 0
        leaves.clear()
        model.may_end.set()
        with pytest.raises(Refusal, match="no schema"):
            await ask()
        assert model.num_read == 2  # the second never began
        service.close()


@in_loop
async def test_the_state_is_told_while_a_step_runs(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, may_end = open_scheduler(tokenizer), threading.Event()
    step = scheduler.step

    def slow_step() -> list[Event]:
        may_end.wait(30)
        return step()

    monkeypatch.setattr(scheduler, "step", slow_step)
    async with open_desk(scheduler, max_waiting=4) as desk:
        reading = asyncio.create_task(read(desk.submit([make_request([97], 1)])))
        for _ in range(3):
            state = await asyncio.wait_for(desk.engine.state(), 10)
            assert state.free_pages == state.num_pages
        may_end.set()
        await reading


# The worker's thread: each of many requests gets its own text, cancelled ones end, faults reach every request.


SECONDS = 30


class Listener:
    """Records what the worker delivers, and lets a test wait for it."""

    def __init__(self) -> None:
        self.events: dict[Job, list[Event]] = defaultdict(list)
        self._has_more = threading.Condition()

    def __call__(self, events: Sequence[tuple[Job, Event]]) -> None:
        with self._has_more:
            for job, event in events:
                self.events[job].append(event)
            self._has_more.notify_all()

    def wait_for_ends(self, job: Job, count: int = 1) -> list[Finished | Failed]:
        def ends() -> list[Finished | Failed]:
            return [event for event in self.events[job] if isinstance(event, Finished | Failed)]

        with self._has_more:
            assert self._has_more.wait_for(lambda: len(ends()) >= count, SECONDS)
            return ends()

    def wait_for_event(self, job: Job) -> None:
        with self._has_more:
            assert self._has_more.wait_for(lambda: self.events[job], SECONDS)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture(params=[False, True], ids=["waits", "works ahead"])
def worker(tokenizer: Tokenizer, listener: Listener, request: pytest.FixtureRequest) -> Iterator[Worker]:
    worker = Worker(open_scheduler(tokenizer, works_ahead=request.param), listener)
    worker.start()
    yield worker
    worker.stop(SECONDS)


def test_requests_from_many_threads_have_their_own_texts(worker: Worker, listener: Listener) -> None:
    rng = random.Random(0)
    requests = [
        make_request(rng.choices(range(97, 123), k=rng.randint(1, 40)), seed, 1 + seed % 3) for seed in range(60)
    ]
    jobs: dict[int, Job] = {}

    def submit(first: int) -> None:
        for index in range(first, 60, 6):
            jobs[index] = worker.submit(requests[index])

    threads = [threading.Thread(target=submit, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, request in enumerate(requests):
        ends = listener.wait_for_ends(jobs[index], len(request.samples))
        texts = {end.sample: list(end.token_ids) for end in ends if isinstance(end, Finished)}
        assert texts == {sample: ids_alone(request, sample) for sample in request.samples}


def test_a_cancelled_request_gives_its_row_back(tokenizer: Tokenizer, listener: Listener) -> None:
    scheduler = open_scheduler(tokenizer, num_rows=1)
    worker = Worker(scheduler, listener)
    worker.start()
    long = worker.submit(make_request([97], seed=ENDLESS, most=900))
    listener.wait_for_event(long)
    worker.cancel(long)
    short = make_request([98], seed=4)
    (end,) = listener.wait_for_ends(worker.submit(short))
    assert isinstance(end, Finished)
    assert list(end.token_ids) == ids_alone(short, 0)
    worker.stop(SECONDS)
    assert scheduler.is_idle
    assert scheduler.runner.free_pages == scheduler.runner.limits.num_pages


def test_a_fault_of_the_device_fails_all_and_stays(
    worker: Worker, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> list[Event]:
        raise DeviceError("the card is gone")

    monkeypatch.setattr(worker._scheduler, "step", fail)
    jobs = [worker.submit(make_request([97], seed=1)), worker.submit(make_request([98], seed=1, num_samples=2))]
    for job in jobs:
        (end,) = listener.wait_for_ends(job)
        assert isinstance(end, Failed)
        assert str(end.error) == "the card is gone"
    monkeypatch.undo()
    (late,) = listener.wait_for_ends(worker.submit(make_request([99], seed=1)))
    assert isinstance(late, Failed)
    assert str(worker.fault) == "the card is gone"


def test_after_memory_ran_out_others_are_served(
    worker: Worker, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = worker._scheduler.step
    faults = [InsufficientMemoryError("out of memory")]

    def fail_once() -> list[Event]:
        if faults and not worker._scheduler.is_idle:
            raise faults.pop()
        return step()

    monkeypatch.setattr(worker._scheduler, "step", fail_once)
    (end,) = listener.wait_for_ends(worker.submit(make_request([97], seed=1)))
    assert isinstance(end, Failed)
    request = make_request([98], seed=2)
    (end,) = listener.wait_for_ends(worker.submit(request))
    assert isinstance(end, Finished)
    assert list(end.token_ids) == ids_alone(request, 0)
    assert worker.fault is None


class PanicException(BaseException):
    """As in libraries written in Rust: not an Exception."""


@pytest.mark.parametrize("bug", [KeyError("row 7"), PanicException("row 7")])
def test_a_bug_names_its_class_and_ends_the_service(
    worker: Worker, listener: Listener, monkeypatch: pytest.MonkeyPatch, bug: BaseException
) -> None:
    def fail() -> list[Event]:
        raise bug

    monkeypatch.setattr(worker._scheduler, "step", fail)
    (end,) = listener.wait_for_ends(worker.submit(make_request([97], seed=1)))
    assert isinstance(end, Failed)
    assert f"please report it: {type(bug).__name__}" in str(end.error)
    assert worker.fault is end.error


def test_a_request_is_prepared_beside_the_rows(worker: Worker, listener: Listener) -> None:
    """Others continue meanwhile; one that cannot be prepared fails alone, and a dropped one never begins."""
    may_go_on = threading.Event()
    asked = make_request([98], seed=4)

    def replace_slowly(request: Request) -> Request:
        assert may_go_on.wait(SECONDS)
        return asked

    def refuse(request: Request) -> Request:
        raise UsageError("no such schema")

    def panic(request: Request) -> Request:
        raise PanicException("no such state")

    late = worker.submit(make_request([97], seed=1), prepare=replace_slowly)
    dropped = worker.submit(make_request([97], seed=2), prepare=replace_slowly)
    refused = worker.submit(make_request([97], seed=3), prepare=refuse)
    panicked = worker.submit(make_request([97], seed=3), prepare=panic)
    worker.cancel(dropped)
    listener.wait_for_ends(worker.submit(make_request([99], seed=5)))
    assert not listener.events[late]
    may_go_on.set()
    (end,) = listener.wait_for_ends(late)
    assert isinstance(end, Finished)
    assert list(end.token_ids) == ids_alone(asked, 0)
    (end,) = listener.wait_for_ends(refused)
    assert isinstance(end, Failed)
    assert str(end.error) == "no such schema"
    (end,) = listener.wait_for_ends(panicked)
    assert isinstance(end, Failed)
    assert "PanicException: no such state" in str(end.error)
    listener.wait_for_ends(worker.submit(make_request([97], seed=6)))
    assert not listener.events[dropped]


# `AskedEngine`: its texts, and which errors are a request's and which its own.


def opened(scheduler: Any) -> AskedEngine:
    engine = AskedEngine()
    facts = EngineFacts("paper", 1.5, {"config.json": "7 bytes"}, 4)
    assert engine.open(lambda: OpenedEngine(scheduler, hold_to_nothing, facts)) is facts
    return engine


def test_requests_come_and_texts_go(tokenizer: Tokenizer) -> None:
    engine = opened(open_scheduler(tokenizer))
    assert engine.version() == __version__
    assert engine.exchange([], 0.0).ended == []
    requests = {number: make_request([number + 97], number) for number in range(20)}
    texts = {}
    waiting = [(number, request, None) for number, request in requests.items()]
    while len(texts) < len(requests):
        answer = engine.exchange(waiting[:3], SECONDS)
        del waiting[:3]
        assert answer.fault is None
        for event in answer.ended:
            assert isinstance(event, Finished)
            assert event.request not in texts
            texts[event.request] = list(event.token_ids)
    assert texts == {number: ids_alone(request, 0) for number, request in requests.items()}
    assert answer.usage.steps > 0
    assert len(pickle.dumps(answer)) < 2000


def test_a_grammar_that_cannot_be_held_fails_alone(tokenizer: Tokenizer) -> None:
    engine = opened(open_scheduler(tokenizer))
    grammar: Any = SimpleNamespace(name="--regex")
    ended = list(engine.exchange([(7, make_request([97], 1), grammar)], SECONDS).ended)
    (failed,) = ended
    assert isinstance(failed, Failed)
    assert (failed.request, type(failed.error), str(failed.error)) == (7, UsageError, "--regex cannot be held here")
    assert len(engine.exchange([(8, make_request([97], 1), None)], SECONDS).ended) == 1


@pytest.mark.parametrize("error", [DeviceError("the card fell off"), InsufficientMemoryError("full"), OSError("odd")])
def test_an_error_of_the_device_is_no_text_of_any_request(error: Exception) -> None:
    class Broken:
        usage, is_idle, num_waiting = Usage(4), True, 0

        def submit(self, request: Request) -> int:
            self.is_idle = False
            return 1

        def step(self) -> list[Event]:
            raise error

        def interrupt(self) -> list[Event]:
            self.is_idle = True
            return []

    engine = opened(Broken())
    answer = engine.exchange([(1, make_request([97], 1), None)], SECONDS)
    assert answer.ended == []
    assert answer.fault is not None
    assert str(error) in str(answer.fault)
    assert isinstance(pickle.loads(pickle.dumps(answer)).fault, DeviceError)


def test_a_model_that_cannot_be_opened_is_an_answer() -> None:
    def refuse() -> OpenedEngine:
        raise UsageError("no such model")

    told = AskedEngine().open(refuse)
    assert (type(told), str(told)) == (UsageError, "no such model")
