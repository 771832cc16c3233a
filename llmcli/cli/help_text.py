"""How help is written: sections by panel, one row an option, without types, ranges and colours.

An option that few need is declared with `hidden=True`; only --help-all shows it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from typer.core import TyperArgument, TyperOption

HELP_NAMES = ("-h", "--help", "--help-all")
HELP_ALL = HELP_NAMES[-1]
_EXAMPLE = "llmcli "
_MAX_NAME_WIDTH = 28


def usage_pieces(params: Iterable[Any]) -> list[str]:
    """What follows the command's name in its usage line: `[OPTIONS] IN [OUT]`."""
    arguments = [param for param in params if isinstance(param, TyperArgument)]
    return ["[OPTIONS]", *(_name(param) if param.required else f"[{_name(param)}]" for param in arguments)]


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


def write_commands(formatter: Any, commands: Iterable[Any]) -> None:
    """Write the commands of a group, each with the first paragraph of its help."""
    _write_section(formatter, "Commands", [(command.name, _first_paragraph(command.help)) for command in commands])


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


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())
