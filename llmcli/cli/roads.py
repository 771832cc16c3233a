"""`--roads`: follows roads once the text is complete, and shows how far they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmcli.cli import lazy
from llmcli.cli.progress import progress
from llmcli.cli.terminal import terminal

if TYPE_CHECKING:
    from llmcli.engine.request import Request
    from llmcli.engine.roads import Road, Roads
    from llmcli.runners.base import Runner
    from llmcli.sampling.inspect import Inspection
    from llmcli.tokenizer.base import Tokenizer


class RoadFinder:
    """Finds the `count` likeliest roads of a request's texts. A Ctrl-C ends that; `is_complete` is then false."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer, request: Request, count: int):
        self._runner = runner
        self._tokenizer = tokenizer
        self._request = request
        self._count = count
        self.is_complete = True

    def __call__(self, texts: Mapping[int, Sequence[Inspection]]) -> Sequence[Road]:
        """Follow the roads that leave these texts, given by the choices of each sample."""
        if not self._count:
            return ()
        roads: Roads | None = None
        try:
            forks = lazy.find_forks(texts, self._count)
            roads = lazy.Roads(self._runner, self._tokenizer, self._request, texts, forks)
            with progress("following roads", unit="tokens") as on_progress:
                for _ in roads.steps():
                    on_progress(roads.num_tokens, roads.most_tokens)
        except KeyboardInterrupt:
            self.is_complete = False
        found = [] if roads is None else roads.found()
        if not self.is_complete:
            terminal.info(f"interrupted; roads on the page: {len(found)} of {self._count}")
        elif len(found) < self._count:
            terminal.info(f"roads: {len(found)}, as no other token could have been drawn")
        return found
