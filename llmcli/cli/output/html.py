"""`--html FILE`: one self-contained page with the tinted text and, for each token, what else could have stood there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.cli.output.page import Choice, PageSample, render_page
from llmcli.cli.output.tokens import Share, TextShares
from llmcli.cli.terminal import terminal
from llmcli.engine.events import Finished, Token
from llmcli.errors import OutputError, UsageError

if TYPE_CHECKING:
    from llmcli.cli.output.base import RunFacts
    from llmcli.engine.events import Event


class HtmlOutput:
    """Collects the events and writes the page at the end; after a Ctrl-C with what there is by then.

    Raises: UsageError if there is no writing to `path`.
    """

    def __init__(self, facts: RunFacts, path: Path):
        check_page_path(path)
        self._facts = facts
        self._path = path
        self._choices: dict[int, list[Choice]] = {sample: [] for sample in facts.samples}
        self._text_shares = {sample: TextShares(facts.tokenizer) for sample in facts.samples}
        self._shares: dict[int, list[Share]] = {sample: [] for sample in facts.samples}

    def show(self, event: Event) -> None:
        """Collect a token, or the end of a sample."""
        if isinstance(event, Token):
            assert event.inspection is not None, "the page needs a request with num_alternatives"
            self._choices[event.sample].append(Choice(event.token_id, event.inspection))
            self._shares[event.sample] += self._text_shares[event.sample].push(event)
        elif isinstance(event, Finished):
            self._shares[event.sample] += self._text_shares[event.sample].finish(event)

    def finish(self, finished: list[Finished]) -> None:
        """Write the page, if anything was generated.

        Raises: UsageError if the disk is full, or the folder has gone.
        """
        if not finished:
            return
        samples = [PageSample(self._choices[item.sample], self._shares[item.sample], item) for item in finished]
        _write_atomically(self._path, render_page(self._facts, samples))
        terminal.info(f"page: {self._path}")


def check_page_path(path: Path) -> None:
    """Find out whether a page can be written there, leaving no trace.

    Raises: UsageError that names the path and the reason.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        if path.exists() and not path.is_file():  # a device or a pipe would be replaced by the page
            raise FileExistsError("it is no ordinary file")
        part = _part_path(path)
        part.touch(exist_ok=False)
        part.unlink()
    except OSError as error:
        raise UsageError(f"{_cannot_write(path, error)}; name a file in a folder of yours") from error


def _write_atomically(path: Path, text: str) -> None:
    part = _part_path(path)
    try:
        try:
            part.write_bytes(text.encode(errors="replace"))  # a path may hold bytes that are no UTF-8
            part.replace(path.resolve())
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(_cannot_write(path, error)) from error


def _part_path(path: Path) -> Path:
    path = path.resolve()  # what a link points to is replaced, not the link
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _cannot_write(path: Path, error: OSError) -> str:
    return f"--html {path} cannot be written: {error.strerror or error}"
