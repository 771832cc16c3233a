"""Option types that several commands share, and the sampling options, made from the declaration of `SamplingParams`."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError
from llmcli.sampling.order import DEFAULT_ORDER
from llmcli.sampling.params import SPECS

MODEL_PANEL = "Model"
PROMPT_PANEL = "Prompt"
SAMPLING_PANEL = "Sampling"
STOPPING_PANEL = "Stopping"
OUTPUT_PANEL = "Output"


def _set_quiet(value: bool) -> None:
    terminal.is_quiet = terminal.is_quiet or value


def _set_debug(value: bool) -> None:
    terminal.is_debug = terminal.is_debug or value


_MODEL_HELP = "Hugging Face folder, or hub id such as org/name."
_MODEL_DEFAULT = "the built-in storyteller"
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help=_MODEL_HELP,
        show_default=_MODEL_DEFAULT,
        rich_help_panel=MODEL_PANEL,
    ),
]
# For commands about a model itself: chosen_model() joins it with ModelOption.
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP, show_default=_MODEL_DEFAULT)]
# For commands that also take a shape of which no weights are there.
SubjectArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL|SHAPE",
        help="Hugging Face folder, hub id, or a shape of configs/models such as Llama-2-7B.",
        show_default=_MODEL_DEFAULT,
    ),
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="int8|int4|bf16", help="Of a SHAPE.", show_default="int8", rich_help_panel=MODEL_PANEL
    ),
]
RowsOption = Annotated[
    int,
    typer.Option("--rows", min=1, max=8, metavar="N", help="Texts decoded side by side.", rich_help_panel=MODEL_PANEL),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=1,
        metavar="N",
        help="Tokens of prompt and answer together.",
        show_default="the model's maximum, at most 8192",
        rich_help_panel=MODEL_PANEL,
    ),
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.", metavar="DEVICE", rich_help_panel=MODEL_PANEL)
]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="float32, bfloat16 or (on CUDA) float16; auto is float32 on the CPU and the model's own type on CUDA.",
        metavar="DTYPE",
        rich_help_panel=MODEL_PANEL,
    ),
]
KvCacheOption = Annotated[
    str,
    typer.Option(
        "--kv-cache",
        help="Keys and values: auto is float16 or float32 on CUDA and --dtype on the CPU; int8 takes half of float16.",
        metavar="auto|int8",
        rich_help_panel=MODEL_PANEL,
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=1024,  # far beyond any machine's cores; tens of thousands crash the thread library
        metavar="N",
        help="CPU threads.",
        show_default="one per core",
        rich_help_panel=MODEL_PANEL,
    ),
]
SystemOption = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="System prompt of the conversation.", rich_help_panel=PROMPT_PANEL),
]
ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        help="Jinja template in place of the model's, or `plain`.",
        rich_help_panel=PROMPT_PANEL,
    ),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset", metavar="NAME", help="story, precise, your own, or a .toml file.", rich_help_panel=SAMPLING_PANEL
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        min=0,
        max=2**64 - 1,
        metavar="N",
        help="Same seed, same text.",
        show_default="random, and printed",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Stop before this text appears; repeatable.", rich_help_panel=STOPPING_PANEL),
]
LogitBiasOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID=BIAS",
        help="Add this to a token's logit, -inf bans it; repeatable.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
SamplerOrderOption = Annotated[
    str | None,
    typer.Option(
        metavar="STEP,...",
        help="Run these filters, in this order, and no others.",
        show_default=",".join(DEFAULT_ORDER),
        rich_help_panel=SAMPLING_PANEL,
    ),
]
DryBreakerOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="DRY: no repetition reaches across this text; repeatable; none for no breaker.",
        show_default='newline, :, ", *',
        rich_help_panel=SAMPLING_PANEL,
    ),
]
QuietOption = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="No lines about the run.", callback=_set_quiet, rich_help_panel=OUTPUT_PANEL),
]
DebugOption = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error.", callback=_set_debug, rich_help_panel=OUTPUT_PANEL),
]


def chosen_model(argument: str | None, option: str | None) -> str | None:
    """The model that is named, as an argument or with --model; None for the built-in one.

    Raises: UsageError if both are given.
    """
    if argument is not None and option is not None:
        raise UsageError("the model is given twice, as an argument and with --model; give it once")
    return argument if argument is not None else option


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option per sampling parameter, in place of its parameter `sampling_flags`.

    The command receives `sampling_flags: dict[str, float | int | None]`, None for an option that was not given.
    """
    signature = inspect.signature(command, eval_str=True)
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                type(spec.default) | None,
                typer.Option(
                    f"--{name.replace('_', '-')}",
                    metavar="X" if isinstance(spec.default, float) else "N",
                    help=spec.help,
                    show_default=f"the model's, or {spec.default}",
                    rich_help_panel=SAMPLING_PANEL,
                ),
            ],
        )
        for name, spec in SPECS.items()
    ]

    @functools.wraps(command)
    def with_sampling_flags(**values: Any) -> None:
        flags = {name: values.pop(name) for name in SPECS}
        command(**values, sampling_flags=flags)

    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        parameters.extend(options if parameter.name == "sampling_flags" else [parameter])
    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    with_sampling_flags.__signature__ = signature.replace(parameters=keyword_only)  # type: ignore[attr-defined]
    with_sampling_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword_only}
    return with_sampling_flags
