"""What `plan` and `bench` work on: a model or shape, and a device. Slow imports come with the calls."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil

from llmcli.checkpoint.hub_id import find_hub_id
from llmcli.cli.device_choice import CPU_DTYPES, RunnerOptions, require_room_for_torch
from llmcli.cli.session import model_folder, resolve_context
from llmcli.cli.terminal import OnProgress, terminal
from llmcli.errors import InsufficientMemoryError, UsageError
from llmcli.kernels.card_facts import TYPICAL_CARD
from llmcli.resources import STORYTELLER, bench_folder

if TYPE_CHECKING:
    from llmcli.checkpoint.model import Model
    from llmcli.kernels.device import Device
    from llmcli.measure.bench import BenchReport
    from llmcli.measure.plan import MemoryUse, Plan, Predictor
    from llmcli.runners.base import Runner
    from llmcli.runners.cuda.pricing import Rates

DEFAULT_FORMAT = "int8"
LENGTHS = (128, 2048)  # tokens of prompts and depths, where nothing else is asked for

# A scratch folder, or what an export or its source leave beside it: the process that made it stands in the name.
_SCRATCH_NAME = re.compile(r"\.?[\w.-]+-(?:int8|int4|bf16)\.([0-9]+)(?:\.source|\.partial-[0-9a-f]+)?")


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


def open_subject(name: str | None, form: str | None) -> Subject:
    """The shape of that name, else the model, named as for `model_folder`; a folder wins over a shape.

    Raises: UsageError for an unknown format, or a format of a model that has its own; CheckpointError
    """
    from llmcli.checkpoint.model import open_model
    from llmcli.checkpoint.shapes import FORMATS, shape_model, shape_names

    if form is not None and form not in FORMATS:
        raise UsageError(f"--format is {form!r}, expected one of {', '.join(FORMATS)}")
    if name is not None and name in shape_names() and not Path(name).exists():
        form = form or DEFAULT_FORMAT
        return Subject(name, shape_model(name, form), form)
    if form is not None:
        raise UsageError("--format is for a shape; a model runs in the format of its files")
    if name is not None and not (find_hub_id(name) or Path(name).exists() or name == STORYTELLER):
        raise UsageError(f"{name!r} is no model folder and no shape; the shapes are {', '.join(shape_names())}")
    folder = model_folder(name)
    shown_name = name if name is not None and find_hub_id(name) else folder.resolve().name
    return Subject(shown_name, open_model(folder), None)


class Target(Protocol):
    """A device that a model could run on, and what was measured of it."""

    description: str
    read_bytes: float

    def plan(self, subject: Subject, *, context: int, num_rows: int) -> tuple[MemoryUse, Predictor]:
        """The memory of a model and its predictor. Raises: InsufficientMemoryError if it does not fit."""

    def load(self, model: Model, *, context: int, num_rows: int, on_progress: OnProgress) -> Runner:
        """Read the weights. Raises: LLMCliError and its subclasses."""


class CardTarget:
    """A card; one that is not here is given by its memory and rates."""

    def __init__(
        self,
        description: str,
        dtype: str,
        kv_cache: str,
        rates: Rates,
        available_bytes: int,
        device: Device | None = None,
    ):
        self.description = description
        self.read_bytes = rates.read_bytes
        self._dtype = dtype
        self._kv_cache = kv_cache
        self._rates = rates
        self._available_bytes = available_bytes
        self._device = device
        self._facts = TYPICAL_CARD if device is None else device.facts

    def plan(self, subject: Subject, *, context: int, num_rows: int) -> tuple[MemoryUse, Predictor]:
        """See `Target`."""
        from llmcli.measure.plan import MemoryUse
        from llmcli.runners.cuda.memory import PREFILL_CHUNKS, fit_memory, fitting_context
        from llmcli.runners.cuda.predict import CardPredictor
        from llmcli.runners.cuda.stored import StoredModel

        stored = StoredModel.of_model(subject.model, self._dtype, self._kv_cache)
        plan = fit_memory(
            stored,
            subject.full_name,
            max_seq_len=context,
            num_rows=num_rows,
            available=self._available_bytes,
            card=self._facts,
        )
        largest = fitting_context(
            stored,
            num_rows=num_rows,
            available=self._available_bytes,
            chunk_tokens=PREFILL_CHUNKS[-1],
            card=self._facts,
        )
        other_bytes = plan.total_bytes - plan.weight_bytes - plan.cache_bytes
        use = MemoryUse(
            plan.weight_bytes, plan.cache_bytes, stored.cache_type, other_bytes, self._available_bytes, largest
        )
        return use, CardPredictor(plan, self._rates, self._facts)

    def load(self, model: Model, *, context: int, num_rows: int, on_progress: OnProgress) -> Runner:
        """See `Target`."""
        from llmcli.runners.cuda.load import load

        return load(
            model,
            max_seq_len=context,
            num_rows=num_rows,
            dtype=self._dtype,
            kv_cache=self._kv_cache,
            on_compile=lambda count: terminal.info(f"compiling {count} kernels for this card, once"),
            on_progress=on_progress,
            device=self._device,
        )


class HostTarget:
    """The CPU."""

    def __init__(self, dtype: str, kv_cache: str, num_threads: int | None):
        require_room_for_torch()
        from llmcli.runners.torch.predict import measure_read_bytes

        self._dtype = CPU_DTYPES[dtype]
        self._kv_cache = kv_cache
        self._num_threads = num_threads
        self.description = f"CPU, {self._dtype}"
        self.read_bytes = measure_read_bytes(num_threads)

    def plan(self, subject: Subject, *, context: int, num_rows: int) -> tuple[MemoryUse, Predictor]:
        """See `Target`."""
        from llmcli.measure.plan import MemoryUse
        from llmcli.runners.torch.memory import available_memory, cache_type_of, check_memory, fitting_context
        from llmcli.runners.torch.predict import HostPredictor

        model, dtype, kv_cache = subject.model, self._dtype, self._kv_cache
        plan = check_memory(model, max_seq_len=context, num_rows=num_rows, dtype=dtype, kv_cache=kv_cache)
        available = available_memory()
        largest = fitting_context(model, num_rows=num_rows, dtype=dtype, available=available, kv_cache=kv_cache)
        cache_type = cache_type_of(dtype, kv_cache)
        use = MemoryUse(plan.weight_bytes, plan.cache_bytes, cache_type, plan.workspace_bytes, available, largest)
        return use, HostPredictor(model, dtype=dtype, read_bytes=self.read_bytes, kv_cache=kv_cache)

    def load(self, model: Model, *, context: int, num_rows: int, on_progress: OnProgress) -> Runner:
        """See `Target`."""
        from llmcli.runners.torch.load import load

        return load(
            model,
            max_seq_len=context,
            num_rows=num_rows,
            dtype=self._dtype,
            kv_cache=self._kv_cache,
            num_threads=self._num_threads,
            on_progress=on_progress,
        )


def open_target(options: RunnerOptions, subject: Subject) -> Target:
    """The device that the options say, its bandwidth measured, and on a card the rates of the model's products.

    Raises: LLMCliError and its subclasses
    """
    if options.card is None:
        return HostTarget(options.dtype, options.kv_cache, options.num_threads)
    from llmcli.kernels.device import Device
    from llmcli.runners.cuda.arena import free_bytes
    from llmcli.runners.cuda.rates import measure_rates

    device = Device.open(options.card)
    rates = measure_rates(device, _product_types(subject, options.dtype))
    description = f"{device.name} (cuda:{device.index})"
    return CardTarget(description, options.dtype, options.kv_cache, rates, free_bytes(), device)


def distant_card(memory_gib: float, read_gbps: float, dtype: str, kv_cache: str) -> Target:
    """A card that is not in this machine, as its maker describes it."""
    from llmcli.runners.cuda.pricing import Rates

    description = f"a card of {memory_gib:g} GiB"
    return CardTarget(description, dtype, kv_cache, Rates(read_gbps * 1e9, {}), int(memory_gib * 2**30))


def precision(subject: Subject, dtype: str) -> str:
    """How the weights are stored, for the user."""
    from llmcli.runners.cuda.stored import StoredModel

    return StoredModel.of_model(subject.model, dtype).precision


def _product_types(subject: Subject, dtype: str) -> list[str]:
    """The types in which the model multiplies on a card."""
    from llmcli.runners.cuda.stored import StoredModel
    from llmcli.runners.cuda.weight_layout import plan_weights

    stored = StoredModel.of_model(subject.model, dtype)
    projections = plan_weights(stored, max_seq_len=1).projections
    return sorted({stored.attention_type, *(projection.format.activation_type for projection in projections)})


def plan_subject(subject: Subject, target: Target, dtype: str, requested_context: int | None, num_rows: int) -> Plan:
    """Everything that `llmcli plan` says.

    Raises: UsageError for a context over the model's; InsufficientMemoryError for one that does not fit
    """
    from llmcli.checkpoint.shapes import num_parameters
    from llmcli.measure.plan import Plan, depths_within, predict_decode, predict_prompt

    context = resolve_context(subject.model.config, subject.name, requested_context)
    memory, predictor = target.plan(subject, context=context, num_rows=num_rows)
    lengths = depths_within(context, LENGTHS)
    return Plan(
        model=subject.full_name,
        precision=precision(subject, dtype),
        num_parameters=num_parameters(subject.model),
        device=target.description,
        context=context,
        num_rows=num_rows,
        memory=memory,
        read_bytes_per_second=target.read_bytes,
        decode=tuple(predict_decode(predictor, length, num_rows) for length in lengths),
        prompts=tuple(predict_prompt(predictor, length) for length in lengths),
    )


def measure_subject(
    subject: Subject,
    options: RunnerOptions,
    *,
    prompts: Sequence[int],
    depths: Sequence[int],
    num_rows: int,
    num_new_tokens: int,
    repeats: int,
    scratch: Path | None,
    keep: bool,
) -> BenchReport:
    """Everything that `llmcli bench` says.

    Raises: LLMCliError and its subclasses
    """
    from llmcli.measure.bench import SPARE_TOKENS, Bench, BenchOptions, BenchReport
    from llmcli.measure.energy import open_meter

    target = open_target(options, subject)
    context = max(*prompts, *depths) + num_new_tokens + SPARE_TOKENS
    try:
        _, predictor = target.plan(subject, context=context, num_rows=num_rows)  # before gigabytes are written
    except InsufficientMemoryError as error:
        raise InsufficientMemoryError(f"{error} (the context follows from --prompt, --depth and --tokens)") from error
    terminal.info(f"{target.description} reads {target.read_bytes / 1e9:,.1f} GB/s")
    with scratch_model(subject, scratch, keep=keep) as model:
        start = time.perf_counter()
        with terminal.progress(f"loading {subject.full_name}") as on_progress:
            runner = target.load(model, context=context, num_rows=num_rows, on_progress=on_progress)
        load_seconds = time.perf_counter() - start
        terminal.info(f"{subject.full_name}: {runner.description}{options.note}, context {context}")
        found = open_meter(options.card)
        meter, energy_problem = (None, found) if isinstance(found, str) else (found, None)
        bench_options = BenchOptions(prompts, depths, num_rows, num_new_tokens, repeats)
        bench = Bench(runner, predictor, target.read_bytes, bench_options, meter)
        with terminal.progress("measuring", unit="figures") as on_progress:
            total = 1 + len(prompts) + len(depths)
            num_checked_tokens = bench.check_tokens()
            on_progress(1, total)
            prompt_figures = []
            for length in prompts:
                prompt_figures.append(bench.measure_prompt(length))
                on_progress(1 + len(prompt_figures), total)
            decode_figures = []
            for depth in depths:
                decode_figures.append(bench.measure_decode(depth))
                on_progress(1 + len(prompts) + len(decode_figures), total)
    return BenchReport(
        model=subject.full_name,
        precision=precision(subject, options.dtype),
        device=runner.description,
        cache_type=runner.cache_type,
        context=context,
        read_bytes_per_second=target.read_bytes,
        load_seconds=load_seconds,
        num_checked_tokens=num_checked_tokens,
        idle_watts=bench.idle_watts,
        energy_problem=energy_problem,
        prompts=tuple(prompt_figures),
        decode=tuple(decode_figures),
    )


@contextmanager
def scratch_model(subject: Subject, folder: Path | None, *, keep: bool) -> Iterator[Model]:
    """A subject's model with its files. A shape's are written and removed afterwards, unless they are to be kept.

    What was kept before is taken as it is.
    Raises: LLMCliError and its subclasses
    """
    if subject.form is None:
        yield subject.model
        return
    from llmcli.checkpoint.model import open_model
    from llmcli.checkpoint.random_weights import write_shape

    parent = folder or bench_folder()
    kept = parent / f"{subject.name}-{subject.form}"
    if kept.exists():
        terminal.info(f"using {kept}, which an earlier run has kept")
        yield open_model(kept)
        return
    _remove_abandoned(parent)
    written = kept if keep else kept.with_name(f"{kept.name}.{os.getpid()}")
    try:
        with terminal.progress(f"writing {subject.full_name}, random weights") as on_progress:
            write_shape(subject.name, subject.form, written, on_progress)
        yield open_model(written)
    finally:
        if not keep:
            shutil.rmtree(written, ignore_errors=True)
    if keep:
        terminal.info(f"kept {written}")


def _remove_abandoned(parent: Path) -> None:
    """Remove what runs that were killed have left: folders whose name ends in the number of no process."""
    if not parent.is_dir():
        return
    for path in parent.iterdir():
        match = _SCRATCH_NAME.fullmatch(path.name)
        if match and path.is_dir() and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)
