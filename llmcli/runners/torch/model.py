"""`TorchModel`: what computes for `HostDevice`, with arrays in and out."""

from collections.abc import Sequence

import torch

from llmcli.runners.base import AllLogits
from llmcli.runners.host.device import Hidden
from llmcli.runners.torch.cache import PagedCache
from llmcli.runners.torch.llama import Llama


class TorchModel:
    """The `HostModel` of the torch runner."""

    def __init__(self, llama: Llama, cache: PagedCache):
        self.config = llama.config
        self._llama = llama
        self._cache = cache

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], position: int, pages: Sequence[int]) -> Hidden:
        """Run the tokens of one row; see `HostModel.forward`."""
        hidden: Hidden = self._llama.forward(torch.tensor(token_ids), position, self._cache.row(pages)).numpy()
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Hidden) -> AllLogits:
        """Scores of every vocabulary entry; see `HostModel.logits`."""
        logits: AllLogits = self._llama.logits(torch.from_numpy(hidden)).numpy()
        return logits

    def copy_page(self, source: int, target: int) -> None:
        """Copy the keys and values of a page."""
        self._cache.copy_page(source, target)
