"""The subjects of `plan` and `bench`: a model or a shape, its possible device, and what is known of both."""

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from llmcli.checkpoint.model import Model, num_parameters, open_model
from llmcli.checkpoint.random_weights import OnProgress, write_shape
from llmcli.engine.drafts import MAX_DRAFT_ROWS
from llmcli.errors import InsufficientMemoryError
from llmcli.measure import bench
from llmcli.measure.energy import EnergyMeter
from llmcli.measure.plan import DraftPlan, MemoryUse, Plan, Predictor, depths_within, predict_decode, predict_prompt
from llmcli.runners.base import Runner


@dataclass(frozen=True)
class Subject:
    """A model with its files, or a shape in the format `form`, whose files do not exist."""

    name: str
    model: Model
    form: str | None

    @property
    def full_name(self) -> str:
        """The name with a shape's format."""
        return self.name if self.form is None else f"{self.name} {self.form}"


@dataclass(frozen=True)
class TargetPlan:
    """A subject on a target: its memory, what predicts its speed, its rows, and how its weights are stored."""

    memory: MemoryUse
    predictor: Predictor
    num_rows: int
    precision: str


class Target(Protocol):
    """A device that a model could run on, and the bandwidth of its memory in bytes a second."""

    description: str
    read_bytes: float

    def plan(self, subject: Subject, *, context: int, num_rows: int | None) -> TargetPlan:
        """Plan the memory; with `num_rows` None, as many rows as fit.

        Raises: InsufficientMemoryError if it does not fit; CheckpointError for a file that cannot be read.
        """


def plan_subject(
    subject: Subject, target: Target, *, context: int, num_rows: int | None, lengths: Sequence[int]
) -> Plan:
    """Everything that `llmcli plan` reports, for prompts and depths of `lengths` tokens, if the context allows.

    Raises: InsufficientMemoryError for a context that does not fit
    """
    planned = target.plan(subject, context=context, num_rows=num_rows)
    within = depths_within(context, lengths)
    return Plan(
        model=subject.full_name,
        precision=planned.precision,
        num_parameters=num_parameters(subject.model),
        device=target.description,
        context=context,
        num_rows=planned.num_rows,
        memory=planned.memory,
        read_bytes_per_second=target.read_bytes,
        decode=tuple(predict_decode(planned.predictor, length, planned.num_rows) for length in within),
        prompts=tuple(predict_prompt(planned.predictor, length) for length in within),
    )


def plan_draft(subject: Subject, target: Target, beside: Plan) -> DraftPlan:
    """The memory of a draft model as a run loads it: with the model's context and rows, if it can use them.

    Raises: InsufficientMemoryError if it does not fit even alone
    """
    context = min(beside.context, subject.model.config.max_position_embeddings)
    memory = target.plan(subject, context=context, num_rows=min(beside.num_rows, MAX_DRAFT_ROWS)).memory
    return DraftPlan(subject.full_name, memory, beside.memory.total_bytes + memory.total_bytes)


def plan_bench(subject: Subject, target: Target, *, context: int, num_rows: int | None) -> TargetPlan:
    """The plan of what `bench` loads, before gigabytes are written.

    Raises: InsufficientMemoryError if it does not fit
    """
    try:
        return target.plan(subject, context=context, num_rows=num_rows)
    except InsufficientMemoryError as error:
        raise InsufficientMemoryError(f"{error} (the context follows from --prompt, --depth and --tokens)") from error


def measure_subject(
    subject: Subject,
    target: Target,
    planned: TargetPlan,
    runner: Runner,
    load_seconds: float,
    options: bench.BenchOptions,
    meter: EnergyMeter | str,
    on_progress: OnProgress,
    comparison: bench.KernelComparison | None = None,
) -> bench.BenchReport:
    """Everything that `llmcli bench` reports. `meter` is the energy meter, or why there is none.

    With a `comparison` every figure is measured with the user's kernels and with ours, in turns.
    Raises: DeviceError if what is timed is not what `generate` does
    """
    energy_problem = meter if isinstance(meter, str) else None
    timed = bench.Bench(runner, planned.predictor, options, None if isinstance(meter, str) else meter)
    drafted_depths = options.depths if options.most_drafts else ()
    total = 1 + len(options.prompts) + len(options.depths) + len(drafted_depths)
    with nullcontext() if comparison is None else comparison.engine_kernels():  # the loop is checked, not the kernels
        num_checked_tokens = timed.check_tokens()
    on_progress(1, total)
    ways: Sequence[bench.Way] = (nullcontext,) if comparison is None else comparison.ways
    prompts: list[list[bench.PromptFigures]] = []  # of each length: for each way
    decode: list[list[bench.DecodeFigures]] = []
    for length in options.prompts:
        prompts.append(timed.measure_prompt(length, ways))
        on_progress(1 + len(prompts), total)
    for depth in options.depths:
        decode.append(timed.measure_decode(depth, ways))
        on_progress(1 + len(prompts) + len(decode), total)
    draft_steps = []
    for place, depth in enumerate(drafted_depths, 1):
        draft_steps += timed.measure_drafts(depth)
        on_progress(1 + len(prompts) + len(decode) + place, total)
    engine = None
    if comparison is not None:
        engine = bench.EngineFigures(
            comparison.own_kernels, tuple(ours for _, ours in prompts), tuple(ours for _, ours in decode)
        )
    return bench.BenchReport(
        model=subject.full_name,
        precision=planned.precision,
        device=runner.description,
        cache_type=runner.cache_type,
        context=runner.limits.max_seq_len,
        read_bytes_per_second=target.read_bytes,
        load_seconds=load_seconds,
        num_checked_tokens=num_checked_tokens,
        idle_watts=timed.idle_watts,
        energy_problem=energy_problem,
        prompts=tuple(own for own, *_ in prompts),
        decode=tuple(own for own, *_ in decode),
        engine=engine,
        draft_steps=tuple(draft_steps),
    )


# Files of a shape with random weights: written for a measurement, and removed after it unless they are kept.

# A scratch folder, or what an export or its source leaves next to it: the name holds the number of its process.
_SCRATCH_NAME = re.compile(r"\.?[\w.-]+-(?:int8|int4|awq|fp8|bf16)\.([0-9]+)(?:\.source|\.partial-[0-9a-f]+)?")


class Scratch:
    """The folder of the shape `name` in the format `form`, inside `parent`. As a context it removes what is not kept.

    `is_there` means that an earlier run has kept it: it is used as it is.
    """

    def __init__(self, name: str, form: str, parent: Path, *, keep: bool) -> None:
        kept = parent / f"{name}-{form}"
        self.is_there = kept.exists()
        self.folder = kept if keep or self.is_there else kept.with_name(f"{kept.name}.{os.getpid()}")
        self._is_kept = keep or self.is_there
        self._name, self._form = name, form

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_kept:
            shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, on_progress: OnProgress) -> None:
        """Write the weights, and remove what killed runs have left next to them.

        Raises: LLMCliError and its subclasses
        """
        _remove_abandoned(self.folder.parent)
        write_shape(self._name, self._form, self.folder, on_progress)

    def open(self) -> Model:
        """The model. Raises: CheckpointError and its subclasses."""
        return open_model(self.folder)


def _remove_abandoned(parent: Path) -> None:
    """Remove what killed runs have left: folders whose name ends in the number of no running process."""
    if not parent.is_dir():
        return
    for path in parent.iterdir():
        match = _SCRATCH_NAME.fullmatch(path.name)
        if match and path.is_dir() and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)
