"""`StepMasks`: the masks of a step's texts, made together once the first is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmcli.engine.sample import Sample
from llmcli.errors import LLMCliError
from llmcli.runners.base import Masks

if TYPE_CHECKING:
    from llmcli.schema.schema import HeldText

ReadAhead = Callable[[], Sequence[int] | None]  # waits for choices that are queued and not yet told


class StepMasks:
    """Masks for the spans of one step. Rows with a schema of their own need one each."""

    def __init__(self) -> None:
        self._wanted: list[tuple[HeldText, ReadAhead, Sequence[int]]] = []
        self._made: Sequence[NDArray[np.uint32] | LLMCliError] = ()

    def of(self, sample: Sample, read_ahead: ReadAhead = tuple, drafts: Sequence[int] = ()) -> Masks | None:
        """What may come next and behind each fitting draft; None if every token may.

        `read_ahead` returns the tokens that the sample has not been told yet, None if a choice has failed.
        """
        if sample.held_text is None:
            return None
        self._wanted.append((sample.held_text, read_ahead, drafts))
        index = len(self._wanted) - 1
        return lambda: self._masks(index)

    def _masks(self, index: int) -> NDArray[np.uint32]:
        if not self._made:
            wanted = [(held, read_ahead(), drafts) for held, read_ahead, drafts in self._wanted]
            self._made = wanted[0][0].masks_of_all(wanted)
        made = self._made[index]
        if isinstance(made, LLMCliError):
            raise made
        return made
