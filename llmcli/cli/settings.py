"""What llmcli remembers, in `config.toml` and variables LLMCLI_*: a default model, aliases, and options of commands.

Order of precedence: the command line, the environment, the file, what is built in.
"""

import json
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from llmcli.cli.spelling import near_names
from llmcli.differences import shown
from llmcli.errors import OutputError, UsageError
from llmcli.reading import SETTINGS
from llmcli.resources import BUILT_IN_MODELS, config_file, resource_folder
from llmcli.writing import whole_file

BUILT_IN = "the built-in storyteller"  # what a param declares as its default if it takes the user's default model
_MODEL, _ALIASES = "model", "aliases"
GENERAL_VARIABLES = ("LLMCLI_MODEL", "LLMCLI_HOME", "LLMCLI_CONFIG", "LLMCLI_DEBUG", "LLMCLI_API_KEY")
_ALIAS = re.compile(r"\w[\w.-]*", re.ASCII)  # without the slash of a hub id or a path
_TAKEN = ("auto", "ngram", "off", *BUILT_IN_MODELS)  # what --draft and --model mean by themselves


@dataclass(frozen=True)
class Settings:
    """The file; nothing is set in a missing one. `tables` are those of the commands, not yet checked."""

    path: Path | None
    model: str | None
    aliases: Mapping[str, str]
    tables: Mapping[str, Any]


@dataclass
class Running:
    """The command that runs: its default model and what names that, and the params that the command line leaves out."""

    model: tuple[str, str] | None = None
    configured: Collection[str] = ()


running = Running()


def read_settings() -> Settings:
    """The user's settings. Raises: UsageError for what is wrong in the file, but for the tables of commands"""
    path = config_file()
    content = SETTINGS.read_toml(path) if path is not None and os.path.lexists(path) else {}
    model, aliases = content.pop(_MODEL, None), content.pop(_ALIASES, {})
    if model is not None and not (isinstance(model, str) and model):
        raise UsageError(f"{path}: model is {shown(model)}, expected a model folder, a hub id or an alias, in quotes")
    if not isinstance(aliases, dict):
        raise UsageError(f"{path}: aliases is {shown(aliases)}, expected a table [aliases]")
    for name, target in aliases.items():
        if problem := _alias_problem(name, target, aliases):
            raise UsageError(f"{path}: [aliases] {problem}")
    return Settings(path, model, aliases, content)


def find_alias(name: str) -> str:
    """What an alias stands for; any other name as it is, and that of a file or folder here.

    Raises: UsageError for what is wrong in the file.
    """
    if not _ALIAS.fullmatch(name) or name in _TAKEN or os.path.exists(name):
        return name
    return read_settings().aliases.get(name, name)


def _alias_problem(name: str, target: object, aliases: Collection[str]) -> str | None:
    if not _ALIAS.fullmatch(name):
        return f"{shown(name)} looks like a path or a hub id, expected letters, digits, `.`, `-` and `_`"
    if name in _TAKEN or (resource_folder("configs") / "models" / f"{name}.json").exists():
        return f"{name} already means another model; choose another alias"
    if isinstance(target, str) and target and target not in (name, *aliases):
        return None
    found = "names itself" if target == name else f"is {shown(target)}"
    return f"{name} {found}, expected a model folder or a hub id, in quotes, and not an alias"


def configure(ctx: Any) -> None:
    """Make the environment and the file the defaults of a command's options.

    An option's key in the file is its long name, with underscores for dashes.
    Raises: UsageError for what is wrong in the file.
    """
    running.model, running.configured = None, ()
    words = ctx.command_path.split()[1:]
    prefix = _prefix(ctx)
    names = {param: max(param.opts, key=len) for param in ctx.command.params}
    options = {name[2:].replace("-", "_"): param for param, name in names.items() if name.startswith("--")}
    for key, param in options.items():
        if param.show_default != BUILT_IN:
            param.envvar = param.envvar or f"{prefix}_{key.upper()}"
            param.show_envvar = False  # Typer would name it in every error
    settings = read_settings()
    where, group, table = f"{settings.path}:", ctx.find_root().command, settings.tables
    for word in words:
        _refuse_unknown(where, table, [*group.commands, _MODEL, _ALIASES], "expected model, aliases or a command")
        group, table = group.commands[word], table.get(word, {})
        if not isinstance(table, dict):
            raise UsageError(f"{where} {word} is {shown(table)}, expected a table [{word}]")
    where += f" [{'.'.join(words)}]"
    _refuse_unknown(where, table, options, f"see {ctx.command_path} --help-all")
    for key, value in table.items():
        if expected := _type_problem(options[key], value):
            raise UsageError(f"{where} {key} is {shown(value)}, expected {expected}")
    takes_default = _MODEL in options and options[_MODEL].show_default == BUILT_IN
    ctx.default_map = {
        options[key].name: value for key, value in table.items() if not (takes_default and key == _MODEL)
    }
    named = [(os.environ.get(name), name) for name in (f"{prefix}_MODEL", "LLMCLI_MODEL")]
    named += [(name, str(settings.path)) for name in (table.get(_MODEL) if takes_default else None, settings.model)]
    running.model = next(((find_alias(name), source) for name, source in named if name), None)


def note_configured(ctx: Any) -> None:
    """Note the params whose values come from elsewhere than the command line."""
    running.configured = [param.name for param in ctx.command.params if _used_source(ctx, param)]


def with_sources(ctx: Any, message: str) -> str:
    """A message with where the options, or their texts, that it names come from, if not from the command line."""
    found = []
    for param in ctx.command.params:
        name, source = max(param.opts, key=len), _used_source(ctx, param)
        if source is None:
            continue
        if match := re.search(rf"\b({param.name} is .*?) \(flag\)", message):
            message = message.replace(match[0], f"{match[1]} ({source})")
        if source not in message and _is_named(name, ctx.params.get(param.name), message):
            found.append(f"{name} comes from {source}")
    return f"{message} ({'; '.join(found)})" if found else message


def _is_named(name: str, value: object, message: str) -> bool:
    texts = [str(one) for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, str | Path)]
    return any(re.search(rf"(?<![\w-]){re.escape(one)}(?![\w-])", message) for one in (name, *texts) if one)


def known_variables(ctx: Any) -> list[str]:
    """The names of the variables that a command takes."""
    options = [name for param in ctx.command.params if (name := param.envvar) is not None]
    return [*GENERAL_VARIABLES, f"{_prefix(ctx)}_{_MODEL.upper()}", *options]


def misspelt_variables(ctx: Any) -> Iterator[tuple[str, str]]:
    """Each variable LLMCLI_* that means nothing here but is near one that does, and what may be meant."""
    known = known_variables(ctx)
    for name in unknown_variables(known):
        if meant := guess_variable(name, known, ctx.find_root().command.commands):
            yield name, meant


def unknown_variables(known: Collection[str]) -> list[str]:
    """The variables LLMCLI_* that are not among the known ones."""
    return sorted(name for name in os.environ if name.startswith("LLMCLI_") and name not in known)


def guess_variable(name: str, known: Collection[str], commands: Collection[str]) -> str:
    """What a variable's name may stand for: a near one, or one that lacks its command; empty for no guess."""
    _, first, *rest = name.split("_")
    as_commands = [f"LLMCLI_{command.upper()}_{'_'.join(rest)}" for command in commands if rest]
    near = near_names(name, {*known, *as_commands} - {name})
    return " or ".join(near or [one for one in known if one.endswith(name.removeprefix("LLMCLI"))][:2])


def _prefix(ctx: Any) -> str:
    return "_".join(("LLMCLI", *ctx.command_path.split()[1:])).upper()


def find_values(ctx: Any) -> Iterator[tuple[Any, str, str]]:
    """Each param whose default is the user's, the value, and the variable or the file that it comes from."""
    for param in ctx.command.params:
        if param.show_default == BUILT_IN:
            if running.model is not None:
                yield (param, *running.model)
            continue
        value, kind = param.consume_value(ctx, {})
        if source := _source(param, kind):
            yield param, "(secret)" if getattr(param, "hide_input", False) else str(value), source


def _used_source(ctx: Any, param: Any) -> str | None:
    return _source(param, ctx.get_parameter_source(param.name))


def _source(param: Any, kind: Any) -> str | None:
    """The variable or the file, by Typer's kind of source; None for the command line, and for what is built in."""
    return {"ENVIRONMENT": param.envvar, "DEFAULT_MAP": str(config_file())}.get(getattr(kind, "name", ""))


def _refuse_unknown(where: str, table: Mapping[str, Any], known: Collection[str], otherwise: str) -> None:
    for key in table:
        if key not in known:
            near = " or ".join(near_names(key, known))
            raise UsageError(f"{where} unknown key {shown(key)}; {f'did you mean {near}?' if near else otherwise}")


def _type_problem(param: Any, value: object) -> str | None:
    """What is expected in place of a value of another type than the option's."""
    kind = param.type_descriptor.annotation
    while inner := [one for one in get_args(kind) if one is not NoneType]:  # X | None, list[X]
        kind = inner[0]
    named: dict[Any, Any] = {bool: ((bool,), "true or false"), int: ((int,), "an integer")}
    named[float] = (int, float), "a number"
    types, expected = named.get(kind, ((str, int) if param.metavar == "N" else (str,), "a text in quotes"))
    if param.multiple:
        is_right = isinstance(value, list) and all(type(item) in types for item in value)
        return None if is_right else f"a list, each {expected}"
    return None if type(value) in types else expected


def change_alias(name: str, target: str | None) -> Path:
    """Set an alias in the file, or remove it; every other line stays. Returns the file.

    Raises: UsageError for an alias that cannot be, or a file that cannot be changed so; OutputError
    """
    settings = read_settings()
    if settings.path is None or settings.path.parts[:1] == ("~",):
        raise UsageError("there is no file to write to; set HOME or LLMCLI_HOME, and leave LLMCLI_CONFIG out")
    wanted = {other: meant for other, meant in settings.aliases.items() if other != name}
    if target is not None:
        wanted[name] = target
        if problem := _alias_problem(name, target, settings.aliases):
            raise UsageError(problem)
    path = settings.path.resolve()  # it may be a link into a repository of such files
    text = SETTINGS.read_text(path) if path.exists() else ""
    parts = re.split(r"(?m)^([ \t]*\[[ \t]*aliases[ \t]*\].*\n)", f"{text.rstrip()}\n".lstrip("\n"), maxsplit=1)
    before, header, after = parts if len(parts) == 3 else (f"{parts[0]}\n".lstrip("\n"), "[aliases]\n", "")
    after = re.sub(rf"""(?m)^[ \t]*(["']?){re.escape(name)}\1[ \t]*=.*\n""", "", after, count=1)
    line = "" if target is None else f"{json.dumps(name)} = {json.dumps(target, ensure_ascii=False)}\n"
    changed = before + header + line + after
    try:
        is_right = tomllib.loads(changed) == {**tomllib.loads(text), _ALIASES: wanted}
    except tomllib.TOMLDecodeError:
        is_right = False
    if not is_right:
        raise UsageError(f"{path} is written in a way that cannot be changed here; change {name} in an editor")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, path.stat().st_mode & 0o777 if path.exists() else 0o666) as file:
            file.write(changed.encode())
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from error
    return path
