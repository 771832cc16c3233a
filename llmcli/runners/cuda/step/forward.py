"""The forward pass on the card: a chunk of prompts, or one token in each of many lanes.

Everything is queued on the device's stream, and nothing is allocated. Rows of any number are multiplied with the same
bits (products.py). Long prompts use one chunk of the inputs.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from llmcli.config.llama import LlamaConfig
from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import add_parts, embedding
from llmcli.kernels.replay import RecentReplays, Replay, base_addresses, likeness
from llmcli.runners.base import AllLogits
from llmcli.runners.cuda.plan.memory import MemoryPlan
from llmcli.runners.cuda.plan.weight_layout import Weights, qkv_layout
from llmcli.runners.cuda.plan.workspace import LOGIT_ROWS, MOST_ALONE, Cache, Workspace
from llmcli.runners.cuda.step.activations import Activations
from llmcli.runners.cuda.step.arena import copy, fetch
from llmcli.runners.cuda.step.attention import Attention, CachedLayer, KvCache
from llmcli.runners.cuda.step.batch import Chunk, Lanes
from llmcli.runners.cuda.step.products import Products

# Passes whose launches are kept: all lengths of short prompts. Each takes 20 KB of host memory, 70 with 16 parts.
_MOST_KEPT_PASSES = 256
# What runs before all layers, and after them; and a last layer for some tokens.
_BEGINNING, _END, _LAST = "beginning", "end", "last"


class Forward:
    """The model's computation over one KV cache and one workspace, for one caller at a time.

    Attributes: hidden float32 [chunk_tokens, hidden_size], the outputs of the latest tokens, or of some of them
    """

    def __init__(
        self,
        device: Device,
        plan: MemoryPlan,
        weights: Weights[Any],
        cache: Cache[Any],
        workspace: Workspace[Any],
    ):
        self.device = device
        self.config: LlamaConfig = plan.stored.config
        self.chunk_tokens = plan.chunk_tokens
        self.hidden = workspace.hidden
        self._weights = weights
        self._cache = KvCache(cache)
        self._workspace = workspace
        self._qkv = qkv_layout(self.config)
        self._layers = self._find_layers()
        self._attention = Attention(device, self.config, workspace, weights.cos_sin, cache.keys.dtype)
        self._replays = RecentReplays(_MOST_KEPT_PASSES)
        self._alone: tuple[int, ...] | None = None  # the tokens whose outputs `hidden` has, if not all
        # Keep the views: cutting them takes the host a tenth of a millisecond. The function must not refer to `self`,
        # or a dropped runner would keep its memory until Python's collector runs.
        qkv_width = self._qkv.width
        self._activations = functools.lru_cache(_MOST_KEPT_PASSES)(
            lambda count: Activations(workspace, count, qkv_width)
        )

    def run(self, work: Lanes | Chunk, needed: Sequence[int] | None = None) -> None:
        """Run one token a lane, or tokens of prompts; leave the last layer's outputs in `hidden`.

        `needed`: the indices, in order, of a chunk's tokens whose outputs will be read; those of a row are adjacent.
        None for all.
        Kernels read each lane's row and position on the card, so the same launches serve every step.
        """
        self._alone = None
        if isinstance(work, Chunk):
            if needed is not None and self._may_run_alone(work, len(needed)):
                self._alone = tuple(needed)
            layers = self._chunk(work, leaves=True, alone=self._alone)
        else:
            layers = self._lanes(work, leaves=True)
        for _ in layers:
            pass

    def by_layer(self, work: Lanes | Chunk) -> Iterator[Any]:
        """Do what `run` does. Yield `hidden` of all tokens as the embedding leaves it, then as each layer does.

        Shapes: float32 [num_tokens, hidden_size]
        """
        self._alone = None
        return self._lanes(work, leaves=False) if isinstance(work, Lanes) else self._chunk(work, leaves=False)

    def _lanes(self, lanes: Lanes, *, leaves: bool) -> Iterator[Any]:
        activations = self._activations(len(lanes.rows))
        products = self._products_of(activations)

        def run(layer: CachedLayer) -> None:
            rest = self._qkv_of(products, layer, leaves)
            o = layer.weights.o
            as_image = products.takes_wide(o) and self._attention.lanes_write_images(lanes, o)
            self._attention.of_lanes(layer, lanes, activations, rest, as_image=as_image)
            products.rest(layer.weights, layer.following, is_image=as_image)
            if not leaves:
                self._finish(products.left_by(layer.weights), activations)

        arrays = lanes.token_ids, lanes.token_rows, lanes.rows, lanes.positions, lanes.page_table
        replays = self._replays_of(arrays, len(lanes.rows), lanes.num_spans, leaves)
        self._record(replays, _BEGINNING, lambda: self._begin(lanes.token_ids, activations, lanes.token_rows))
        yield from self._each_layer(self._layers, run, activations.hidden, replays)
        if leaves:
            self._record(replays, _END, lambda: self._finish(products.left_by(self._layers[-1].weights), activations))

    def _chunk(self, chunk: Chunk, *, leaves: bool, alone: tuple[int, ...] | None = None) -> Iterator[Any]:
        """With `leaves` a layer may leave partial sums to the next one. `alone`: see `_last_layer`."""
        activations = self._activations(len(chunk.token_ids))
        products = self._products_of(activations, in_chunks=chunk.in_chunks)

        def run(layer: CachedLayer) -> None:
            rest = self._qkv_of(products, layer, leaves)
            as_image = self._attention.writes_images and products.takes_wide(layer.weights.o)
            self._attention.of_chunk(layer, chunk, activations, rest, as_image=as_image)
            products.rest(layer.weights, layer.following, is_image=as_image)
            if not leaves:
                self._finish(products.left_by(layer.weights), activations)

        arrays = chunk.token_ids, chunk.rows, chunk.positions, chunk.page_table
        replays = self._replays_of(arrays, chunk.in_chunks, chunk.parts, leaves)
        self._record(replays, _BEGINNING, lambda: self._begin(chunk.token_ids, activations))
        layers = self._layers if alone is None else self._layers[:-1]
        yield from self._each_layer(layers, run, activations.hidden, replays)
        if alone is not None:
            self._last_layer(chunk, activations, alone, replays)
        if leaves:
            self._record(replays, _END, lambda: self._finish(products.left_by(self._layers[-1].weights), activations))

    def _products_of(self, activations: Activations, *, in_chunks: bool = True) -> Products:
        return Products(self.device, activations, self.config.rms_norm_eps, in_chunks)

    def _qkv_of(self, products: Products, layer: CachedLayer, leaves: bool) -> Any | None:
        """Compute `qkv` from what the layer before has left."""
        if layer.index == 0:
            return products.qkv(layer.weights)
        before = self._layers[layer.index - 1].weights
        left = products.left_by(before) if leaves else None
        return products.qkv(layer.weights, left, is_led=products.leads(before.down, layer.weights.qkv))

    def _may_run_alone(self, chunk: Chunk, num_tokens: int) -> bool:
        """Whether the last layer may run for `num_tokens` of a chunk's tokens: if their number changes no bits."""
        return num_tokens <= MOST_ALONE and num_tokens < len(chunk.token_ids) and not chunk.in_chunks

    def _last_layer(
        self, chunk: Chunk, activations: Activations, alone: tuple[int, ...], replays: dict[Hashable, Replay]
    ) -> None:
        """Run the last layer for some of a chunk's tokens; their outputs become the first rows of `hidden`.

        The others only give it keys and values, which later tokens see. Their outputs are not needed.
        """
        layer = self._layers[-1]

        def begin() -> None:
            self._products_of(activations, in_chunks=False).qkv(layer.weights)
            self._attention.append_chunk(layer, chunk, activations)

        def end() -> None:
            few = self._activations(len(alone))
            products = self._products_of(few, in_chunks=False)
            as_image = self._attention.writes_images and products.takes_wide(layer.weights.o)
            self._attention.of_tokens(layer, chunk, alone, activations, few, as_image=as_image)
            products.rest(layer.weights, is_image=as_image)

        self._record(replays, _LAST, begin, layer.arrays, layer.addresses)
        if alone:
            for row, place in enumerate(alone):  # in order, so that no row is written before it is read
                if row != place:
                    copy(self.device, self.hidden[row], self.hidden[place])
            self._record(replays, (_LAST, alone), end, layer.arrays, layer.addresses)

    def forget_passes(self) -> None:
        """Forget the kept launches. In a dry run their costs also depend on the values assumed of arrays."""
        self._replays = RecentReplays(_MOST_KEPT_PASSES)

    def project_logits(self, hidden: Any, logits: Any) -> None:
        """Compute logits from `hidden`. Shapes: hidden float32 [n, hidden_size]; logits float32 [n, vocab_size]."""
        products = self._products_of(self._activations(len(hidden)))
        products.head(self._weights.head, self._weights.norm, hidden, logits)

    def outputs_of(self, places: Sequence[int]) -> Any:
        """The outputs of these tokens of the latest run: rows of `hidden`, or copies if they are not adjacent.

        Shapes: result float32 [len(places), hidden_size]
        """
        if self._alone is not None:
            places = [self._alone.index(place) for place in places]
        if places[-1] - places[0] == len(places) - 1:
            return self.hidden[places[0] : places[-1] + 1]
        rows = self._workspace.outputs[: len(places) * self.config.hidden_size].reshape(len(places), -1)
        for row, place in zip(rows, places, strict=True):
            copy(self.device, row, self.hidden[place])
        return rows

    def logits_of_span(self, begin: int, end: int) -> AllLogits:
        """The logits of tokens begin ... end - 1 of the latest run. Shapes: result float32 [n, vocab_size]."""
        parts = []
        for first in range(begin, end, LOGIT_ROWS):
            hidden = self.outputs_of(range(first, min(first + LOGIT_ROWS, end)))
            logits = self._workspace.score_logits[: len(hidden)]
            self.project_logits(hidden, logits)
            parts.append(fetch(self.device, logits))
        return np.concatenate(parts)

    def copy_page(self, source: int, target: int) -> None:
        """Copy the keys and values of a page."""
        self._cache.copy_page(self.device, source, target)

    def _each_layer(
        self,
        layers: Sequence[CachedLayer],
        run: Callable[[CachedLayer], None],
        hidden: Any,
        replays: dict[Hashable, Replay],
    ) -> Iterator[Any]:
        """Run layers, replaying kinds that `replays` has. Yield `hidden` between them."""
        yield hidden
        for layer in layers:
            self._record(replays, layer.kind, functools.partial(run, layer), layer.arrays, layer.addresses)
            yield hidden

    def _replays_of(self, arrays: Sequence[Any], *others: Hashable) -> dict[Hashable, Replay]:
        """The kept replays of a pass; these arrays and others decide its launches."""
        return self._replays.of((self.device.uses_own, *base_addresses(arrays), *others))

    def _record(
        self,
        replays: dict[Hashable, Replay],
        key: Hashable,
        launch: Callable[[], None],
        arrays: Sequence[Any] = (),
        addresses: Sequence[int] = (),
    ) -> None:
        """Replay the launches under this key with these addresses; or launch them, and keep them to be replayed."""
        replay = replays.get(key)
        if replay is None:
            replays[key] = self.device.record(launch, arrays)
        else:
            replay.start(addresses)

    def _finish(self, left: Any | None, activations: Activations) -> None:
        """Add the partial sums of a layer's last product, if any. Shapes: left float32 [parts, n, hidden_size]"""
        if left is not None:
            add_parts(self.device, parts=left, out=activations.hidden)

    def _find_layers(self) -> list[CachedLayer]:
        traits = self.config.traits
        kinds: dict[Hashable, int] = {}

        def launched(index: int) -> Hashable:
            """What decides a layer's launches."""
            if not 0 <= index < len(self._weights.layers):
                return None
            weights = self._weights.layers[index]
            matrices = [
                (part.layout, part.matrix.widening, part.matrix.power, part.begin) for part in weights.projections
            ]
            arrays = (*weights.arrays, *self._cache.layers[index].arrays)
            return (*matrices, traits.uses_rope[index], traits.sliding_windows[index], likeness(arrays))

        layers: list[CachedLayer] = []
        for index, (weights, cache) in enumerate(zip(self._weights.layers, self._cache.layers, strict=True)):
            following = self._weights.layers[index + 1] if index + 1 < len(self._weights.layers) else None
            arrays = (*weights.arrays, *cache.arrays, *(() if following is None else (following.input_layernorm,)))
            # A layer's neighbours decide what it finds, and what it leaves.
            kind = kinds.setdefault(tuple(map(launched, (index - 1, index, index + 1))), len(kinds))
            layers.append(CachedLayer(index, weights, following, cache, kind, arrays, base_addresses(arrays)))
        return layers

    def _begin(self, token_ids: Any, activations: Activations, token_rows: Any = None) -> None:
        """Look up the tokens' embeddings."""
        table = self._weights.embed_tokens
        embedding(self.device, table=table, token_ids=token_ids, rows=token_rows, out=activations.hidden)
