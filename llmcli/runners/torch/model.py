"""`TorchModel`: the model that `HostDevice` runs, with arrays in and out."""

from collections.abc import Sequence

import numpy as np
import torch

from llmcli.runners.base import AllLogits, HiddenStates
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
    def forward(self, parts: Sequence[Sequence[int]], position: int, pages: Sequence[int]) -> Hidden:
        """Run the tokens of one row; see `HostModel.forward`."""
        token_ids = [torch.tensor(part) for part in parts]
        hidden: Hidden = self._llama.forward(token_ids, position, self._cache.row(pages)).numpy()
        return hidden

    @torch.inference_mode()
    def hidden_states(
        self,
        parts: Sequence[Sequence[int]],
        position: int,
        pages: Sequence[int],
        inputs: HiddenStates | None,
    ) -> HiddenStates:
        """Run the tokens of one row layer by layer; see `HostModel.hidden_states`."""
        token_ids = [torch.tensor(part) for part in parts]
        layers = self._llama.layer_by_layer(token_ids, position, self._cache.row(pages))
        states = []
        for index, hidden in enumerate(layers):
            states.append(torch.cat(hidden).numpy())
            if inputs is not None:
                given = torch.split(torch.from_numpy(inputs[index]), [len(part) for part in parts])
                for of_part, given_part in zip(hidden, given, strict=True):
                    of_part.copy_(given_part)
        return np.stack(states)

    @torch.inference_mode()
    def logits(self, hidden: Hidden) -> AllLogits:
        """Scores of every vocabulary entry; see `HostModel.logits`."""
        logits: AllLogits = self._llama.logits(torch.from_numpy(hidden)).numpy()
        return logits

    def copy_page(self, source: int, target: int) -> None:
        """Copy the keys and values of a page."""
        self._cache.copy_page(source, target)
