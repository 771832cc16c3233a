"""Where a batch runs: in this process, or on the workers of a Ray cluster; and what such a worker opens."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from llmcli.batch.run import BatchScheduler
from llmcli.cli import lazy, shared
from llmcli.cli.batch_job import BatchJob, Task
from llmcli.cli.constrained_texts import Schemas
from llmcli.cli.run import NGRAM, OFF, check_run, loaded_objects_set_aside, open_run
from llmcli.cli.terminal import terminal
from llmcli.cli.units import counted
from llmcli.errors import UsageError

MIXED_CARDS = "mixed cards"  # the device in a record
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
LEAST_RAY = (2, 60)
_INDEX_OF_CARD = re.compile(r" \(cuda:\d+\)")
# Ray reads these when it is imported. It would report its use to its makers, and listen at the machine's public address
# where loopback is enough: the variable against that is named after the systems where loopback is Ray's default.
_RAY_DEFAULTS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Tries to connect, half a minute each; usually 20. A start on this machine may need some, a cluster that runs does not.
_TRIES = {"RAY_NUM_REDIS_GET_RETRIES": "1"}
# It would print what it hears of dead workers on stdout, between results. The scheduler tells of them on stderr.
_QUIET = {"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "^"}


@dataclass(frozen=True)
class BatchEngine:
    """What runs a batch. `request_of` makes what its scheduler takes. `device` is what its texts depend on.

    With `counts_ended` it says nothing of single tokens, so those of ended texts are counted. `note` begins the text
    at the end of the bar.
    """

    scheduler: BatchScheduler[Any]
    request_of: Callable[[Task], Any]
    device: str
    load_seconds: float
    counts_ended: bool = False
    note: Callable[[], str] = str
    draft_usage: Callable[[], lazy.drafts.DraftUsage | None] = lambda: None


@contextmanager
def engine_here(job: BatchJob) -> Iterator[BatchEngine]:
    """This process, with the model that it loads. Raises: LLMCliError and its subclasses"""
    run, num_prompts = job.prompts.run, len(job.todo)
    loaded = run.load(job.most_rows or min(num_prompts, lazy.runners.MAX_ROWS), host_rows=job.most_rows or 1)
    # Nobody waits for the next token, so new prompts are not limited by time, and equal runs take equal steps.
    scheduler = lazy.scheduler.Scheduler(
        loaded.runner, run.session.tokenizer, wait_seconds=math.inf, drafting=loaded.drafting
    )
    with loaded_objects_set_aside():
        yield BatchEngine(
            scheduler,
            partial(job.prompts.request_of, run_seed=run.seed),
            kind_of_device(loaded.runner.description),
            loaded.load_seconds,
            draft_usage=lambda: loaded.draft_usage,
        )


@contextmanager
def engine_on_ray(job: BatchJob, options: shared.RunOptions) -> Iterator[BatchEngine]:
    """The workers of a Ray cluster. Raises: LLMCliError and its subclasses"""
    files, run = job.prompts.options, job.prompts.run
    assert files.ray is not None
    device = job.record.runner or None
    if device is not None and (device == MIXED_CARDS) != files.mixed_cards:
        how = "without --mixed-cards" if files.mixed_cards else "with --mixed-cards"
        raise UsageError(f"{job.output} was made {how}: run {how} again, or name another output")
    where = lazy.on_ray.connect(files.ray)
    scheduler = lazy.on_ray.RayScheduler(
        lazy.on_ray.Work(
            partial(open_far_engine, found_everywhere(options), files.num_rows),
            model_files(run.session.model.checkpoint.folder),
            None if files.mixed_cards else device,
            min(files.workers or len(job.todo), len(job.todo)),
            on_cards=options.devices.device != "cpu",
            mixes_cards=files.mixed_cards,
        ),
        terminal.warn,
    )
    try:
        terminal.info(f"Starting workers: {where}")
        facts = scheduler.wait_for_worker()
        terminal.info(f"{run.session.name}: {facts.device}, context {run.context}, seed {run.seed}")
        yield BatchEngine(
            scheduler,
            partial(job.prompts.asked_of, run_seed=run.seed),
            MIXED_CARDS if files.mixed_cards else facts.device,
            facts.load_seconds,
            counts_ended=True,
            note=lambda: f"{counted(scheduler.num_workers, 'worker')}, ",
        )
    finally:
        scheduler.close()


def require_ray(address: str, options: shared.RunOptions) -> shared.RunOptions:
    """The options of a driver, which has no device of its own.

    Raises: UsageError where the extra is not installed, and for what Ray decides
    """
    for name, value in (_RAY_DEFAULTS if address == shared.AUTO else _RAY_DEFAULTS | _TRIES).items():
        os.environ.setdefault(name, value)
    os.environ.update(_QUIET)
    try:
        is_good = lazy.on_ray.ray_version() >= LEAST_RAY
    except ImportError:  # there is none, or it is too old for what is imported
        is_good = False
    if not is_good:
        least = ".".join(map(str, LEAST_RAY))
        raise UsageError(f"--ray needs Ray {least} or later: run `pip install 'llmcli[ray]'`")
    device = options.devices.device
    if device.startswith("cuda:"):
        raise UsageError(f"--ray and --device {device} cannot be combined: Ray chooses the card; use --device cuda")
    return replace(options, devices=shared.DeviceOptions(device="cpu"), draft=OFF)


def found_everywhere(options: shared.RunOptions) -> shared.RunOptions:
    """The options for workers, whose current folder is another: paths from the root. A hub id stays."""

    def whole(name: str) -> str:
        return str(Path(name).resolve()) if Path(name).exists() else name

    choices = shared.parse_adapters(options.adapter)
    draft = options.draft
    return replace(
        options,
        model=None if options.model is None else whole(options.model),
        adapter=[replace(choice, name=whole(choice.name)).text for choice in choices] or None,
        draft=draft if draft in (OFF, NGRAM, shared.AUTO) else whole(draft),
    )


def open_far_engine(options: shared.RunOptions, num_rows: int | None) -> lazy.worker.OpenedEngine:
    """A worker's engine. Requests bring their own sampler, so all that counts here is model and device.

    Raises: LLMCliError and its subclasses
    """
    os.environ.setdefault(_BLAS_THREADS, "1")  # as the command line does
    terminal.is_quiet = True
    request = check_run(options, {}, shared.SamplerOptions(seed=0), None)
    run = open_run(request, options.model)
    loaded = run.load(num_rows, host_rows=num_rows or 1)
    scheduler = lazy.scheduler.Scheduler(
        loaded.runner, run.session.tokenizer, wait_seconds=math.inf, drafting=loaded.drafting
    )
    gc.collect()
    gc.freeze()
    device, files = kind_of_device(loaded.runner.description), model_files(run.session.model.checkpoint.folder)
    facts = lazy.worker.EngineFacts(device, loaded.load_seconds, files, scheduler.usage.num_rows)
    return lazy.worker.OpenedEngine(scheduler, Schemas(run.session).hold, facts)


def kind_of_device(description: str) -> str:
    """What texts depend on: not which of a machine's equal cards it is."""
    return _INDEX_OF_CARD.sub("", description)


def model_files(folder: Path) -> dict[str, str]:
    """What tells a model's files on one machine from those on another: their bytes, and of weights the size."""
    return {
        name: f"{state.size} bytes"
        if name.endswith(".safetensors")
        else hashlib.sha256((folder / name).read_bytes()).hexdigest()[:16]
        for name, state in sorted(lazy.folder.SourceState.record(folder).files.items())
        if name.endswith((".json", ".jinja", ".model", ".txt", ".safetensors"))
    }
