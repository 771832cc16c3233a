"""`EngineEnd`: the engine's end of the link between two processes. The other, `front_end.py`, is where clients come in.

There are two since the threads of one process take turns: who talks with 256 clients would halve the rate of the rows.
Messages are tuples whose first element is a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from llmcli.engine.events import Event, PrefillProgress, Token
from llmcli.engine.request import Request
from llmcli.engine.texts import Usage
from llmcli.serve.sender import Sender
from llmcli.serve.worker import Job, Scheduler, Worker

if TYPE_CHECKING:
    from llmcli.schema.grammar import Grammar

_STEP_SECONDS = 5.0  # for the step that runs to end


# Returns a request whose texts are held to a grammar. Raises: UsageError if they cannot be
Hold = Callable[[Request, "Grammar"], Request]


@dataclass(frozen=True)
class EngineState:
    """What the engine counts, at one moment."""

    usage: Usage
    num_waiting: int  # texts that have no row yet
    num_pages: int
    free_pages: int


class EngineEnd:
    """Runs a scheduler for the front, until the front closes the link."""

    def __init__(self, connection: Connection, scheduler: Scheduler, hold: Hold):
        """`hold` is called for requests with a grammar, in a thread of its own: the first schema takes seconds."""
        self._connection = connection
        self._scheduler = scheduler
        self._hold = hold
        self._worker = Worker(scheduler, self._deliver)
        self._jobs: dict[int, Job] = {}  # by the front's numbers
        self._sender = Sender(connection)

    def run(
        self,
        *,
        log: Callable[[str], None] = lambda line: None,
        log_contents: Callable[[str, object], None] = lambda what, contents: None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Do what the front says. `on_ready` is called once it listens; `log` and `log_contents` get what it logs."""
        self._sender.send("begin", self._state())
        self._worker.start()
        commands: dict[str, Callable[..., None]] = {
            "submit": self._submit,
            "cancel": self._cancel,
            "state": lambda: self._sender.send("state", self._state()),
            "log": log,
            "contents": log_contents,
            "ready": on_ready,
        }
        try:
            while True:
                name, *arguments = self._connection.recv()
                commands[name](*arguments)
        except (EOFError, OSError):
            return  # the front has ended
        finally:
            self._worker.stop(_STEP_SECONDS)
            self._sender.close()

    def _submit(self, key: int, request: Request, grammar: Grammar | None) -> None:
        prepare = None if grammar is None else lambda asked: self._hold(asked, grammar)
        self._jobs[key] = self._worker.submit(request, key, prepare)

    def _cancel(self, key: int) -> None:
        self._worker.cancel(self._jobs.pop(key))

    def _state(self) -> EngineState:
        """While a step runs, which is not waited for: a number may be from before it, and another from within."""
        scheduler, runner = self._scheduler, self._scheduler.runner
        return EngineState(replace(scheduler.usage), scheduler.num_waiting, runner.limits.num_pages, runner.free_pages)

    def _deliver(self, events: Sequence[tuple[Job, Event]]) -> None:
        """In the worker's thread, once a step. Tokens go as tuples: an object of a class takes ten times as long."""
        told = [
            (job.key, event.sample, event.token_id, event.text, event.inspection)
            if isinstance(event, Token)
            else (job.key, event)
            for job, event in events
            if not isinstance(event, PrefillProgress)
        ]
        if told or self._worker.fault is not None:
            self._sender.wait_for_room()
            self._sender.send("events", told, self._worker.fault)
