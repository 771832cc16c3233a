"""Options that several commands share: their types, and the groups that a command takes as one parameter.

A group holds the values as given; the command checks their meaning. An option with `hidden=True` is rarely needed: only
--help-all shows it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from llmcli.checkpoint.hub_library import find_hub_id
from llmcli.cli import completion, lazy
from llmcli.cli.command import OptionEach, argument, option
from llmcli.cli.device_choice import DTYPES, KV_CACHES, RunnerOptions
from llmcli.cli.session import DEFAULT_MAX_NEW_TOKENS, Session, fetch_model
from llmcli.cli.settings import BUILT_IN, running
from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError
from llmcli.sampling.params import DEFAULT_ORDER, SPECS, ParamSpec

# An option in a section of the help.
model_option = partial(option, rich_help_panel="Model")
prompt_option = partial(option, rich_help_panel="Prompt")
sampling_option = partial(option, rich_help_panel="Sampling")
stopping_option = partial(option, rich_help_panel="Stopping")
output_option = partial(option, rich_help_panel="Output")
machines_option = partial(option, rich_help_panel="Many machines")
KEY_VARIABLE = "LLMCLI_API_KEY"  # the default of --api-key

AUTO = "auto"

_MODEL_HELP = "Model folder, hub id such as ORG/NAME, or alias."

# The options that most people set; the others are hidden.
_EVERYDAY_NUMBERS = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}


def _set_quiet(value: bool) -> None:
    terminal.is_quiet = terminal.is_quiet or value


def _set_debug(value: bool) -> None:
    terminal.is_debug = terminal.is_debug or value


model_name_option = partial(
    model_option,
    None,
    _MODEL_HELP,
    "--model",
    "-m",
    metavar="MODEL",
    show_default=BUILT_IN,
    complete=completion.complete_model,
)
# For commands about a model itself: chosen_model() joins it with model_name_option.
model_argument = partial(
    argument, None, _MODEL_HELP, metavar="MODEL", show_default=BUILT_IN, complete=completion.complete_model
)
# For commands that also take a shape without weights.
subject_argument = partial(
    argument,
    None,
    "Model folder, hub id, alias, or the name of a shape such as Llama-2-7B.",
    metavar="MODEL|SHAPE",
    show_default=BUILT_IN,
    complete=completion.complete_subject,
)
format_option = partial(
    model_option,
    None,
    "Format of a SHAPE's weights: int8, int4, awq, fp8 or bf16.",
    "--format",
    metavar="FORMAT",
    show_default="int8",
    words=("int8", "int4", "awq", "fp8", "bf16"),
)
scratch_option = partial(
    option,
    None,
    "Where to write a SHAPE's random weights.",
    metavar="FOLDER",
    show_default="the user's cache",
    hidden=True,
)
rows_option = partial(
    model_option, metavar="N", help="Texts to decode side by side, or auto: as many as fit in memory.", words=(AUTO,)
)
context_option = partial(
    model_option,
    None,
    "Context limit: tokens of prompt and new text together.",
    min=1,
    show_default="the model's maximum, at most 8192",
)
device_option = partial(
    model_option, AUTO, "auto, cpu, cuda or cuda:N.", metavar="DEVICE", complete=completion.complete_device
)
system_option = partial(prompt_option, None, "System prompt.", metavar="TEXT")
chat_template_option = partial(
    prompt_option,
    None,
    "Use this Jinja file in place of the model's chat template, or `plain`.",
    metavar="FILE",
    words=("plain",),
    hidden=True,
)
template_var_option = partial(
    prompt_option,
    None,
    "Set a variable of the chat template, such as enable_thinking=false; the value is JSON; repeatable.",
    metavar="NAME=VALUE",
)
stop_option = partial(stopping_option, None, "Stop before this text appears; repeatable.", metavar="TEXT")
debug_option = partial(output_option, False, "Show the traceback of an error.", callback=_set_debug, hidden=True)


def chosen_model(argument: str | None, option: str | None) -> str | None:
    """The named model, as an argument or with --model; None if none is named.

    Raises: UsageError if both are given.
    """
    if argument is not None and option is not None:
        raise UsageError("the argument MODEL and --model cannot be combined")
    return argument if argument is not None else option


def model_or_default(name: str | None) -> str | None:
    """The named model, else the user's default one, and a line says so; None for the built-in one."""
    if name is not None or running.model is None:
        return name
    name, source = running.model
    terminal.info(f"Using {name}, the default model of {source}")
    return name


def parse_rows(flag: str) -> int | None:
    """The value of --rows; None for auto.

    Raises: UsageError for anything but auto or a number of rows that a runner can have.
    """
    if flag == AUTO:
        return None
    if not (flag.isascii() and flag.isdecimal() and len(flag) < 10 and 1 <= int(flag) <= lazy.runners.MAX_ROWS):
        raise UsageError(f"--rows is {flag!r}, expected a number from 1 to {lazy.runners.MAX_ROWS}, or {AUTO}")
    return int(flag)


Numbers = Mapping[str, float | int | None]  # sampling parameters by name, None if not given


def _number_option(name: str, spec: ParamSpec) -> tuple[Any, Any]:
    shown, is_hidden = f"the model's, or {spec.default:g}", name not in _EVERYDAY_NUMBERS
    return type(spec.default) | None, sampling_option(None, spec.help, show_default=shown, hidden=is_hidden)


# One option for each sampling parameter, as one parameter of a command.
SamplingNumbers = Annotated[Numbers, OptionEach({name: _number_option(name, spec) for name, spec in SPECS.items()})]


@dataclass(frozen=True)
class DeviceOptions:
    """Where a model runs, and in which precision."""

    device: str = device_option()
    dtype: str = model_option(
        AUTO,
        "What to compute in: float32, bfloat16 or (on CUDA) float16. auto is the model's own type on CUDA; on the "
        "CPU bfloat16 for quantized and bfloat16 models where that is faster, else float32.",
        words=DTYPES,
        hidden=True,
    )
    kv_cache: str = model_option(
        AUTO,
        "Type of the KV cache: auto (float16 or float32 on CUDA, --dtype on the CPU), or int8, "
        "half the size of float16.",
        metavar="TYPE",
        words=KV_CACHES,
        hidden=True,
    )
    threads: int | None = model_option(
        None,
        "CPU threads to use.",
        min=1,
        max=1024,  # far beyond any machine's cores; tens of thousands crash the thread library
        hidden=True,
        show_default="one per core; one for a model below 128 MiB",
    )

    def checked(self) -> RunnerOptions:
        """The checked options. Raises: UsageError for unknown names, DeviceError for a card that cannot be used"""
        return RunnerOptions(self.device, self.dtype, self.threads, self.kv_cache)


@dataclass(frozen=True)
class SamplerOptions:
    """How tokens are drawn, besides the numbers."""

    preset: str | None = sampling_option(
        None,
        "Use a named set of sampling parameters: story, precise, your own, or a .toml file.",
        metavar="NAME",
        complete=completion.complete_preset,
    )
    logit_bias: list[str] | None = sampling_option(
        None, "Add BIAS to the logit of a token, -inf bans it; repeatable.", metavar="ID=BIAS", hidden=True
    )
    sampler_order: str | None = sampling_option(
        None,
        "Run only these sampling steps, in this order.",
        metavar="STEP,...",
        hidden=True,
        show_default=",".join(DEFAULT_ORDER),
    )
    dry_breaker: list[str] | None = sampling_option(
        None,
        "DRY: repetitions end at this text; repeatable; `none` for no breaker.",
        metavar="TEXT",
        hidden=True,
        show_default='newline, :, ", *',
    )
    seed: int | None = sampling_option(
        None,
        "Seed of the random numbers: the same seed gives the same text.",
        min=0,
        max=2**64 - 1,
        show_default="random, and printed",
    )


@dataclass(frozen=True)
class StoppingOptions:
    """What ends a text."""

    max_new_tokens: int | None = stopping_option(
        None,
        "Stop after this many new tokens.",
        min=1,
        show_default=f"the model's; else no limit, or {DEFAULT_MAX_NEW_TOKENS} without an end-of-text token",
    )
    stop: list[str] | None = stop_option()
    ignore_eos: bool = stopping_option(False, "Ignore end-of-text tokens.", hidden=True)


@dataclass(frozen=True)
class ModelNames:
    """A model as an argument or with --model, for commands about a model itself."""

    argument: str | None = model_argument()
    model: str | None = model_name_option()

    @property
    def chosen(self) -> str | None:
        """The given model, or the default one; see `chosen_model` and `model_or_default`."""
        return model_or_default(chosen_model(self.argument, self.model))


@dataclass(frozen=True)
class SubjectOptions(ModelNames):
    """A model or a shape, and the format of a shape."""

    argument: str | None = subject_argument()
    form: str | None = format_option()


@dataclass(frozen=True)
class MessageOptions:
    """What is written about the run. The options act by themselves: their values are not used."""

    quiet: bool = output_option(False, "Do not print messages about the run.", "-q", callback=_set_quiet)
    debug: bool = debug_option()


adapter_option = partial(
    model_option,
    None,
    "Add a LoRA adapter to the model's 16-bit weights: a folder or hub id; repeatable.",
    metavar="DIR|ID[=WEIGHT]",
    complete=completion.complete_adapter,
)


@dataclass(frozen=True)
class AdapterChoice:
    """An adapter by folder or hub id, and its weight."""

    name: str
    weight: float = 1.0

    @property
    def text(self) -> str:
        """Its value for --adapter."""
        return self.name if self.weight == 1 else f"{self.name}={self.weight!r}"


def parse_adapters(values: Sequence[str] | None) -> tuple[AdapterChoice, ...]:
    """The values of --adapter. An existing path counts as one, whether or not it looks like `PATH=WEIGHT`.

    Raises: UsageError for a weight that is not a number other than 0, and an adapter that is named twice
    """
    choices = tuple(_parse_adapter(value) for value in values or ())
    names = [choice.name for choice in choices]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--adapter names {twice!r} twice; give it once, with a weight")
    return choices


def _parse_adapter(value: str) -> AdapterChoice:
    name, sign, number = value.rpartition("=")
    if not sign or os.path.exists(value):
        name, number = value, "1"
    if not name:
        raise UsageError(f"--adapter is {value!r}, expected a folder or a hub id")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight) or weight == 0:
        raise UsageError(f"--adapter is {value!r}, expected a number other than 0 as the weight, not {number!r}")
    return AdapterChoice(name, weight)


def with_adapters(session: Session, choices: Sequence[AdapterChoice]) -> Session:
    """The session with adapters added to its model. Raises: CheckpointError and its subclasses."""
    if not choices:
        return session
    model = add_adapters(session.model, choices)
    return replace(session, model=model, name=" + ".join([session.name, *(one.shown_name for one in model.adapters)]))


def add_adapters(model: lazy.model.Model, choices: Sequence[AdapterChoice]) -> lazy.model.Model:
    """The model with adapters, with a line for each; missing files are downloaded first.

    Raises: CheckpointError and its subclasses.
    """
    adapters = []
    for choice in choices:
        folder = fetch_model(choice.name, is_adapter=True) if find_hub_id(choice.name) else Path(choice.name)
        adapters.append(lazy.adapter.open_adapter(folder, choice.name, choice.weight))
    model = lazy.adapter_merge.merge_adapters(model, adapters)
    for adapter in adapters:
        base = f", trained on {adapter.config.base_name}" if adapter.config.base_name else ""
        terminal.info(f"Adapter {adapter.shown_name}: LoRA of rank {adapter.config.rank}{base}")
    return model


@dataclass(frozen=True)
class RunOptions:
    """The model that runs, its adapters, its context, its device, and its drafter."""

    model: str | None = model_name_option()
    adapter: list[str] | None = adapter_option()
    context: int | None = context_option()
    draft: str = model_option(
        AUTO,
        "How to guess tokens ahead, for the same text sooner: auto, ngram (from the text so far), "
        "a smaller MODEL, or off.",
        metavar="HOW",
        complete=completion.complete_draft,
    )
    devices: DeviceOptions = DeviceOptions()
