"""`--html FILE`: one self-contained page with the tinted text and, for each token, what else could have stood there.

Refuses to replace what is not such a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.cli.output.page import Choice, PageSample, render_page
from llmcli.cli.output.page_kit import PAGE, write_page
from llmcli.cli.output.tokens import Share, TextShares
from llmcli.cli.terminal import terminal
from llmcli.engine.events import Finished, Token

if TYPE_CHECKING:
    from llmcli.cli.output.base import RunFacts
    from llmcli.engine.events import Event
    from llmcli.engine.roads import Road
    from llmcli.sampling.inspect import Inspection

FindRoads = Callable[["Mapping[int, Sequence[Inspection]]"], "Sequence[Road]"]


class HtmlOutput:
    """Collects the events and writes the page at the end; after a Ctrl-C with what there is by then.

    `find_roads` follows the roads that leave whole texts, whose choices it gets by sample.
    Raises: UsageError if `path` cannot be written, or holds a page and `replace` is false.
    """

    def __init__(self, facts: RunFacts, path: Path, *, replace: bool, find_roads: FindRoads = lambda texts: ()):
        PAGE.check(path, replace=replace)
        self._find_roads = find_roads
        self._facts = facts
        self._path = path
        self._replace = replace
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

        Raises: OutputError if the disk is full; UsageError if the folder has gone, or something else lies there now.
        """
        if not finished:
            return
        roads: Sequence[Road] = ()
        if all(item.finish_reason != "interrupted" for item in finished):
            roads = self._find_roads(
                {item.sample: [choice.inspection for choice in self._choices[item.sample]] for item in finished}
            )
        samples = [
            PageSample(
                self._choices[item.sample],
                self._shares[item.sample],
                item,
                [road for road in roads if road.fork.sample == item.sample],
            )
            for item in finished
        ]
        write_page(self._path, render_page(self._facts, samples), replace=self._replace)
        terminal.info(f"page: {self._path}")
