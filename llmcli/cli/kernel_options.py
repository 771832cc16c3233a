"""The options of `llmcli kernels` that say which model launches the kernels, and with how many tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.cli import lazy
from llmcli.cli.completion import complete_subject
from llmcli.cli.kernel_report import LIBRARY
from llmcli.cli.options import MODEL_PANEL
from llmcli.cli.targets import open_subject
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from llmcli.lab.walk import Lengths
    from llmcli.measure.subject import Subject

DEFAULT_SHAPE = "Llama-3.2-1B"

SubjectOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL|SHAPE",
        help="Whose launches: a model folder, a hub id, or a shape such as Llama-2-7B.",
        show_default=DEFAULT_SHAPE,
        autocompletion=complete_subject,
        rich_help_panel=MODEL_PANEL,
    ),
]


@dataclass(frozen=True)
class LengthOptions:
    """The prompt and the step of decoding whose launches are meant."""

    prompt: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of the prompt.", show_default="512")
    ] = None
    depth: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens in the KV cache before a step of decoding.", show_default="512"),
    ] = None
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="Rows that decode side by side.")] = 1

    def within(self, subject: Subject) -> Lengths:
        """The lengths, as far as the model's context allows.

        Raises: UsageError
        """
        maximum = subject.model.config.max_position_embeddings
        return lazy.Lengths.within(maximum, self.prompt, self.depth, self.rows)


def open_walked(name: str | None, form: str | None) -> Subject:
    """The model or shape of that name, else the usual shape. Raises: as `open_subject`"""
    return open_subject(name or DEFAULT_SHAPE, form)


def require_kernels(names: Iterable[str]) -> None:
    """Refuse what is not the name of a kernel or of the matrix library.

    Raises: UsageError
    """
    for name in names:
        if name not in (*lazy.KERNELS, LIBRARY):
            raise UsageError(f"there is no kernel {name!r}; run llmcli kernels list to see them")
