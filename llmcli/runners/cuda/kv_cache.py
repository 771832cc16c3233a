"""`KvCache`: where the keys and values of every layer lie on the card."""

from typing import Any

from llmcli.kernels.device import Device
from llmcli.kernels.qkv import LayerCache
from llmcli.runners.cuda.arena import copy_blocks
from llmcli.runners.cuda.workspace import Cache


class KvCache:
    """The cache's arrays, cut into layers once: a view takes the host as long as a launch."""

    def __init__(self, cache: Cache[Any]):
        scales = [array for array in (cache.key_scales, cache.value_scales) if array is not None]
        self._arrays = [cache.keys, cache.values, *scales]
        self.layers = [
            LayerCache(
                keys=cache.keys[index],
                values=cache.values[index],
                key_scales=None if cache.key_scales is None else cache.key_scales[index],
                value_scales=None if cache.value_scales is None else cache.value_scales[index],
            )
            for index in range(len(cache.keys))
        ]

    def copy_page(self, device: Device, source: int, target: int) -> None:
        """Copy a page, in all layers."""
        for array in self._arrays:
            copy_blocks(device, array[:, target], array[:, source], array.strides[1])
