"""The loop of a batch: feeds a scheduler line by line and passes on each result as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from llmcli.engine.events import Event, Failed, Finished, Token
from llmcli.errors import LLMCliError

if TYPE_CHECKING:
    from llmcli.engine.request import Request

Task = TypeVar("Task")


class Usage(Protocol):
    """What a scheduler counts. `row_steps` is the sum over steps of the rows in use."""

    prompt_tokens_computed: int
    prompt_tokens_shared: int
    steps: int
    row_steps: int
    num_rows: int
    preemptions: int


class Scheduler(Protocol):
    """The part of the engine's scheduler that a batch uses."""

    @property
    def num_waiting(self) -> int:
        """Texts that have no row yet."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""

    @property
    def usage(self) -> Usage:
        """What it has cost so far."""

    def submit(self, request: Request) -> int:
        """Take a request; return its number."""

    def step(self) -> Sequence[Event]:
        """Run one step; return what has happened."""


@dataclass
class Progress:
    """How far a batch is. Prompts count once they have a result, tokens as they are sampled."""

    num_finished: int = 0
    num_failed: int = 0
    num_tokens: int = 0


def run_batch(
    scheduler: Scheduler,
    tasks: Iterable[Task],
    request_of: Callable[[Task], Request],
    take: Callable[[Task, Finished | Failed], None],
    progress: Progress,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Run every task and pass each result to `take` when it is there, in whatever order they end.

    A request is made when it is wanted: as many wait as there are rows, so that none stands empty.
    Raises: what the scheduler raises for an error that concerns all.
    """
    rest = iter(tasks)
    running: dict[int, Task] = {}
    has_more = True

    def finish(task: Task, event: Finished | Failed) -> None:
        if isinstance(event, Failed):
            progress.num_failed += 1
        else:
            progress.num_finished += 1
        take(task, event)

    while True:
        while has_more and scheduler.num_waiting < max(scheduler.usage.num_rows, 1):
            task = next(rest, None)
            if task is None:
                has_more = False
                break
            try:
                running[scheduler.submit(request_of(task))] = task
            except LLMCliError as error:
                finish(task, Failed(0, error))
        if scheduler.is_idle:
            break
        for event in scheduler.step():
            if isinstance(event, Token):
                progress.num_tokens += 1
            elif isinstance(event, Finished | Failed):
                finish(running.pop(event.request), event)
        on_step()
    if running:
        raise RuntimeError(f"the scheduler is idle and {len(running)} prompts have no result")
