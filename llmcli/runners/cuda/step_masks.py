"""`WorkMasks`: the masks of a work's choices, made while the card works."""

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import LLMCliError
from llmcli.runners.base import Masks
from llmcli.sampling.candidates import TokenMask, mask_words


class WorkMasks:
    """The masks of a work's choices, made on first use, as the card works meanwhile; None for a work without masks.

    Attributes: error: what they raised; then no choice is allowed anything
    """

    def __init__(self, masks: Masks | None, vocab_size: int):
        self.error: LLMCliError | None = None
        self._make = masks
        self._masks: NDArray[np.uint32] | None = None
        self._num_words = mask_words(vocab_size)

    def mask(self, choice: int) -> TokenMask | None:
        """The mask of a choice; None if any token is allowed."""
        if self._make is None or self.error is not None:
            return None if self._make is None else np.zeros(self._num_words, np.uint32)
        try:
            self._masks = self._make() if self._masks is None else self._masks
        except LLMCliError as error:
            self.error = error
            return self.mask(choice)
        mask: TokenMask = self._masks[choice]
        return mask
