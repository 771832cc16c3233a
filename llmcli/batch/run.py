"""The loop of a batch: feeds a scheduler line by line, passes results on, and estimates the run's time."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from llmcli.engine.request import Event, Failed, Finished, Token
from llmcli.errors import LLMCliError
from llmcli.measure.plan import Predictor

Task = TypeVar("Task")
Asked = TypeVar("Asked")  # what a scheduler takes: a request, or one with its grammar
Asked_contra = TypeVar("Asked_contra", contravariant=True)


class BatchUsage(Protocol):
    """The scheduler's counts. `row_steps` adds up the rows in use over all steps."""

    prompt_tokens_computed: int
    prompt_tokens_shared: int
    steps: int
    row_steps: int
    num_rows: int
    preemptions: int


class BatchScheduler(Protocol[Asked_contra]):
    """The part of the engine's scheduler that a batch uses."""

    @property
    def num_waiting(self) -> int:
        """Texts that have no row yet."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""

    @property
    def usage(self) -> BatchUsage:
        """The work so far."""

    def submit(self, request: Asked_contra, /) -> int:
        """Queue a request; return its number."""

    def step(self) -> Sequence[Event]:
        """Run one step; return its events."""


@dataclass
class Progress:
    """The progress of a batch. Prompts count once they have a result, tokens when they are sampled."""

    num_finished: int = 0
    num_failed: int = 0
    num_tokens: int = 0


def run_batch(
    scheduler: BatchScheduler[Asked],
    tasks: Iterable[Task],
    request_of: Callable[[Task], Asked],
    take: Callable[[Task, Finished | Failed], None],
    progress: Progress,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Run every task; pass each result to `take` as it comes, in any order.

    A request is made when it is needed: as many wait as there are rows, so that no row stays empty.
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


# The time of a batch, from `plan`'s predictions of prompts and decode steps.


def estimate_seconds(predictor: Predictor, prompts: Sequence[tuple[int, int]], num_rows: int) -> float | None:
    """The time of a run in which every text has its full length; None if prompts cannot be predicted.

    `prompts` are the tokens of each prompt and of its text. Adds up the prompts' times and the decode steps of
    `num_rows` rows at the mean depth; ignores that rows wait for each other.
    """
    total = 0.0
    for length, count in Counter(length for length, _ in prompts).items():
        seconds = predictor.prefill_seconds(length)
        if seconds is None:
            return None
        total += count * seconds
    num_decoded = sum(new - 1 for _, new in prompts)  # prefill gives the first
    if not num_decoded:
        return total
    depth = sum((new - 1) * (length + new / 2) for length, new in prompts) / num_decoded
    steps = max(num_decoded / num_rows, max(new - 1 for _, new in prompts))
    return total + steps * predictor.decode_seconds(round(depth), num_rows)


# The rows that a batch used, over the whole run.

_MOST_SAMPLES = 2000


class RowsOverTime:
    """Samples the counts of steps and rows during a run. Keeps a few thousand, however long the run."""

    def __init__(self) -> None:
        self._seconds, self._steps, self._row_steps = [0.0], [0], [0]
        self._interval = 0.0  # between two samples, at least

    def note(self, seconds: float, steps: int, row_steps: int) -> None:
        """Note the counts so far; `row_steps` adds up the rows in use over all steps."""
        if seconds - self._seconds[-1] < self._interval:
            return
        self._seconds.append(seconds)
        self._steps.append(steps)
        self._row_steps.append(row_steps)
        if len(self._seconds) > _MOST_SAMPLES:
            del self._seconds[1::2], self._steps[1::2], self._row_steps[1::2]
            self._interval = 2 * seconds / _MOST_SAMPLES

    def means(self, num_parts: int) -> list[float]:
        """The mean rows in each of `num_parts` equal parts of the run; 0 where no step ended."""
        ends = [self._seconds[-1] * part / num_parts for part in range(num_parts + 1)]
        places = [bisect_right(self._seconds, end) - 1 for end in ends]
        steps, row_steps = ([counts[place] for place in places] for counts in (self._steps, self._row_steps))
        return [
            (row_steps[part + 1] - row_steps[part]) / max(steps[part + 1] - steps[part], 1) for part in range(num_parts)
        ]
