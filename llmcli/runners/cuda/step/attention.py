"""Attention of a layer, with what comes before it: norms, rotary, and appending keys and values to `KvCache`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcli.config.llama import LlamaConfig
from llmcli.kernels.attention_decode import LaneInputs, append_tokens, attention_decode
from llmcli.kernels.attention_prefill import PromptInputs, attention_prefill, rotates_queries, writes_images
from llmcli.kernels.attention_rings import MAX_LANES, attention_rows, attention_span
from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import add_parts
from llmcli.kernels.qkv import LayerCache
from llmcli.kernels.stage_wide import ImageRows, padded_inputs
from llmcli.runners.cuda.plan.weight_layout import LayerWeights, qkv_layout
from llmcli.runners.cuda.plan.workspace import MANY_LANES, Cache, Workspace
from llmcli.runners.cuda.step.activations import Activations
from llmcli.runners.cuda.step.arena import copy_blocks
from llmcli.runners.cuda.step.batch import Batch


class KvCache:
    """The cache's arrays, cut into layers once: a view takes the host as long as a launch."""

    def __init__(self, cache: Cache[Any]):
        arrays = cache.keys, cache.values, cache.key_scales, cache.value_scales
        self._arrays = [array for array in arrays if array is not None]  # scales: both or none
        self.layers = [LayerCache(*(array[index] for array in self._arrays)) for index in range(len(cache.keys))]

    def copy_page(self, device: Device, source: int, target: int) -> None:
        """Copy a page, in all layers."""
        for array in self._arrays:
            copy_blocks(device, array[:, target], array[:, source], array.strides[1])


@dataclass(frozen=True)
class CachedLayer:
    """A decoder layer with its cache, and the layers around it. Layers of one `kind` differ in addresses only.

    `arrays` are the layer's weights and cache, and the next one's first norm; `addresses` are their first bytes.
    """

    index: int
    weights: LayerWeights[Any]
    before: LayerWeights[Any] | None
    following: LayerWeights[Any] | None
    cache: LayerCache
    kind: int
    arrays: tuple[Any, ...]
    addresses: list[int]


class Attention:
    """Attention of all layers: computes `mixed` from `qkv`. `cache_dtype` is the type of cached keys and values."""

    def __init__(
        self, device: Device, config: LlamaConfig, workspace: Workspace[Any], cos_sin: Any, cache_dtype: np.dtype[Any]
    ):
        self._device = device
        self._config = config
        self._workspace = workspace
        self._cos_sin = cos_sin
        self._layout = qkv_layout(config)
        self._rotates_queries = rotates_queries(device, self._layout, cache_dtype)
        self._has_halves = workspace.mixed.dtype == np.float16  # as images have
        self._writes_images = self._has_halves and writes_images(device, self._layout, cache_dtype)

    def attend(
        self,
        layer: CachedLayer,
        batch: Batch,
        own: Activations,
        to: Activations,
        left: Any | None,
        *,
        takes_image: bool,
    ) -> bool:
        """Add partial sums to `qkv` of `own`, norm and rotate queries and keys, append to the cache and attend.

        Writes `mixed` of `to`: the tokens of slices, or all lanes. With `takes_image` it may write the image that the
        output projection takes in place of that; returns whether it did.
        Shapes: left float32 [parts, n, width of qkv]
        """
        if batch.slices is not None:
            is_image = takes_image and self._writes_images
            # On some cards and caches attention rotates the queries.
            append_tokens(
                self._device,
                self._inputs(layer, batch, own),
                parts=left,
                norms_queries=True,
                rotates_queries=not self._rotates_queries,
            )
            self._attend_slices(layer, batch, own, to, is_image)
            return is_image
        layout = layer.weights.o.layout
        has_many = len(batch.rows) == batch.num_rows >= MANY_LANES and self._workspace.row_partials is not None
        is_image = (
            takes_image and has_many and self._has_halves and layout.num_inputs == padded_inputs(layout.num_inputs)
        )
        if has_many:
            self._attend_many(layer, batch, own, left, is_image)
            return is_image
        if left is not None:
            add_parts(self._device, parts=left, out=own.qkv)
        self._attend_few(layer, batch, own)
        return False

    def _attend_many(
        self, layer: CachedLayer, batch: Batch, own: Activations, left: Any | None, is_image: bool
    ) -> None:
        """Attend from many lanes, each of another row."""
        workspace, inputs = self._workspace, self._inputs(layer, batch, own)
        assert workspace.row_partials is not None
        assert workspace.row_counters is not None
        for some in _cut(own.count, MAX_LANES):
            image = ImageRows(own.image, some.start, layer.weights.o.layout.unit_inputs)
            attention_rows(
                self._device,
                inputs.of(some),
                partials=workspace.row_partials,
                counters=workspace.row_counters,
                out=image if is_image else own.mixed[some],
                parts=None if left is None else left[:, some],
            )

    def _attend_few(self, layer: CachedLayer, batch: Batch, own: Activations) -> None:
        """Attend from a few lanes, or from several of a row."""
        workspace, inputs, is_cached = self._workspace, self._inputs(layer, batch, own), batch.num_rows < own.count
        if is_cached and workspace.span_counters is not None:
            attention_span(
                self._device,
                inputs,
                num_spans=batch.num_rows,
                partials=workspace.partials,
                counters=workspace.span_counters,
                out=own.mixed,
            )
            return
        if is_cached:
            append_tokens(self._device, inputs)
        for some in _cut(own.count, len(workspace.partials)):
            attention_decode(
                self._device,
                inputs.of(some),
                is_cached=is_cached,
                partials=workspace.partials,
                counters=workspace.counters,
                out=own.mixed[some],
            )

    def _attend_slices(
        self, layer: CachedLayer, batch: Batch, own: Activations, to: Activations, is_image: bool
    ) -> None:
        """Attend from slices of prompts. Each token sees those of its row before it."""
        written = 0
        for row, first, num_tokens, start in batch.slices or ():
            inputs = PromptInputs(
                qkv=own.qkv[first : first + num_tokens],
                layout=self._layout,
                cache=layer.cache,
                pages=batch.page_table[row],
                start=start,
                window=self._config.traits.sliding_windows[layer.index],
                cos_sin=self._cos_sin_of(layer) if self._rotates_queries else None,
            )
            image = ImageRows(to.image, written, layer.weights.o.layout.unit_inputs) if is_image else None
            attention_prefill(self._device, inputs, image or to.mixed[written : written + num_tokens])
            written += num_tokens

    def _inputs(self, layer: CachedLayer, batch: Batch, own: Activations) -> LaneInputs:
        return LaneInputs(
            qkv=own.qkv,
            layout=self._layout,
            q_norm=layer.weights.q_norm,
            k_norm=layer.weights.k_norm,
            eps=self._config.rms_norm_eps,
            cos_sin=self._cos_sin_of(layer),
            rows=batch.rows,
            positions=batch.positions,
            page_table=batch.page_table,
            cache=layer.cache,
            window=self._config.traits.sliding_windows[layer.index],
        )

    def _cos_sin_of(self, layer: CachedLayer) -> Any | None:
        return self._cos_sin if self._config.traits.uses_rope[layer.index] else None


def _cut(count: int, most: int) -> Iterator[slice]:
    return (slice(begin, min(begin + most, count)) for begin in range(0, count, most))
