"""`Worker`: runs a scheduler in its own thread, so that whoever talks to the other end never waits for the device.

Requests come from any thread. Events go out by one call a step, in the worker's thread.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from llmcli import __version__
from llmcli.engine.request import Event, Failed, Finished, Request
from llmcli.engine.texts import Usage
from llmcli.errors import DeviceError, InsufficientMemoryError, LLMCliError

if TYPE_CHECKING:
    from llmcli.engine.scheduler import Scheduler
    from llmcli.schema.grammar import Grammar

# Returns a request whose texts are held to a grammar. Raises: UsageError if that is impossible
Hold = Callable[[Request, "Grammar"], Request]


@dataclass(eq=False)
class Job:
    """A request and its place in the scheduler. `number` is None before it is there, and after its end.

    `key` is the submitter's name for it.
    """

    request: Request
    key: int = 0
    number: int | None = None
    num_open: int = 0  # texts that have not ended
    is_dropped: bool = False  # before it was in the scheduler


# The events of a step, job by job.
Deliver = Callable[[Sequence[tuple[Job, Event]]], None]


def holder(hold: Hold, grammar: "Grammar | None") -> Callable[[Request], Request] | None:
    """The `prepare` of `Worker.submit` for texts that follow a grammar; None if there is none."""
    return None if grammar is None else lambda request: hold(request, grammar)


class Worker:
    """See the module. `deliver` must return soon: no row continues meanwhile.

    `fault` is set once the device has failed; it then answers each request. Every exception is caught: a panic of a
    library written in Rust is no Exception, and would leave clients without an answer.
    """

    def __init__(self, scheduler: "Scheduler", deliver: Deliver):
        self.fault: LLMCliError | None = None
        self._scheduler = scheduler
        self._deliver = deliver
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._jobs: dict[int, Job] = {}
        self._preparer = ThreadPoolExecutor(1, "schemas")
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, request: Request, key: int = 0, prepare: Callable[[Request], Request] | None = None) -> Job:
        """Queue a request. Its events end with a `Finished` for each of its samples, or with one `Failed` for all.

        `prepare` makes the request that runs, in its own thread: no row waits for it.
        """
        job = Job(request, key)
        if prepare is None:
            self._commands.put(lambda: self._begin(job))
        else:
            self._preparer.submit(self._prepare, job, prepare)
        return job

    def cancel(self, job: Job) -> None:
        """Drop a request before the next step; events on their way may still come."""
        self._commands.put(lambda: self._drop(job))

    def stop(self, timeout_seconds: float | None = None) -> None:
        """End the thread after the current step; what is under way has no further events."""
        self._commands.put(None)
        self._preparer.shutdown(wait=False, cancel_futures=True)
        self._thread.join(timeout_seconds)

    def _prepare(self, job: Job, prepare: Callable[[Request], Request]) -> None:
        """Runs in the preparer's thread."""
        try:
            job.request = prepare(job.request)
        except BaseException as error:
            failed = Failed(0, as_ours(error))
            self._commands.put(lambda: self._deliver([(job, failed)]))
        else:
            self._commands.put(lambda: self._begin(job))

    # In the worker's thread

    def _run(self) -> None:
        while self._obey():
            try:
                events = self._scheduler.step()
            except BaseException as error:
                self._fail(error)
                continue
            if delivered := self._sorted(events):
                self._deliver(delivered)

    def _obey(self) -> bool:
        """Carry out the commands so far; wait for one if there is nothing else to do. False for the end."""
        while True:
            try:
                command = self._commands.get(block=self._scheduler.is_idle)
            except Empty:
                return True
            if command is None:
                return False
            try:
                command()
            except BaseException as error:
                self._fail(error)

    def _begin(self, job: Job) -> None:
        if job.is_dropped:
            return
        if self.fault is not None:
            self._deliver([(job, Failed(0, self.fault))])
            return
        try:
            job.number = self._scheduler.submit(job.request)
        except BaseException as error:
            self._deliver([(job, Failed(0, as_ours(error)))])
            return
        job.num_open = len(job.request.samples)
        self._jobs[job.number] = job

    def _drop(self, job: Job) -> None:
        job.is_dropped = True
        if job.number is not None:
            self._scheduler.cancel(job.number)
            self._forget(job)

    def _forget(self, job: Job) -> None:
        assert job.number is not None
        del self._jobs[job.number]
        job.number = None

    def _sorted(self, events: Sequence[Event]) -> list[tuple[Job, Event]]:
        """The events with their jobs. A text that fails ends its whole job."""
        delivered: list[tuple[Job, Event]] = []
        for event in events:
            job = self._jobs.get(event.request)
            if job is None:  # it has failed in this step
                continue
            delivered.append((job, event))
            if isinstance(event, Failed):
                self._drop(job)
            elif isinstance(event, Finished):
                job.num_open -= 1
                if job.num_open == 0:
                    self._forget(job)
        return delivered

    def _fail(self, error: BaseException) -> None:
        """Fail everything under way. Continue only if memory ran out, which leaves device and rows as they were."""
        ours = as_ours(error)
        if not isinstance(ours, InsufficientMemoryError):
            self.fault = ours
        try:
            self._scheduler.interrupt()
        except BaseException as second:
            self.fault = as_ours(second)
        jobs = list(self._jobs.values())
        for job in jobs:
            self._forget(job)
        self._deliver([(job, Failed(0, ours)) for job in jobs])


def as_ours(error: BaseException) -> LLMCliError:
    """The error for a client. One that is not ours is a bug, reported by the name of its class."""
    if isinstance(error, LLMCliError):
        return error
    return DeviceError(f"internal error, please report it: {type(error).__name__}: {error}")


# `AskedEngine`: the engine's end for another machine, which asks for what has ended.
#
# A call hands over new requests, and returns the texts that have ended since the last one. So requests, ended texts and
# errors cross the network, and tokens do not; and whoever asks has one call at a time under way. It knows no network:
# Ray makes an actor of it, and a program may call it as it is.

# A request with its number, and the grammar that its texts follow.
Asked = tuple[int, Request, "Grammar | None"]


@dataclass(frozen=True)
class EngineFacts:
    """What is known of an engine elsewhere. Its texts depend on `device`; `files` tell one model from another."""

    device: str
    load_seconds: float
    files: Mapping[str, str]
    num_rows: int


@dataclass(frozen=True)
class OpenedEngine:
    """A model that is ready to run."""

    scheduler: "Scheduler"
    hold: Hold
    facts: EngineFacts


@dataclass(frozen=True)
class Answer:
    """The texts that have ended, and the work so far. After a `fault` the engine cannot continue."""

    ended: Sequence[Finished | Failed]
    usage: Usage
    fault: LLMCliError | None


class AskedEngine:
    """See above. For one thread. Call `version` first: its answer is understood by every version."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ended: list[Finished | Failed] = []
        self._fault: LLMCliError | None = None

    def version(self) -> str:
        """The version of llmcli here."""
        return __version__

    def open(self, open_engine: Callable[[], OpenedEngine]) -> EngineFacts | LLMCliError:
        """Load the model. An error is returned, as a foreign library would wrap one that is raised."""
        try:
            opened = open_engine()
        except Exception as error:
            return as_ours(error)
        self._scheduler, self._hold = opened.scheduler, opened.hold
        self._worker = Worker(opened.scheduler, self._deliver)
        self._worker.start()
        return opened.facts

    def exchange(self, asked: Sequence[Asked], wait_seconds: float) -> Answer:
        """Begin some requests of one text each; return what has ended, or wait for it a while."""
        for number, request, grammar in asked:
            self._worker.submit(request, number, holder(self._hold, grammar))
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._fault, wait_seconds)
            ended, self._ended = self._ended, []
            return Answer(ended, replace(self._scheduler.usage), self._fault)

    def _deliver(self, events: Sequence[tuple[Job, Event]]) -> None:
        """Runs in the worker's thread. A lack of memory, or the device's fault, is no fault of a text."""
        with self._changed:
            for job, event in events:
                if isinstance(event, Failed) and isinstance(event.error, InsufficientMemoryError):
                    self._fault = event.error
                elif isinstance(event, Finished | Failed):
                    self._ended.append(replace(event, request=job.key))
            if self._worker.fault is not None:
                self._fault = self._worker.fault
                self._ended = [event for event in self._ended if isinstance(event, Finished)]
            self._changed.notify_all()
