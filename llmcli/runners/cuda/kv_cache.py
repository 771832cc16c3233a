"""`KvCache`: where the keys and values of every layer lie on the card."""

from typing import Any, TypedDict

from llmcli.kernels.device import Device
from llmcli.runners.cuda.arena import copy_blocks
from llmcli.runners.cuda.memory import cache_regions
from llmcli.runners.cuda.regions import Arrays
from llmcli.runners.cuda.stored import StoredModel


class LayerCache(TypedDict):
    """One layer's arrays, named as the kernels' launchers do.

    Shapes: keys, values [num_rows, num_key_value_heads, max_seq_len, head_dim]; key_scales, value_scales float32
            [num_rows, num_key_value_heads, max_seq_len] beside codes, else None
    """

    keys: Any
    values: Any
    key_scales: Any
    value_scales: Any


class KvCache:
    """The arrays of `cache_regions` in their arena, cut into layers once: a view takes the host as long as a launch."""

    def __init__(self, stored: StoredModel, arena: Arrays):
        names = [region.name for region in cache_regions(stored, 1, 1)]
        self._arrays = [arena[name] for name in names]
        self.layers = [
            LayerCache(
                keys=arena["keys"][index],
                values=arena["values"][index],
                key_scales=arena["key_scales"][index] if "key_scales" in names else None,
                value_scales=arena["value_scales"][index] if "value_scales" in names else None,
            )
            for index in range(stored.config.num_hidden_layers)
        ]

    def copy(self, device: Device, source: int, target: int, num_tokens: int) -> None:
        """Copy what a row holds of its first tokens to another row."""
        if num_tokens == 0:
            return
        for array in self._arrays:
            for layer in array:
                copy_blocks(device, layer[target], layer[source], num_tokens * layer.strides[2])
