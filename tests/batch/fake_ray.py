"""Ray without processes: nodes, actors that live in this process, and calls that are carried out when waited for."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError


@dataclass(eq=False)
class FakeCall:
    actor: "FakeActor"
    method: str
    arguments: tuple[Any, ...]


@dataclass(eq=False)
class FakeActor:
    ray: "FakeRay"
    node: str
    engine: Any
    is_dead: bool = False

    def __getattr__(self, name: str) -> Any:
        actor = self

        class Method:
            def remote(self, *arguments: Any) -> FakeCall:
                return FakeCall(actor, name, pickle.loads(pickle.dumps(arguments)))

        return Method()


@dataclass
class FakeRay:
    """`make` gives a node's engine. `cards` has each node's cards; a node that is taken out kills its actors.

    `taken` are nodes whose cards another job has: no actor starts there.
    """

    make: Callable[[str], Any]
    cards: dict[str, int] = field(default_factory=dict)
    actors: list[FakeActor] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    is_down: bool = False

    __version__ = "2.60.0"

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "Alive": True, "NodeManagerAddress": name, "Resources": {"GPU": float(count)}}
            for name, count in self.cards.items()
        ]

    def remote(self, kind: type) -> Any:
        class Class:
            def options(self, scheduling_strategy: Any, **needs: float) -> Any:
                self.node = scheduling_strategy.node_id
                return self

            def remote(this) -> FakeActor:
                actor = FakeActor(self, this.node, self.make(this.node))
                self.actors.append(actor)
                return actor

        return Class()

    def wait(self, calls: Sequence[FakeCall], num_returns: int = 1, timeout: float = 0) -> tuple[list[FakeCall], list]:
        ready = [call for call in calls if call.actor.node not in self.taken]
        return ready[:num_returns], []

    def get(self, call: FakeCall) -> Any:
        actor = call.actor
        if actor.is_dead or actor.node not in self.cards:
            raise RayActorError(None, "the actor died\nwith more lines")
        return pickle.loads(pickle.dumps(getattr(actor.engine, call.method)(*call.arguments)))

    def kill(self, actor: FakeActor) -> None:
        actor.is_dead = True

    def shutdown(self) -> None:
        self.is_down = True
