"""`AskedEngine`: the engine's end for another machine, which asks for what has ended.

A call hands over new requests, and returns the texts that have ended since the last one. So requests, ended texts and
errors cross the network, and tokens do not; and whoever asks has one call at a time under way. It knows no network: Ray
makes an actor of it, and a program may call it as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmcli import __version__
from llmcli.engine.events import Event, Failed, Finished
from llmcli.engine.remote.worker import Hold, Job, ServerScheduler, Worker, as_ours, holder
from llmcli.engine.request import Request
from llmcli.engine.texts import Usage
from llmcli.errors import InsufficientMemoryError, LLMCliError

if TYPE_CHECKING:
    from llmcli.schema.grammar import Grammar

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

    scheduler: ServerScheduler
    hold: Hold
    facts: EngineFacts


@dataclass(frozen=True)
class Answer:
    """The texts that have ended, and the work so far. After a `fault` the engine cannot continue."""

    ended: Sequence[Finished | Failed]
    usage: Usage
    fault: LLMCliError | None


class AskedEngine:
    """See the module. For one thread. Call `version` first: its answer is understood by every version."""

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
