"""What a batch will take, for `--check`, and what it took, for `--stats`."""

from __future__ import annotations

from llmcli.batch.estimate import estimate_seconds
from llmcli.batch.run import Progress, Usage
from llmcli.cli.batch_job import Job
from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.targets import Subject, open_target
from llmcli.cli.terminal import terminal


def show_check(job: Job, runner_options: RunnerOptions) -> None:
    """Counts, memory and time of what is still to be run, on standard output.

    Raises: InsufficientMemoryError if the model does not fit.
    """
    session, context = job.prompts.session, job.prompts.context
    lengths = [len(task.token_ids) for task in job.tasks]
    longest = max(job.tasks, key=lambda task: len(task.token_ids))
    sizes = [(len(task.token_ids), task.max_new_tokens or context - len(task.token_ids)) for task in job.todo]
    num_rows = job.options.rows_for(len(sizes))
    subject = Subject(session.name, session.model, None)
    memory, predictor = open_target(runner_options, subject).plan(subject, context=context, num_rows=num_rows)
    seconds = estimate_seconds(predictor, sizes, num_rows)
    rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
    duration = "not known" if seconds is None else f"about {_duration(seconds)}"
    facts = {
        "prompts": f"{len(lengths)}" + (f", {len(sizes)} of them to run" if len(sizes) < len(lengths) else ""),
        "prompt tokens": f"{sum(lengths)}, the longest prompt {max(lengths)} (line {longest.line.number})",
        "new tokens": f"at most {sum(new for _, new in sizes)}",
        "memory": f"{_size(memory.total_bytes)} needed, {_size(memory.available_bytes)} free",
        "time": f"{duration}: an estimate, if every text gets as long as it may, in {rows}",
    }
    terminal.write("".join(f"{name:<15}{text}\n" for name, text in facts.items()))


def show_stats(progress: Progress, usage: Usage, load_seconds: float, run_seconds: float) -> None:
    """What the run took, on stderr."""
    mean_rows = usage.row_steps / usage.steps if usage.steps else 0.0
    facts = {
        "prompts": f"{progress.num_finished} finished, {progress.num_failed} failed",
        "load": f"{load_seconds:.2f} s",
        "run": f"{run_seconds:.2f} s",
        "new tokens": f"{progress.num_tokens}, {progress.num_tokens / run_seconds:.1f} tokens/s",
        "prompt tokens": f"{usage.prompt_tokens_computed} computed, {usage.prompt_tokens_shared} shared",
        "rows in use": f"{mean_rows:.1f} of {usage.num_rows} on average",
        "preemptions": f"{usage.preemptions}",
    }
    for name, text in facts.items():
        terminal.info(f"{name:<15}{text}")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"
