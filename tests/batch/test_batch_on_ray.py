"""The scheduler over workers of Ray: deaths, lines that kill, nodes that come and go, workers that do not fit."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from batch.fake_ray import FakeRay
from batch.fake_scheduler import TIMINGS, text_of
from ray.exceptions import RayActorError

from llmcli import __version__
from llmcli.batch import on_ray
from llmcli.batch.on_ray import RayScheduler, Work
from llmcli.batch.run import Progress, run_batch
from llmcli.engine.remote.worker import Answer, Asked, EngineFacts
from llmcli.engine.request import Failed, Finished, Request
from llmcli.engine.texts import Usage
from llmcli.errors import DeviceError, LLMCliError, UsageError
from llmcli.sampling.params import Sampler, SamplingParams

POISON = 9999


def asked_of(number: int) -> tuple[Request, None]:
    return Request((number + 1,), Sampler(SamplingParams(), seed=7), (number,), 100), None


@dataclass
class FakeEngine:
    """Ends one line a call, or dies: of a poison line, or one call in `1 / deadliness`."""

    draw: random.Random
    num_rows: int = 4
    deadliness: float = 0.0
    device: str = "card"
    llmcli: str = __version__
    opening: Exception | None = None
    files: dict[str, str] = field(default_factory=dict)
    lines: dict[int, Request] = field(default_factory=dict)
    most: int = 0
    fault: LLMCliError | None = None

    def version(self) -> str:
        return self.llmcli

    def open(self, open_engine: Any) -> EngineFacts | LLMCliError:
        if isinstance(self.opening, LLMCliError):
            return self.opening
        if self.opening is not None:
            raise self.opening
        return EngineFacts(self.device, 1.0, self.files, self.num_rows)

    def exchange(self, asked: Sequence[Asked], wait_seconds: float) -> Answer:
        self.lines |= {number: request for number, request, _ in asked}
        self.most = max(self.most, len(self.lines))
        if any(POISON in request.prompt_token_ids for request in self.lines.values()):
            raise RayActorError(None, "killed by the poison\nat address 7")
        if self.draw.random() < self.deadliness:
            raise RayActorError(None, "killed")
        if self.fault is not None:
            return Answer([], Usage(self.num_rows), self.fault)
        number = self.draw.choice(list(self.lines))
        request = self.lines.pop(number)
        event = Finished(request.samples[0], "", text_of(request), (1, 2), "length", TIMINGS, number)
        return Answer([event], Usage(self.num_rows, 3, 5), None)


class Cluster:
    """A fake cluster, and what a batch on it gave."""

    def __init__(self, ray: FakeRay):
        self.ray = ray
        self.problems: list[str] = []
        self.results: dict[int, list[Finished | Failed]] = {}

    def run(self, count: int, poison: int | None = None, **work: Any) -> RayScheduler:
        settings = {"open_engine": None, "files": {}, **work}
        scheduler = RayScheduler(Work(**settings), self.problems.append)
        scheduler.wait_for_worker()

        def request_of(number: int) -> Any:
            request, grammar = asked_of(number)
            bad = Request((POISON,), request.sampler, request.samples, 100)
            return (bad if number == poison else request), grammar

        take = lambda number, event: self.results.setdefault(number, []).append(event)  # noqa: E731
        run_batch(scheduler, range(count), request_of, take, Progress(), self.on_step)
        return scheduler

    def on_step(self) -> None:
        """Nothing; a test may replace it."""

    def check(self, count: int, failed: Sequence[int] = ()) -> None:
        """Every line has one result, that of a single machine."""
        assert sorted(self.results) == [*range(count)]
        for number, events in self.results.items():
            (event,) = events
            assert isinstance(event, Failed) == (number in failed), event
            if isinstance(event, Finished):
                assert event.text == text_of(asked_of(number)[0])


@pytest.fixture
def draw() -> random.Random:
    return random.Random(5)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, draw: random.Random) -> Cluster:
    """Two nodes, one with two cards; deaths are noticed at once."""
    ray = FakeRay(lambda node: FakeEngine(draw), {"a": 1, "b": 2})
    monkeypatch.setattr(on_ray, "ray", ray)
    monkeypatch.setattr(
        on_ray, "NodeAffinitySchedulingStrategy", lambda node_id, soft: SimpleNamespace(node_id=node_id)
    )
    monkeypatch.setattr(on_ray, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(on_ray, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(on_ray, "_STEP_SECONDS", 0.0)
    return Cluster(ray)


def test_a_worker_for_each_card(cluster: Cluster) -> None:
    scheduler = cluster.run(200)
    cluster.check(200)
    assert sorted(actor.node for actor in cluster.ray.actors) == ["a", "b", "b"]
    assert scheduler.num_workers == 3
    assert max(actor.engine.most for actor in cluster.ray.actors) == 8  # twice its rows
    assert (scheduler.usage.num_rows, scheduler.usage.steps, scheduler.usage.row_steps) == (12, 9, 15)
    scheduler.close()
    assert cluster.ray.is_down
    assert all(actor.is_dead for actor in cluster.ray.actors)


def test_a_card_that_another_job_has_is_waited_for(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "_QUIET_SECONDS", -1.0)
    cluster.ray.taken.add("b")
    cluster.run(40)
    cluster.check(40)
    late = "waits: another job may have its card"
    assert cluster.problems.count(f"a worker on b {late}") == 2  # each of its workers, once
    cluster.ray.taken.clear()
    assert cluster.run(40).num_workers == 3


def test_lines_go_to_all_workers(cluster: Cluster) -> None:
    cluster.run(12)
    assert min(actor.engine.most for actor in cluster.ray.actors) >= 2


def test_no_more_workers_than_asked_for(cluster: Cluster) -> None:
    cluster.run(50, most_workers=2)
    cluster.check(50)
    assert len(cluster.ray.actors) == 2


@pytest.mark.parametrize("deadliness", [0.02, 0.1, 0.3])
def test_deaths_change_nothing(cluster: Cluster, draw: random.Random, deadliness: float) -> None:
    """A line that was alone at two deaths fails; with so many deaths that may hit any, and another run takes it."""
    cluster.ray.make = lambda node: FakeEngine(draw, deadliness=deadliness)
    cluster.run(300)
    failed = [number for number, (event, *_) in cluster.results.items() if isinstance(event, Failed)]
    assert len(failed) <= 300 * deadliness**2
    cluster.check(300, failed)
    assert len(cluster.ray.actors) > 5
    assert any("died; its" in problem for problem in cluster.problems)


@pytest.mark.parametrize("num_rows", [1, 4, 256])
def test_a_line_that_kills_fails_and_no_other(cluster: Cluster, draw: random.Random, num_rows: int) -> None:
    cluster.ray.make = lambda node: FakeEngine(draw, num_rows)
    cluster.run(2000, poison=77)
    cluster.check(2000, [77])
    (failed,) = cluster.results[77]
    assert isinstance(failed, Failed)
    assert str(failed.error) == "its worker died 2 times while it ran alone: killed by the poison"
    assert sum(actor.is_dead for actor in cluster.ray.actors) <= {1: 3, 4: 3, 256: 5}[num_rows]


def test_other_lines_run_on_while_suspects_are_tried(cluster: Cluster, draw: random.Random) -> None:
    cluster.ray.make = lambda node: FakeEngine(draw, 64)
    cluster.run(400, poison=3)
    order = list(cluster.results)
    assert order.index(3) > 200


def test_nodes_come_and_go(cluster: Cluster) -> None:
    counts = []
    cluster.ray.cards = {"a": 1}

    def on_step() -> None:
        ended = len(cluster.results)
        cluster.ray.cards = {"a": 1} if ended < 50 else {"c": 2, "d": 1} if ended < 100 else {"d": 1}
        counts.append(len({actor.node for actor in cluster.ray.actors}))

    cluster.on_step = on_step  # type: ignore[method-assign]
    cluster.run(200)
    cluster.check(200)
    assert counts[-1] == 3


def test_a_worker_whose_device_fails_is_replaced(cluster: Cluster, draw: random.Random) -> None:
    engines = iter([FakeEngine(draw, fault=DeviceError("the card fell off"))])
    cluster.ray.make = lambda node: next(engines, None) or FakeEngine(draw)
    cluster.run(100)
    cluster.check(100)
    assert cluster.problems == ["a worker on a died; its 8 prompts run again"]
    assert len(cluster.ray.actors) == 4


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"llmcli": "9.9"}, f"it has llmcli 9.9, this is {__version__}; install the same everywhere"),
        ({"files": {"config.json": "1"}}, "its model has another config.json"),
        ({"opening": UsageError("m is missing")}, "m is missing"),
        (
            {"device": "other"},
            "it computes on other, the others on card; use the same everywhere, or --mixed-cards if texts may then",
        ),
    ],
)
def test_a_worker_that_does_not_fit_is_left_out(
    cluster: Cluster, draw: random.Random, engine: dict[str, Any], reason: str
) -> None:
    good = {"files": {"config.json": "2"}}
    cluster.ray.make = lambda node: FakeEngine(draw, **({**good, **engine} if node == "b" else good))
    cluster.run(100, files={"config.json": "2"}, device="card")
    cluster.check(100)
    assert len(cluster.problems) == 1  # of two workers, one line
    assert cluster.problems[0].startswith("the worker on b cannot be used: ")
    assert reason in cluster.problems[0]
    cluster.ray.cards = {"b": 2}
    with pytest.raises(DeviceError, match="^no worker can run this batch: the worker on b cannot be used: "):
        cluster.run(1, files={"config.json": "2"}, device="card")


def test_mixed_cards(cluster: Cluster, draw: random.Random) -> None:
    cluster.ray.make = lambda node: FakeEngine(draw, device=node)
    cluster.run(100, mixes_cards=True)
    cluster.check(100)
    assert cluster.problems == []
    assert all(actor.engine.most for actor in cluster.ray.actors)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RayActorError(None, "no\nmore"), "a worker on a does not start: no"),
        (RayActorError(None, "x\nNo module named 'llmcli'"), "a worker on a does not start: llmcli is not installed"),
    ],
)
def test_workers_that_die_at_their_start(cluster: Cluster, draw: random.Random, error: Exception, reason: str) -> None:
    cluster.ray.cards = {"a": 1}
    cluster.ray.make = lambda node: FakeEngine(draw, opening=error)
    with pytest.raises(DeviceError, match=reason):
        cluster.run(5)
    assert len(cluster.ray.actors) == 3


def test_a_cluster_without_cards(cluster: Cluster) -> None:
    cluster.ray.cards = {"a": 0}
    with pytest.raises(UsageError, match="no node of the Ray cluster has a card: add one that has, or use --device c"):
        cluster.run(1)
    cluster.run(20, on_cards=False)
    cluster.check(20)


def test_nobody_waits_for_ever(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "_PATIENCE_SECONDS", 0.0)

    def on_step() -> None:
        cluster.ray.cards = {}

    cluster.on_step = on_step  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="there was no worker for 0 minutes"):
        cluster.run(200)


@pytest.mark.parametrize("address", ["x", "ray://a:1", ":1", "a:", "a:99999", "a:b", ""])
def test_what_is_not_an_address(address: str) -> None:
    with pytest.raises(UsageError, match="^--ray is .*, expected auto, or HOST:PORT as `ray start --head` prints it$"):
        on_ray.connect(address)


def test_an_address_where_nobody_listens() -> None:
    with pytest.raises(UsageError, match="^--ray 127.0.0.1:1: Connection refused; start a cluster with `ray start -"):
        on_ray.connect("127.0.0.1:1")


def test_a_cluster_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise RuntimeError(
            "Version mismatch: The cluster was started with:\n    Ray: 2.61.0\nThis one with Ray: 2.60.0\n"
        )

    monkeypatch.setattr(on_ray, "ray", SimpleNamespace(init=init))
    told = "Version mismatch: The cluster was started with: Ray: 2.61.0 This one with Ray: 2.60.0"
    with pytest.raises(UsageError, match=f"^--ray auto: {told}$"):
        on_ray.connect("auto")
