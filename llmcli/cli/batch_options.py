"""The options of `llmcli batch` that other commands do not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from llmcli.cli.options import (
    AUTO,
    OUTPUT_PANEL,
    PROMPT_PANEL,
    ChatTemplateOption,
    RowsOption,
    SystemOption,
    TemplateVarOption,
    parse_rows,
)
from llmcli.cli.prompt import parse_template_variables, refuse_undecoded
from llmcli.errors import UsageError

PIPE = "-"


@dataclass(frozen=True)
class BatchOptions:
    """Where prompts come from, what stands around them, and where and how results go.

    Raises: UsageError for values that cannot be.
    """

    source: Annotated[
        str, typer.Argument(metavar="IN", help="JSON Lines file with one prompt per line; `-` reads standard input.")
    ]
    output: Annotated[str, typer.Argument(metavar="OUT", help="File to write results to; `-` writes standard output.")]
    text: Annotated[
        bool, typer.Option("--text", help="IN is plain text: each line is a prompt.", rich_help_panel=PROMPT_PANEL)
    ] = False
    system: SystemOption = None
    chat_template: ChatTemplateOption = None
    template_var: TemplateVarOption = None
    rows: RowsOption = AUTO
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check IN and OUT and estimate the run, but do not run it.", rich_help_panel=OUTPUT_PANEL
        ),
    ] = False
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Write results in the order of IN.", rich_help_panel=OUTPUT_PANEL)
    ] = False
    stats: Annotated[
        str | None,
        typer.Option("--stats", metavar="", help="Print times, rates and rows.", rich_help_panel=OUTPUT_PANEL),
    ] = None

    def __post_init__(self) -> None:
        if self.system is not None:
            refuse_undecoded(self.system, "--system")
        if self.stats not in (None, "run"):
            raise UsageError(f"--stats is {self.stats!r}, expected no value")
        parse_rows(self.rows)
        parse_template_variables(self.template_var)

    @property
    def num_rows(self) -> int | None:
        """Rows at most; None is as many as the device gains from."""
        return parse_rows(self.rows)
