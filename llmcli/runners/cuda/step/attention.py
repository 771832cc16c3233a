"""Attention of a layer, with what comes before it: norms, rotary, and appending keys and values to `KvCache`."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from llmcli.config.llama import LlamaConfig
from llmcli.kernels.append_tokens import append_tokens
from llmcli.kernels.attention_decode import attention_decode
from llmcli.kernels.attention_lanes import LaneInputs
from llmcli.kernels.attention_prefill import PromptInputs, attention_prefill, rotates_queries, writes_images
from llmcli.kernels.attention_rows import MAX_LANES, attention_rows
from llmcli.kernels.attention_span import attention_span
from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import add_parts, rotary
from llmcli.kernels.norms import head_norm
from llmcli.kernels.qkv import LayerCache
from llmcli.kernels.stage_wide import ImageRows, padded_inputs
from llmcli.runners.cuda.plan.weight_layout import LayerWeights, Projection, qkv_layout
from llmcli.runners.cuda.plan.workspace import MANY_LANES, Cache, Workspace
from llmcli.runners.cuda.step.activations import Activations
from llmcli.runners.cuda.step.arena import copy_blocks
from llmcli.runners.cuda.step.batch import Chunk, Lanes


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


@dataclass(frozen=True)
class CachedLayer:
    """A decoder layer with its cache, and the layer that follows. Layers of one `kind` differ in addresses only.

    `arrays` are the layer's weights and cache, and the next one's first norm; `addresses` are their first bytes.
    """

    index: int
    weights: LayerWeights[Any]
    following: LayerWeights[Any] | None
    cache: LayerCache
    kind: int
    arrays: tuple[Any, ...]
    addresses: list[int]


class Attention:
    """Attention of all layers: computes `mixed` from `qkv`.

    `cache_dtype` is the type of cached keys and values. `writes_images`: whether `of_chunk` may make an image.
    """

    def __init__(
        self,
        device: Device,
        config: LlamaConfig,
        workspace: Workspace[Any],
        cos_sin: Any,
        cache_dtype: np.dtype[Any],
    ):
        self._device = device
        self._config = config
        self._workspace = workspace
        self._cos_sin = cos_sin
        self._layout = qkv_layout(config)
        self._rotates_queries = rotates_queries(device, self._layout, cache_dtype)
        self._has_halves = workspace.mixed.dtype == np.float16  # as images have
        self.writes_images = self._has_halves and writes_images(device, self._layout, cache_dtype)

    def lanes_write_images(self, lanes: Lanes, projection: Projection[Any]) -> bool:
        """Whether `of_lanes` may write the image that gemm_wide takes for this output projection."""
        num_inputs = projection.layout.num_inputs
        return self._has_halves and self._in_one_launch(lanes) and num_inputs == padded_inputs(num_inputs)

    def _in_one_launch(self, lanes: Lanes) -> bool:
        """Whether attention_rows serves these lanes."""
        is_span = lanes.num_spans is not None and self._workspace.span_counters is not None
        return not is_span and self._workspace.row_partials is not None and len(lanes.rows) >= MANY_LANES

    def of_lanes(
        self,
        layer: CachedLayer,
        lanes: Lanes,
        activations: Activations,
        left: Any | None = None,
        *,
        as_image: bool = False,
    ) -> None:
        """Norm and rotate queries and keys, append to the cache and attend, for some lanes at a time.

        First add the partial sums of `qkv`. With `as_image`, write the image that the output projection takes, in place
        of `mixed`. Shapes: left float32 [parts, n, width of qkv]
        """
        workspace, inputs = self._workspace, self._inputs(layer, lanes, activations)
        is_cached = lanes.num_spans is not None
        if left is not None and (is_cached or not self._in_one_launch(lanes)):
            add_parts(self._device, parts=left, out=activations.qkv)
            left = None
        if self._in_one_launch(lanes):
            assert workspace.row_partials is not None
            assert workspace.row_counters is not None
            for some in _slices(activations.count, MAX_LANES):
                if is_cached:
                    append_tokens(self._device, inputs.of(some))
                image = ImageRows(activations.image, some.start, layer.weights.o.layout.unit_inputs)
                attention_rows(
                    self._device,
                    inputs.of(some),
                    is_cached=is_cached,
                    partials=workspace.row_partials,
                    counters=workspace.row_counters,
                    out=image if as_image else activations.mixed[some],
                    parts=None if left is None else left[:, some],
                )
        elif lanes.num_spans is not None and workspace.span_counters is not None:
            attention_span(
                self._device,
                inputs,
                num_spans=lanes.num_spans,
                partials=workspace.partials,
                counters=workspace.span_counters,
                out=activations.mixed,
            )
        else:
            for some in _slices(activations.count, len(workspace.partials)):
                if is_cached:
                    append_tokens(self._device, inputs.of(some))
                attention_decode(
                    self._device,
                    inputs.of(some),
                    is_cached=is_cached,
                    partials=workspace.partials,
                    counters=workspace.counters,
                    out=activations.mixed[some],
                )

    def of_chunk(
        self,
        layer: CachedLayer,
        chunk: Chunk,
        activations: Activations,
        left: Any | None = None,
        *,
        as_image: bool = False,
    ) -> None:
        """Do the same for tokens of prompts. Each token sees those of its row before it.

        With `as_image`, write the image that the output projection takes, in place of `mixed`.
        """
        self.append_chunk(layer, chunk, activations, left)
        first = 0
        for part, pages in zip(chunk.parts, chunk.page_table, strict=True):
            some = slice(first, first + part.num_tokens)
            self._of_part(layer, activations.qkv[some], pages, part.start, activations, first, as_image)
            first = some.stop

    def of_tokens(
        self,
        layer: CachedLayer,
        chunk: Chunk,
        places: Sequence[int],
        activations: Activations,
        few: Activations,
        *,
        as_image: bool,
    ) -> None:
        """Attend for these tokens of a chunk only; `append_chunk` has prepared all of them.

        Tokens of a row are adjacent. Writes `mixed` of `few`, or its image.
        """
        ends = list(accumulate(part.num_tokens for part in chunk.parts))
        first = 0
        for row, of_row in groupby(places, lambda place: bisect_right(ends, place)):
            begin, *others = of_row
            start = chunk.parts[row].start + chunk.parts[row].num_tokens - (ends[row] - begin)
            some = activations.qkv[begin : begin + 1 + len(others)]
            self._of_part(layer, some, chunk.page_table[row], start, few, first, as_image)
            first += len(some)

    def append_chunk(self, layer: CachedLayer, chunk: Chunk, activations: Activations, left: Any | None = None) -> None:
        """Norm and rotate keys and queries of prompts' tokens, and append keys and values. `left`: see `of_lanes`.

        On some cards and caches attention rotates the queries.
        """
        weights, cos_sin = layer.weights, self._cos_sin_of(layer)
        append_tokens(self._device, self._inputs(layer, chunk, activations), parts=left)
        queries = activations.qkv_columns(0, self._layout.q_size)
        if weights.q_norm is not None:
            head_norm(self._device, x=queries, weight=weights.q_norm, eps=self._config.rms_norm_eps)
        if cos_sin is not None and not self._rotates_queries:
            rotary(self._device, x=queries, positions=chunk.positions, cos_sin=cos_sin)

    def _of_part(
        self, layer: CachedLayer, qkv: Any, pages: Any, start: int, to: Activations, first: int, as_image: bool
    ) -> None:
        """Attend from consecutive tokens of a row, from position `start` on. Outputs begin at token `first` of `to`."""
        inputs = PromptInputs(
            qkv=qkv,
            layout=self._layout,
            cache=layer.cache,
            pages=pages,
            start=start,
            window=self._config.traits.sliding_windows[layer.index],
            cos_sin=self._cos_sin_of(layer) if self._rotates_queries else None,
        )
        image = ImageRows(to.image, first, layer.weights.o.layout.unit_inputs) if as_image else None
        attention_prefill(self._device, inputs, image or to.mixed[first : first + len(qkv)])

    def _inputs(self, layer: CachedLayer, places: Lanes | Chunk, activations: Activations) -> LaneInputs:
        return LaneInputs(
            qkv=activations.qkv,
            layout=self._layout,
            q_norm=layer.weights.q_norm,
            k_norm=layer.weights.k_norm,
            eps=self._config.rms_norm_eps,
            cos_sin=self._cos_sin_of(layer),
            rows=places.rows,
            positions=places.positions,
            page_table=places.page_table,
            cache=layer.cache,
            window=self._config.traits.sliding_windows[layer.index],
        )

    def _cos_sin_of(self, layer: CachedLayer) -> Any | None:
        return self._cos_sin if self._config.traits.uses_rope[layer.index] else None


def _slices(count: int, most: int) -> Iterator[slice]:
    return (slice(begin, min(begin + most, count)) for begin in range(0, count, most))
