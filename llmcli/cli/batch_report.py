"""What a batch will take, for `--check`, and what it took, for `--stats`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from llmcli.batch.estimate import estimate_seconds
from llmcli.batch.rows_over_time import RowsOverTime
from llmcli.batch.run import Progress, Usage
from llmcli.cli import lazy
from llmcli.cli.batch_job import Job
from llmcli.cli.output.base import draft_rows
from llmcli.cli.targets import open_target
from llmcli.cli.terminal import fact_lines, terminal
from llmcli.cli.units import estimated_duration, size

if TYPE_CHECKING:
    from llmcli.cli.run import LoadedRunner
    from llmcli.measure.subject import TargetPlan


def show_check(job: Job) -> None:
    """Counts, memory and time of what is still to be run, on standard output.

    Raises: InsufficientMemoryError if the model does not fit.
    """
    run = job.prompts.run
    lengths = [len(task.token_ids) for task in job.tasks]
    longest = max(job.tasks, key=lambda task: len(task.token_ids))
    sizes = [(len(task.token_ids), task.max_new_tokens or run.context - len(task.token_ids)) for task in job.todo]
    planned = _plan(job)
    memory, predictor, num_rows = planned.memory, planned.predictor, planned.num_rows
    seconds = estimate_seconds(predictor, sizes, num_rows)
    rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
    needed = "unknown" if seconds is None else estimated_duration(seconds)
    facts = {
        "prompts": f"{len(lengths)}" + (f", {len(sizes)} left to run" if len(sizes) < len(lengths) else ""),
        "prompt tokens": f"{sum(lengths)}, the longest prompt {max(lengths)} (line {longest.line.number})",
        "new tokens": f"at most {sum(new for _, new in sizes)}",
        "memory": f"{size(memory.total_bytes)} needed, {size(memory.available_bytes)} free",
        "time": f"{needed}: estimated for texts of full length, in {rows}",
    }
    terminal.write(fact_lines(facts.items(), 15, sys.stdout))


def _plan(job: Job) -> TargetPlan:
    """The memory and the speed of the rows that the run will have."""
    run = job.prompts.run
    subject = lazy.Subject(run.session.name, run.session.model, None)
    target = open_target(run.devices, subject)
    # On a card more rows than have room for a full context share the memory; those that have are what is planned.
    most = job.most_rows if run.devices.card is None else None
    planned = target.plan(subject, context=run.context, num_rows=most)
    limit = job.most_rows or max(len(job.todo), 1)
    return planned if planned.num_rows <= limit else target.plan(subject, context=run.context, num_rows=limit)


def show_stats(progress: Progress, usage: Usage, rows: RowsOverTime, loaded: LoadedRunner, run_seconds: float) -> None:
    """What the run took, on stderr."""
    mean_rows = usage.row_steps / usage.steps if usage.steps else 0.0
    facts = {
        "prompts": f"{progress.num_finished} finished, {progress.num_failed} failed",
        "load": f"{loaded.load_seconds:.2f} s",
        "run": f"{run_seconds:.2f} s",
        "new tokens": f"{progress.num_tokens}, {progress.num_tokens / run_seconds:.1f} tokens/s",
        "prompt tokens": f"{usage.prompt_tokens_computed} computed, {usage.prompt_tokens_shared} shared",
        "rows in use": f"{mean_rows:.1f} of {usage.num_rows} on average",
        "rows over time": f"{' '.join(f'{mean:.3g}' for mean in rows.means(10))} in tenths of the run",
        "preemptions": f"{usage.preemptions}",
        **draft_rows(loaded.draft_usage),
    }
    for name, text in facts.items():
        terminal.show(f"{name:<15}{text}\n")
