"""The classes of our commands and groups: what each does with its arguments before Typer reads them, and its help."""

from collections.abc import Collection
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from llmcli.cli.help_text import HELP_ALL, usage_pieces, write_commands, write_description, write_params
from llmcli.cli.option_names import refuse_unknown_command, refuse_unknown_option
from llmcli.cli.optional_value import OPTIONAL_VALUES, with_values
from llmcli.cli.path_values import refuse_empty_paths


class Command(TyperCommand):
    """A command: options that may stand alone, --help-all, and a proposal for an option that it lacks."""

    shows_all_options = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        refuse_empty_paths(self.params)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments.

        Raises: UsageError for an unknown option.
        """
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
            return super().parse_args(ctx, arguments)
        except typer.TyperException as error:
            problem: Any = error
            problem.ctx = ctx  # which Typer leaves out where an option lacks its value
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The usage line behind the command's name."""
        return usage_pieces(self.get_params(ctx))

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the description and the examples."""
        write_description(formatter, self.help or "")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options."""
        write_params(formatter, self.get_params(ctx), shows_all=self.shows_all_options)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Offer all options, those too that only --help-all shows."""
        for option in _options(self.get_params(ctx)):
            option.hidden = False
        return super().shell_complete(ctx, incomplete)


class Group(TyperGroup):
    """A group of commands, and a proposal for an option or a command that it lacks."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments before the command's name.

        Raises: UsageError for an unknown option.
        """
        known = _names(_options(self.get_params(ctx)))
        for argument in args:
            if not argument.startswith("-") or ctx.resilient_parsing:
                break
            refuse_unknown_option(
                argument, known, f"options come after the command: {ctx.command_path} COMMAND {argument}"
            )
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command.

        Raises: UsageError for an unknown one.
        """
        if not ctx.resilient_parsing:
            refuse_unknown_command(args[0], self.commands, ctx.command_path)
        return super().resolve_command(ctx, args)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the description."""
        write_description(formatter, self.help or "")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands and the options."""
        write_commands(formatter, self.commands.values())
        write_params(formatter, self.get_params(ctx), shows_all=True)


def _options(params: Collection[Any]) -> list[TyperOption]:
    return [param for param in params if isinstance(param, TyperOption)]


def _names(options: Collection[TyperOption]) -> set[str]:
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}
