"""Opens what the flags of `plan`, `bench` and `kernels` name: a model or a shape, its files, and a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmcli.checkpoint.hub_library import find_hub_id
from llmcli.checkpoint.ollama_names import hub_hint
from llmcli.cli import lazy
from llmcli.cli.device_choice import RunnerOptions, prepare_for_torch
from llmcli.cli.progress import progress
from llmcli.cli.prompt import chosen_word
from llmcli.cli.session import model_folder, shown_name, warn_of
from llmcli.cli.spelling import near_names
from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError
from llmcli.resources import bench_folder, built_in_model

DEFAULT_FORMAT = "int8"
LENGTHS = (128, 2048)  # tokens of prompts and depths, by default


def open_subject(name: str | None, form: str | None) -> lazy.subject.Subject:
    """The shape of that name, else the model, named as for `model_folder`; a folder wins over a shape.

    Raises: UsageError for an unknown format, or a format of a model that has its own; CheckpointError
    """
    if form is not None:
        chosen_word("--format", form, lazy.random_weights.FORMATS)
    shapes = lazy.random_weights.shape_names()
    if name is not None and name in shapes and not Path(name).exists():
        form = form or DEFAULT_FORMAT
        return lazy.subject.Subject(name, lazy.random_weights.shape_model(name, form), form)
    if form is not None:
        raise UsageError("--format is for a shape; a model runs in the format of its files")
    if name is not None and not (find_hub_id(name) or Path(name).exists() or built_in_model(name)):
        near = " or ".join(near_names(name, shapes))
        hint = hub_hint(name) or (f"; did you mean {near}?" if near else f"; the shapes are {', '.join(shapes)}")
        raise UsageError(f"{name!r} is neither a model folder nor a known shape{hint}")
    folder = model_folder(name)
    subject = lazy.subject.Subject(shown_name(name, folder), lazy.model.open_model(folder), None)
    warn_of(subject.model, subject.name)
    return subject


def refuse_scratch_of_model(subject: lazy.subject.Subject, folder: Path | None, *, keep: bool = False) -> None:
    """Refuse --scratch and --keep for a model: only a shape's weights are written. Raises: UsageError"""
    if subject.form is None and (keep or folder is not None):
        flag = "--keep" if keep else "--scratch"
        raise UsageError(f"leave out {flag}: it is for a shape's random weights, and {subject.name} has its own files")


@contextmanager
def subject_files(subject: lazy.subject.Subject, folder: Path | None, *, keep: bool) -> Iterator[lazy.model.Model]:
    """A subject's model with its files; a shape's are written to `folder` unless an earlier run kept them there.

    Raises: LLMCliError and its subclasses
    """
    if subject.form is None:
        yield subject.model
        return
    with lazy.subject.Scratch(subject.name, subject.form, folder or bench_folder(), keep=keep) as scratch:
        if scratch.is_there:
            terminal.info(f"using {scratch.folder}, kept by an earlier run")
        else:
            with progress(f"writing {subject.full_name}, random weights") as on_progress:
                scratch.write(on_progress)
        yield scratch.open()
    if keep and not scratch.is_there:
        terminal.info(f"kept {scratch.folder}")


def open_target(options: RunnerOptions, subject: lazy.subject.Subject) -> lazy.subject.Target:
    """The chosen device, with its measured bandwidth and, on a card, the rates of the model's products.

    Raises: LLMCliError and its subclasses
    """
    if options.card is None:
        return _open_host(options, subject.model)
    device = lazy.device.Device.open(options.card)
    rates = lazy.rates.measure_rates(device, lazy.device_targets.product_types(subject.model, options.dtype))
    description = f"{device.name} (cuda:{device.index})"
    return lazy.device_targets.CardTarget(
        description,
        options.dtype,
        options.kv_cache,
        rates,
        lazy.arena.free_bytes(),
        device.facts,
    )


def _open_host(options: RunnerOptions, model: lazy.model.Model) -> lazy.subject.Target:
    """The CPU with the library that computes there."""
    asked = options.dtype, options.kv_cache
    if options.runs_on_numpy(model):
        numpy = lazy.numpy_load.NumpyProbes()
        return lazy.device_targets.HostTarget(
            numpy, lazy.numpy_load.describe_on_numpy(model), numpy.dtype, *asked, holds_floats=True
        )
    prepare_for_torch(options.num_threads)
    dtype = lazy.precision.resolve_dtype(options.dtype, model)
    return lazy.device_targets.HostTarget(
        lazy.torch_load.TorchProbes(dtype, options.num_threads),
        f"CPU, {lazy.host_load.describe(model, dtype)}",
        dtype,
        *asked,
        widens_prompts=lazy.precision.widens_prompts(model, dtype),
    )
