"""How our commands differ from Typer's: groups of options, reading of arguments and the text of help and usage errors.

An option is declared by `option`, once: a command's parameter whose type is a dataclass gives an option for each field.
A group is frozen; its fields are options, arguments or groups themselves. Declare an option that few need with
`hidden=True`; only --help-all shows it.
"""

import functools
import inspect
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from llmcli.cli import lazy
from llmcli.cli.completion import MODEL_COMPLETERS, complete_words
from llmcli.cli.spelling import near_names
from llmcli.cli.terminal import terminal
from llmcli.errors import LLMCliError, UsageError

# Options that a command lacks: suggests its own by other programs' names or by spelling.

# An option of ours, offered where the command has it, or a note; and what llama.cpp, ollama, llm, mlx-lm, transformers
# and vLLM call it, with dashes for underscores. docs/guide/coming-from-llama.cpp.md has the same names; a test
# compares. A name that may mean several is in several lines, and the first is offered first.
_OTHERS_NAMES = {
    "--adapter": "--adapter-path --lora --lora-scaled",
    "--chat-template": "--chat-template-file --template",
    "--device": "-ngl --device-map --gpu --gpu-layers --n-gpu-layers --num-gpu",
    "--draft": "-md --draft-model --model-draft",
    "--dry-breaker": "--dry-sequence-breaker",
    "--dry-window": "--dry-penalty-last-n",
    "--dtype": "--torch-dtype",
    "--dynatemp-exponent": "--dynatemp-exp",
    "--grammar": "--grammar-file",
    "--html": "-o --output",
    "--kv-cache": "-ctk -ctv --cache-type-k --cache-type-v --kv-cache-dtype",
    "--logit-bias": "-l",
    "--logprobs": "--top-logprobs",
    "--max-new-tokens": "-n --max-length --max-tokens --n-predict --num-predict --predict --tokens",
    "--context": "-c --ctx --ctx-size --max-kv-size --max-length --max-model-len --max-seq-len --num-ctx",
    "--continue": "-c",
    "--message": "-p --prompt",
    "--min-new-tokens": "--min-tokens --min-length",
    "--min-p": "--epsilon-cutoff",
    "--mirostat-eta": "--mirostat-lr",
    "--mirostat-tau": "--mirostat --mirostat-ent",
    "--model": "-hf -mu --hf-repo --model-name-or-path --model-url",
    "--penalty-window": "--repeat-last-n",
    "--repetition-penalty": "--repeat-penalty",
    "--rows": "-b -np --batch-size --max-num-seqs --parallel",
    "--num-samples": "-np --n --num-beams --num-return-sequences --parallel --samples",
    "--sampler-order": "--sampler-seq --samplers",
    "--schema": "--json-schema --json-schema-file",
    "--seed": "-s",
    "--show-prompt": "--verbose-prompt",
    "--stats": "--verbose",
    "--stop": "-r --reverse-prompt --stop-sequence --stop-strings",
    "--system": "-s -sys --system-prompt",
    "--template-var": "--chat-template-kwargs",
    "--thinking": "--hidethinking --think",
    "--threads": "-t --num-thread",
    "--temperature": "-t --do-sample --greedy --temp",
    "--top-n-sigma": "--top-nsigma",
    "--typical-p": "--eta-cutoff --typical",
    "a model runs on one device as a whole: see --device": "-ngl --device-map --gpu-layers --n-gpu-layers",
    "give the prompt without an option": "-p --prompt",
    "put the token of your account at the hub into the variable HF_TOKEN": "--hf-token --token",
    "see llmcli chat": "-cnv -i --conversation --interactive",
    "see llmcli quantize": "--quantization",
    "text is always streamed": "--stream",
}
# The same by the other program's name.
FOREIGN_OPTIONS: Mapping[str, Sequence[str]] = {
    name: [ours for ours, names in _OTHERS_NAMES.items() if name in names.split()]
    for name in " ".join(_OTHERS_NAMES.values()).split()
}

# As `FOREIGN_OPTIONS`, for commands.
FOREIGN_COMMANDS: Mapping[str, str] = {
    "ask": "generate",
    "benchmark": "bench",
    "completion": "generate",
    "download": "pull",
    "list": "models list",
    "ls": "models list",
    "perplexity": "eval",
    "rm": "models rm",
    "run": "chat",
    "show": "info",
    "tokenizer": "tokenize",
}


def refuse_unknown_option(argument: str, known: Collection[str], otherwise: str) -> None:
    """Refuse an option that is not among the `known` ones; `otherwise` is the message without a suggestion.

    A group of one-letter options such as `-qv` is left to the parser, unless other programs have one of that name.

    Raises: UsageError.
    """
    name = argument.partition("=")[0]
    if not name.startswith("-") or name in ("-", "--") or name in known:
        return
    if name.startswith("--") or name in FOREIGN_OPTIONS or name[:2] not in known:
        raise UsageError(f"no such option: {name}; {_proposal(name, known) or otherwise}")


def refuse_unknown_command(name: str, known: Collection[str], parent: str) -> None:
    """Refuse a command that `parent`, such as `llmcli`, lacks. Raises: UsageError"""
    if name in known:
        return
    found = [FOREIGN_COMMANDS[name]] if name in FOREIGN_COMMANDS else near_names(name, known)
    if " " in name and "generate" in known:  # a prompt
        found = [f"{parent} generate {shlex.quote(name)}"]
    meant = f"; did you mean {_listed(found)}?" if found else ""
    raise UsageError(f"no such command: {parent} {name}{meant} (see {parent} --help)")


def _proposal(name: str, known: Collection[str]) -> str:
    """Which option is meant, or how to do without it; empty if unknown."""
    spelled = name if name in FOREIGN_OPTIONS else name.replace("_", "-").lower()
    ideas = (spelled,) if spelled in known else FOREIGN_OPTIONS.get(spelled, ())
    options, notes = _usable(ideas, known)
    if not options and not notes and name.startswith("--"):
        options = near_names(spelled, _long_names(known))
        for foreign in near_names(spelled, _long_names(FOREIGN_OPTIONS))[:1] if not options else ():
            options, notes = _usable(FOREIGN_OPTIONS[foreign], known)
    if options:
        return f"did you mean {_listed(options)}?"
    return notes[0] if notes else ""


def _usable(ideas: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Of what another program's option may mean, the command's own options and the notes."""
    return [idea for idea in ideas if idea in known], [idea for idea in ideas if not idea.startswith("-")]


def _long_names(names: Collection[str]) -> list[str]:
    return [name for name in names if name.startswith("--")]


def _listed(names: list[str]) -> str:
    return " or ".join(names)


HELP_NAMES = ("-h", "--help", "--help-all")
HELP_ALL = HELP_NAMES[-1]
_EXAMPLE = "llmcli "
_SHOWS_SETTINGS = "llmcli config"  # the command that says itself what is wrong with them
_MAX_NAME_WIDTH = 28

# The option's meaning alone, and the words that it takes. They are declared as options with a value.
OPTIONAL_VALUES = {"--stats": ("run", ("start",))}

# What an option of a type has if its declaration does not say else.
_USUAL: Mapping[type, Mapping[str, Any]] = {
    Path: {"metavar": "FILE", "readable": False},  # whoever opens it says what is wrong
    int: {"metavar": "N"},
    float: {"metavar": "X"},
}

_PATH_WORDS = frozenset({"FILE", "IN", "OUT"})  # metavars of paths that may also be a word, such as `-`

# Typer's sentence, and ours.
_SENTENCES = (
    (r"Invalid value for (.+): Input should be a valid integer\b.*", r"\1: expected an integer"),
    (
        r"Invalid value for (.+): Unable to parse input string as an integer, exceeded.*",
        r"\1: expected a smaller integer",
    ),
    (r"Invalid value for (.+): Input should be a valid number\b.*", r"\1: expected a number"),
    (r"Invalid value for (.+): Input should be greater than or equal to (.+)", r"\1: expected at least \2"),
    (r"Invalid value for (.+): Input should be less than or equal to (.+)", r"\1: expected at most \2"),
    (r"Option (.+) requires an argument", r"\1 needs a value"),
    (r"Option (.+) does not take a value", r"\1 takes no value"),
    (r"Missing argument (.+)", r"missing argument: \1"),
    (r"Missing command", "no command given"),
    (r"Got unexpected extra argument\(?s?\)? \((.+)\)", r"unexpected argument: \1"),
    (r"No such option: (.+)", r"no such option: \1"),
)


def option(default: Any, help: str, *names: str, **settings: Any) -> Any:
    """Declare an option, as a field of a group or a parameter of a command.

    `names` are its short names if it is called as the field, `--max-new-tokens`, and else all of its names. The
    settings are Typer's, but for two: `complete` is a completer of `completion`, `words` are what it offers. What
    completes as a model may be an alias.
    """
    return _declared(typer.Option, default, names, {"help": help, **settings})


def argument(default: Any, help: str, **settings: Any) -> Any:
    """Declare an argument, as `option`; with `...` for the default it is required."""
    return _declared(typer.Argument, MISSING if default is ... else default, (), {"help": help, **settings})


def _declared(declare: Any, default: Any, names: tuple[str, ...], settings: dict[str, Any]) -> Any:
    return field(default=default, metadata={"declare": declare, "names": names, "settings": settings})


@dataclass(frozen=True)
class OptionEach:
    """Marks a parameter that takes a dict: for each name the type of a value, and its option; None if not given."""

    options: Mapping[str, tuple[Any, Any]]


# Computes a parameter's value from all options' values.
_Build = Callable[[Mapping[str, Any]], Any]


def add_command(app: typer.Typer, name: str, command: Callable[..., None]) -> None:
    """Make a function a command of `app`."""
    app.command(name, cls=Command)(with_groups(command))


def command_group(help: str, commands: Mapping[str, Callable[..., None]]) -> typer.Typer:
    """Commands under one name, such as `models`."""
    app = typer.Typer(cls=Group, help=help)
    for name, command in commands.items():
        add_command(app, name, command)
    return app


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each parameter, or for each field of one that is a group, in their order."""
    signature = inspect.signature(command, eval_str=True)
    expanded = {
        parameter.name: _expand(parameter.name, parameter.annotation, parameter.default)
        for parameter in signature.parameters.values()
    }
    options = [option for part, _ in expanded.values() for option in part]

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        command(**{name: build(values) for name, (_, build) in expanded.items()})

    with_options.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    with_options.__annotations__ = {option.name: option.annotation for option in options}
    return with_options


def given_options(group: Any) -> list[str]:
    """The options of a group that the command line gives a value that is not the default, as they are written there."""
    given = []
    for one in fields(group):
        value = getattr(group, one.name)
        if is_dataclass(value):
            given += given_options(value)
        elif value != one.default and one.name not in lazy.settings.running.configured:
            given.append(next(name for name in _option_names(one.name, one) if name.startswith("--")))
    return given


def _expand(name: str, annotation: Any, declared: Any) -> tuple[list[inspect.Parameter], _Build]:
    """The options of a parameter, and how its value is computed from theirs."""
    if is_dataclass(annotation):
        hints = get_type_hints(annotation)
        parts = {one.name: _expand(one.name, hints[one.name], one) for one in fields(annotation)}
        make: Any = annotation
        return (
            [option for part, _ in parts.values() for option in part],
            lambda values: make(**{key: build(values) for key, (_, build) in parts.items()}),
        )
    each = next((mark for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, OptionEach)), None)
    if each is not None:
        return (
            [_parameter(key, kind, one) for key, (kind, one) in each.options.items()],
            lambda values: {key: values[key] for key in each.options},
        )
    return [_parameter(name, annotation, declared)], lambda values: values[name]


def _parameter(name: str, annotation: Any, declared: Any) -> inspect.Parameter:
    """The parameter that Typer reads an option or an argument from."""
    kinds = (annotation, *get_args(annotation))
    usual = next((settings for kind, settings in _USUAL.items() if kind in kinds), {})
    is_option = declared.metadata["declare"] is typer.Option
    names = _option_names(name, declared) if is_option else ()
    if not is_option:  # Typer names a missing one by it
        usual = {**usual, "metavar": name.upper()}
    settings = {**usual, **declared.metadata["settings"]}
    words, complete = settings.pop("words", ()), settings.pop("complete", None)
    if complete in MODEL_COMPLETERS:
        settings["callback"] = _meant_model
    info = declared.metadata["declare"](
        *names, autocompletion=complete_words(*words) if words else complete, **settings
    )
    default = inspect.Parameter.empty if declared.default is MISSING else declared.default
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, info]
    )


def _meant_model(value: str | None) -> str | None:
    return None if value is None else lazy.settings.find_alias(value)


def _option_names(name: str, declared: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = declared.metadata["names"]
    has_long = any(one.startswith("--") for one in names)
    return names if has_long else (f"--{name.rstrip('_').replace('_', '-')}", *names)


def write_description(formatter: Any, text: str) -> None:
    """Write a command's own text; its examples stay as they are, so that they can be copied."""
    for paragraph in text.split("\n\n"):
        with formatter.indentation():
            if paragraph.startswith(_EXAMPLE):
                formatter.write(f"{'':{formatter.current_indent}}{paragraph}\n")
            else:
                formatter.write_paragraph()
                formatter.write_text(paragraph)


def write_params(formatter: Any, params: Sequence[Any], *, shows_all: bool) -> None:
    """Write arguments, then options by panel in the order of their declaration, then what shows help."""
    _write_section(formatter, "Arguments", [_row(param) for param in params if isinstance(param, TyperArgument)])
    options = [param for param in params if isinstance(param, TyperOption) and not set(HELP_NAMES) & set(param.opts)]
    shown = [option for option in options if shows_all or not option.hidden]
    panels = list(dict.fromkeys(option.rich_help_panel or "Options" for option in shown))
    for panel in panels:
        _write_section(
            formatter, panel, [_row(option) for option in shown if (option.rich_help_panel or "Options") == panel]
        )
    rows = [("-h, --help", "Show this message.")]
    if num_left_out := len(options) - len(shown):
        rows.append((HELP_ALL, f"Show all options ({num_left_out} more)."))
    _write_section(formatter, "Help", rows)


def _write_section(formatter: Any, title: str, rows: Sequence[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows, col_max=_MAX_NAME_WIDTH)


def _row(param: Any) -> tuple[str, str]:
    if isinstance(param, TyperArgument):
        name = _name(param)
    else:
        name = ", ".join(sorted(param.opts, key=len))
        if not param.is_flag and param.metavar != "":
            name += f" {param.metavar or param.name.upper()}"
    default = _default(param)
    return name, f"{param.help or ''}{f' [default: {default}]' if default else ''}"


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _default(param: Any) -> str:
    """In words if the declaration has them, else the value; empty for none."""
    if isinstance(param.show_default, str):
        return param.show_default
    is_said = param.show_default and param.default not in (None, False, "", [], ()) and not param.required
    return str(param.default) if is_said else ""


def with_values(arguments: Sequence[str], taking: set[str]) -> Iterator[tuple[str, bool]]:
    """The arguments with `--stats=run` for `--stats`, each with whether it may be an option, not an option's value.

    `taking` are the other options that take a value.
    """
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            yield from ((one, False) for one in (argument, *rest))
            return
        if argument in OPTIONAL_VALUES:
            alone, words = OPTIONAL_VALUES[argument]
            argument = f"{argument}={rest.pop(0) if rest and rest[0] in words else alone}"
        yield argument, True
        if argument in taking and rest:
            yield rest.pop(0), False


def refuse_empty_paths(params: Iterable[Any]) -> None:
    """Make each param that takes a path raise a UsageError for an empty one."""
    for param in params:
        annotation = param.type_descriptor.annotation
        if Path in (annotation, *get_args(annotation)) or param.metavar in _PATH_WORDS:
            param.process_value = partial(_process_value, param, param.process_value)


def _process_value(param: Any, process_value: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    if not ctx.resilient_parsing and (value == "" or (isinstance(value, list | tuple) and "" in value)):
        name = param.metavar if param.param_type_name == "argument" else max(param.opts, key=len)
        raise UsageError(f"{name} is empty; give it a path")
    return process_value(ctx, value)


def usage_message(error: typer.TyperException) -> str:
    """The error's message, on one line and with the command whose help says more."""
    message = " ".join(error.format_message().split()).rstrip(".")
    for theirs, ours in _SENTENCES:
        if match := re.fullmatch(theirs, message):
            message = match.expand(ours).replace("'", "")
    least, most = (getattr(getattr(error, "param", None), name, None) for name in ("min", "max"))
    if message.endswith(("an integer", "a number")) and None not in (least, most):
        message += f" from {least} to {most}"
    context = getattr(error, "ctx", None)
    group = getattr(context, "command", None)
    if message == "no command given" and isinstance(group, TyperGroup):
        message += f", expected {' or '.join(group.commands)}"
    if context is not None and (meant := _with_quotes(error.format_message(), context)):
        message += f"; did you mean {meant}?"
    if isinstance(getattr(context, "command", None), Command):
        message = lazy.settings.with_sources(context, message)
    return f"{message} (see {context.command_path if context else 'llmcli'} --help)"


def _settings_problem(ctx: Any) -> UsageError | None:
    """Make the user's settings the defaults of a command. What is wrong with them must wait until after --help."""
    try:
        lazy.settings.configure(ctx)
    except UsageError as error:
        return error
    return None


def _with_quotes(message: str, context: Any) -> str:
    """The command with its last argument in quotes, if that is a text whose words were taken for arguments."""
    match = re.fullmatch(r"Got unexpected extra argument\(?s?\)? \((.+)\)", message)
    arguments = [param.name for param in context.command.params if isinstance(param, TyperArgument)]
    if match is None or arguments[-1:] not in (["prompt"], ["text"]):
        return ""
    *others, first_word = (context.params[name] for name in arguments)
    return f"{context.command_path} {shlex.join([*others, f'{first_word} {match[1]}'])}"


class Command(TyperCommand):
    """A command: options that may stand alone, --help-all, and a suggestion for an unknown option.

    The user's settings are the defaults of its options.
    """

    shows_all_options = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        refuse_empty_paths(self.params)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments. Raises: UsageError for an unknown option, and for settings that are wrong"""
        problem = None if ctx.resilient_parsing else _settings_problem(ctx)
        options = _options(self.get_params(ctx))
        taking = {name for option in options if not option.is_flag for name in option.opts} - OPTIONAL_VALUES.keys()
        known = _names(options)
        arguments = []
        for argument, is_own in with_values(args, taking):
            if is_own and not ctx.resilient_parsing:
                refuse_unknown_option(argument, known, f"see {ctx.command_path} {HELP_ALL}")
            self.shows_all_options = self.shows_all_options or (is_own and argument == HELP_ALL)
            arguments.append(argument)
        try:
            rest = super().parse_args(ctx, arguments)  # --help ends here
        except typer.TyperException as error:
            refusal: Any = error
            refusal.ctx = ctx  # Typer leaves it out if an option lacks its value
            raise
        if problem is not None and ctx.command_path != _SHOWS_SETTINGS:
            raise problem
        if not ctx.resilient_parsing:
            lazy.settings.note_configured(ctx)
            if ctx.command_path != _SHOWS_SETTINGS:
                for name, meant in lazy.settings.misspelt_variables(ctx):
                    terminal.warn(f"the variable {name} means nothing; did you mean {meant}?")
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command. An error says where the options that it names come from, if not from the command line."""
        try:
            return super().invoke(ctx)
        except LLMCliError as error:
            error.args = (lazy.settings.with_sources(ctx, str(error)),)
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The usage line after the command's name: `[OPTIONS] IN [OUT]`."""
        arguments = [param for param in self.get_params(ctx) if isinstance(param, TyperArgument)]
        return ["[OPTIONS]", *(_name(param) if param.required else f"[{_name(param)}]" for param in arguments)]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the description and the examples."""
        write_description(formatter, self.help or "")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options, with the user's defaults."""
        for param, value, source in [*lazy.settings.find_values(ctx)]:
            param.show_default = f"{value}, from {source}"
        write_params(formatter, self.get_params(ctx), shows_all=self.shows_all_options)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Offer all options, also those that only --help-all shows."""
        for option in _options(self.get_params(ctx)):
            option.hidden = False
        return super().shell_complete(ctx, incomplete)


class Group(TyperGroup):
    """A group of commands, and a suggestion for an unknown option or command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments before the command's name. Raises: UsageError for an unknown option"""
        known = _names(_options(self.get_params(ctx)))
        for argument in args:
            if not argument.startswith("-") or ctx.resilient_parsing:
                break
            refuse_unknown_option(
                argument, known, f"options come after the command: {ctx.command_path} COMMAND {argument}"
            )
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command. Raises: UsageError for an unknown one"""
        if not ctx.resilient_parsing:
            refuse_unknown_command(args[0], self.commands, ctx.command_path)
        return super().resolve_command(ctx, args)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the description."""
        write_description(formatter, self.help or "")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, each with the first paragraph of its help, and the options."""
        helps = {str(command.name): (command.help or "").split("\n\n")[0] for command in self.commands.values()}
        _write_section(formatter, "Commands", [(name, " ".join(text.split())) for name, text in helps.items()])
        write_params(formatter, self.get_params(ctx), shows_all=True)


def _options(params: Collection[Any]) -> list[TyperOption]:
    return [param for param in params if isinstance(param, TyperOption)]


def _names(options: Collection[TyperOption]) -> set[str]:
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}
