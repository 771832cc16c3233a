"""`RayScheduler`: a batch's scheduler over engines on many machines, which Ray starts: one for each card of a cluster.

A worker holds lines for twice its rows, and returns each text when it ends. A node that joins gets a worker for each
of its cards. The lines of a worker that dies run again, with the same texts, as a text depends on its
line alone. Fewer of them run together after each death: so a line that kills its worker is found. It fails when two
workers have died with nothing but this line. One worker takes all lines of dead workers; the others take new ones.

Refuses workers of another version, another model or, unless `mixes_cards`, another kind of card than the first one's.
"""

import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from llmcli import __version__
from llmcli.differences import find_differences
from llmcli.engine.remote.worker import Answer, AskedEngine, EngineFacts, OpenedEngine
from llmcli.engine.request import Failed, Finished, Request
from llmcli.engine.texts import Usage
from llmcli.errors import DeviceError, LLMCliError, UsageError

if TYPE_CHECKING:
    from llmcli.schema.grammar import Grammar

AUTO = "auto"
_STEP_SECONDS = 0.5  # of waiting in a step, so that the progress is shown
_EXCHANGE_SECONDS = 1.0  # of waiting in a worker
_LOOK_SECONDS = 2.0  # between two looks at the nodes
_PATIENCE_SECONDS = 600.0  # without a worker
_QUIET_SECONDS = 30.0  # before a worker that does not start is spoken of: its card may belong to another job
_RETRY_SECONDS = 5.0  # before a node where a worker died at its start gets another one
_MOST_BAD_STARTS = 3  # in a row, while no worker is there
_MOST_DEATHS_ALONE = 2
_SMALLER = 8  # how many times smaller the company gets with each death
_CONNECT_SECONDS = 5.0
_STORE_BYTES = 100 * 2**20  # of a cluster on this machine alone; lines do not go through it

Stage = Literal["version", "open", "ready"]


@dataclass(frozen=True)
class Work:
    """What the workers do. `most_workers` None is one for each card, or for each node without `on_cards`.

    `device` is the description that all workers must have, None for that of the first; `files` those of the model.
    """

    open_engine: Callable[[], OpenedEngine]
    files: Mapping[str, str]
    device: str | None = None
    most_workers: int | None = None
    on_cards: bool = True
    mixes_cards: bool = False


def ray_version() -> tuple[int, int]:
    """The version of Ray here, as far as the second number."""
    major, minor, *_ = ray.__version__.split(".")
    return int(major), int(minor)


def connect(address: str) -> str:
    """Connect to a cluster, with `auto` the one of this machine, or a new one for it alone. Return what it is.

    Raises: UsageError
    """
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "namespace": "llmcli"}
    if address != AUTO:
        _check_reachable(address)
    try:
        try:
            ray.init(address=address, **quiet)
            where = f"the Ray cluster at {ray.get_runtime_context().gcs_address}"
        except ConnectionError:
            if address != AUTO:
                raise
            ray.init(address="local", object_store_memory=_STORE_BYTES, include_dashboard=False, **quiet)
            where = "Ray on this machine"
    except Exception as error:  # some are of no class of Ray's
        raise UsageError(f"--ray {address}: {' '.join(str(error).split())}") from error
    signal.signal(signal.SIGTERM, _exit)  # Ray's own handler would give another exit code
    return where


def _exit(number: int, _: object) -> NoReturn:
    """End as the system does, but close files and end the workers first."""
    sys.exit(128 + number)


def _check_reachable(address: str) -> None:
    """Ray itself tries for half a minute. Raises: UsageError"""
    host, colon, port = address.rpartition(":")
    if not colon or not host or "/" in address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"--ray is {address!r}, expected {AUTO}, or HOST:PORT as `ray start --head` prints it")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or "no answer"
        raise UsageError(f"--ray {address}: {reason}; start a cluster with `ray start --head`") from error


def _first_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@dataclass(eq=False)
class _Line:
    """A request, and how often its worker died: at all, and with nothing but this line."""

    number: int
    request: Request
    grammar: "Grammar | None"
    num_deaths: int = 0
    num_alone: int = 0


@dataclass(eq=False)
class _Worker:
    """An actor, its call under way (None if there is none), and the lines that it has."""

    actor: Any
    node: str
    host: str
    call: Any
    stage: Stage = "version"
    num_rows: int = 0
    usage: Usage | None = None
    lines: dict[int, _Line] = field(default_factory=dict)
    start_time: float = field(default_factory=time.monotonic)
    is_late: bool = False

    def room_for(self, line: _Line) -> bool:
        """Whether a line may join its lines."""
        divisor: int = _SMALLER ** max(one.num_deaths for one in (line, *self.lines.values()))
        return len(self.lines) < max(2 * self.num_rows // divisor, 1)


class RayScheduler:
    """See the module. A `BatchScheduler` whose requests come with their grammar; it has no events but of ended texts.

    Attributes: facts: of the first worker, None before it is ready
    """

    def __init__(self, work: Work, on_problem: Callable[[str], None]):
        """Call `connect` first. `on_problem` gets a sentence for each problem of a worker that does not end the run."""
        self.facts: EngineFacts | None = None
        self._work = work
        self._on_problem = on_problem
        self._actor_class: Any = ray.remote(AskedEngine)
        self._workers: list[_Worker] = []
        self._fresh: deque[_Line] = deque()
        self._suspects: deque[_Line] = deque()  # their worker died
        self._careful: _Worker | None = None  # takes the suspects
        self._num_lines = 0
        self._num_open = 0
        self._past: list[Usage] = []  # of workers that are gone
        self._refused: dict[str, str] = {}  # nodes, and why
        self._retry_time: dict[str, float] = {}
        self._num_bad_starts = 0
        self._look_time = 0.0
        self._worker_time = time.monotonic()  # when there was one last

    @property
    def num_workers(self) -> int:
        """Workers that are ready."""
        return len(self._ready)

    @property
    def _ready(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.stage == "ready"]

    @property
    def num_waiting(self) -> int:
        """Lines beyond the rows of all workers."""
        return max(self._num_open - sum(worker.num_rows for worker in self._workers), 0)

    @property
    def is_idle(self) -> bool:
        """Whether every line has ended."""
        return self._num_open == 0

    @property
    def usage(self) -> Usage:
        """The work of all workers. `num_rows` is of those that are there."""
        counts = [*self._past, *(worker.usage for worker in self._workers if worker.usage is not None)]
        return Usage(
            num_rows=sum(worker.num_rows for worker in self._workers),
            steps=sum(one.steps for one in counts),
            row_steps=sum(one.row_steps for one in counts),
            prompt_tokens_computed=sum(one.prompt_tokens_computed for one in counts),
            prompt_tokens_shared=sum(one.prompt_tokens_shared for one in counts),
            preemptions=sum(one.preemptions for one in counts),
        )

    def wait_for_worker(self) -> EngineFacts:
        """The first worker, once it is ready. Raises: LLMCliError if none can be"""
        while self.facts is None:
            self.step()
        return self.facts

    def submit(self, asked: "tuple[Request, Grammar | None]") -> int:
        """Queue a line; return its number."""
        self._num_lines += 1
        self._num_open += 1
        self._fresh.append(_Line(self._num_lines, *asked))
        return self._num_lines

    def step(self) -> list[Finished | Failed]:
        """Hand out lines, wait a little, and return what has ended. Raises: LLMCliError if no worker can be there"""
        if time.monotonic() - self._look_time >= _LOOK_SECONDS:
            self._start_workers()
        self._hand_out()
        calls = {worker.call: worker for worker in self._workers if worker.call is not None}
        if not calls:
            time.sleep(_STEP_SECONDS if not self._workers else 0)
            return []
        ready, _ = ray.wait([*calls], timeout=_STEP_SECONDS)
        if ready:
            ready, _ = ray.wait([*calls], num_returns=len(calls), timeout=0)
        ended: list[Finished | Failed] = []
        for call in ready:
            ended += self._take(calls[call])
        self._num_open -= len(ended)
        return ended

    def close(self) -> None:
        """End the workers, and leave the cluster."""
        for worker in self._workers:
            ray.kill(worker.actor)
        self._workers.clear()
        ray.shutdown()

    # Workers that come and go

    def _start_workers(self) -> None:
        """Start a worker for each card that has none. Raises: LLMCliError if there is none, and nothing helps"""
        now = self._look_time = time.monotonic()
        slots = {
            node["NodeID"]: (int(node["Resources"].get("GPU", 0)) if self._work.on_cards else 1, node)
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["Alive"]
        }
        if self.facts is None and not any(count for count, _ in slots.values()):
            raise UsageError(
                "no node of the Ray cluster has a card: add one that has, or use --device cpu for a worker on each node"
            )
        taken = Counter(worker.node for worker in self._workers)
        most = self._work.most_workers
        for node_id, (count, node) in slots.items():
            if node_id in self._refused or now < self._retry_time.get(node_id, 0.0):
                continue
            for _ in range(count - taken[node_id]):
                if most is None or len(self._workers) < most:
                    self._start_worker(node_id, node["NodeManagerAddress"])
        for worker in self._workers:
            if worker.stage == "version" and not worker.is_late and now - worker.start_time > _QUIET_SECONDS:
                worker.is_late = True
                need = "card" if self._work.on_cards else "processor"
                self._on_problem(f"a worker on {worker.host} waits: another job may have its {need}")
        if self._workers:
            self._worker_time = now
        elif slots and self._refused.keys() >= {node_id for node_id, (count, _) in slots.items() if count}:
            raise DeviceError(f"no worker can run this batch: {next(iter(self._refused.values()))}")
        elif now - self._worker_time > _PATIENCE_SECONDS:
            raise DeviceError(f"there was no worker for {_PATIENCE_SECONDS / 60:.0f} minutes")

    def _start_worker(self, node_id: str, host: str) -> None:
        needs = {"num_gpus": 1, "num_cpus": 0} if self._work.on_cards else {"num_cpus": 1}
        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        actor = self._actor_class.options(scheduling_strategy=here, **needs).remote()
        self._workers.append(_Worker(actor, node_id, host, actor.version.remote()))

    def _take(self, worker: _Worker) -> list[Finished | Failed]:
        """Take the answer to a worker's call."""
        call, worker.call = worker.call, None
        try:
            answer = ray.get(call)
        except (RayError, ImportError) as error:
            return self._lose(worker, error)
        if isinstance(answer, Answer):
            worker.usage = answer.usage
            ended = [event for event in answer.ended if worker.lines.pop(event.request, None) is not None]
            return ended if answer.fault is None else ended + self._lose(worker, answer.fault)
        if isinstance(answer, str):
            if answer == __version__:
                worker.stage, worker.call = "open", worker.actor.open.remote(self._work.open_engine)
            else:
                self._refuse(worker, f"it has llmcli {answer}, this is {__version__}; install the same everywhere")
            return []
        if isinstance(answer, LLMCliError):
            self._refuse(worker, str(answer))
            return []
        self._welcome(worker, answer)
        return []

    def _welcome(self, worker: _Worker, facts: EngineFacts) -> None:
        device = self._work.device or (self.facts and self.facts.device) or facts.device
        if differences := find_differences(self._work.files, facts.files):
            self._refuse(worker, f"its model has another {differences[0].name}")
        elif device != facts.device and not self._work.mixes_cards:
            more = "use the same everywhere, or --mixed-cards if texts may then differ"
            self._refuse(worker, f"it computes on {facts.device}, the others on {device}; {more}")
        else:
            worker.stage, worker.num_rows = "ready", facts.num_rows
            self.facts = self.facts or facts
            self._num_bad_starts = 0

    def _refuse(self, worker: _Worker, reason: str) -> None:
        """Use no worker of this node."""
        self._remove(worker)
        message = f"the worker on {worker.host} cannot be used: {reason}"
        if worker.node not in self._refused:
            self._refused[worker.node] = message
            self._on_problem(message)

    def _lose(self, worker: _Worker, error: Exception) -> list[Finished | Failed]:
        """Give a dead worker's lines to others. Return a line that has killed it, as failed."""
        self._remove(worker)
        if worker.stage != "ready":
            self._note_bad_start(worker, error)
            return []
        self._on_problem(f"a worker on {worker.host} died; its {len(worker.lines)} prompts run again")
        ended: list[Finished | Failed] = []
        for line in worker.lines.values():
            line.num_deaths += 1
            line.num_alone += len(worker.lines) == 1
            if line.num_alone >= _MOST_DEATHS_ALONE:
                message = f"its worker died {line.num_alone} times while it ran alone: {_first_line(error)}"
                ended.append(Failed(line.request.samples[0], DeviceError(message), line.number))
            else:
                self._suspects.append(line)
        return ended

    def _note_bad_start(self, worker: _Worker, error: Exception) -> None:
        """Raises: DeviceError if workers die at their start again and again"""
        reason = "llmcli is not installed there" if "No module named 'llmcli" in str(error) else _first_line(error)
        message = f"a worker on {worker.host} does not start: {reason}"
        self._num_bad_starts += 1
        self._retry_time[worker.node] = time.monotonic() + _RETRY_SECONDS
        if self._num_bad_starts >= _MOST_BAD_STARTS and not self._workers:
            raise DeviceError(message)
        self._on_problem(message)

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        if worker.usage is not None:
            self._past.append(worker.usage)
        if self._careful is worker:
            self._careful = None
        ray.kill(worker.actor)

    # Lines

    def _hand_out(self) -> None:
        """Give lines to the workers that listen, and ask all that have some for what has ended."""
        ready = self._ready
        careful = self._careful
        if careful is not None and not self._suspects and not any(one.num_deaths for one in careful.lines.values()):
            self._careful = None
        if self._suspects and self._careful is None and ready:
            self._careful = min(ready, key=lambda worker: len(worker.lines))
        listening = [worker for worker in ready if worker.call is None]
        given: dict[_Worker, list[_Line]] = {worker: [] for worker in listening}
        if (careful := self._careful) in given:
            while self._suspects and careful.room_for(self._suspects[0]):
                _give(careful, self._suspects.popleft(), given)
        others = [worker for worker in listening if worker is not careful]
        while self._fresh and others:
            worker = min(others, key=lambda one: len(one.lines) / one.num_rows)
            if len(worker.lines) >= 2 * worker.num_rows:
                break
            _give(worker, self._fresh.popleft(), given)
        for worker, lines in given.items():
            if worker.lines:
                asked = [(line.number, line.request, line.grammar) for line in lines]
                worker.call = worker.actor.exchange.remote(asked, _EXCHANGE_SECONDS)


def _give(worker: _Worker, line: _Line, given: Mapping[_Worker, list[_Line]]) -> None:
    worker.lines[line.number] = line
    given[worker].append(line)
