"""The worker's thread: each of many requests gets its own text, cancelled ones end, faults reach every request."""

import random
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest
from paged import ENDLESS, ids_alone, make_request, open_scheduler

from llmcli.engine.events import Event, Failed, Finished
from llmcli.engine.request import Request
from llmcli.errors import DeviceError, InsufficientMemoryError, UsageError
from llmcli.serve.worker import Job, Worker
from llmcli.tokenizer.base import Tokenizer

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


def test_cancelling_twice_or_after_the_end_does_nothing(worker: Worker, listener: Listener) -> None:
    job = worker.submit(make_request([97], seed=1))
    listener.wait_for_ends(job)
    worker.cancel(job)
    worker.cancel(job)
    listener.wait_for_ends(worker.submit(make_request([97], seed=2)))


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
