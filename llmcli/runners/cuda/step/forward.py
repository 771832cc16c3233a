"""The forward pass on the card: a batch of tokens through all layers.

Everything is queued on the device's stream, and nothing is allocated. Rows of any number are multiplied with the same
bits (products.py). Long prompts use one chunk of the inputs.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from llmcli.config.llama import LlamaConfig
from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import embedding
from llmcli.kernels.replay import Replay, base_addresses, likeness
from llmcli.runners.base import AllLogits
from llmcli.runners.cuda.plan.memory import MemoryPlan
from llmcli.runners.cuda.plan.weight_layout import Weights, qkv_layout
from llmcli.runners.cuda.plan.workspace import LOGIT_ROWS, MOST_ALONE, Cache, Workspace
from llmcli.runners.cuda.step.activations import Activations
from llmcli.runners.cuda.step.arena import copy, fetch
from llmcli.runners.cuda.step.attention import Attention, CachedLayer, KvCache
from llmcli.runners.cuda.step.batch import Batch
from llmcli.runners.cuda.step.products import Products

# Passes whose launches are kept: all lengths of short prompts. Each takes 20 KB of host memory, 70 with 16 parts.
_MOST_KEPT_PASSES = 256


class Forward:
    """The model's computation over one KV cache and one workspace, for one caller at a time.

    Attributes: hidden float32 [chunk_tokens, hidden_size], the outputs of the latest tokens; `outputs_of` has those of
    a long prompt
    """

    def __init__(
        self, device: Device, plan: MemoryPlan, weights: Weights[Any], cache: Cache[Any], workspace: Workspace[Any]
    ):
        self.device = device
        self.config: LlamaConfig = plan.stored.config
        self.chunk_tokens = plan.chunk_tokens
        self.hidden = workspace.hidden
        self._weights = weights
        self._cache = KvCache(cache)
        self._workspace = workspace
        self._layers = self._find_layers()
        self._attention = Attention(device, self.config, workspace, weights.cos_sin, cache.keys.dtype)
        self._replays_of = functools.lru_cache(_MOST_KEPT_PASSES)(_no_replays)
        self._alone: tuple[int, ...] | None = None  # the tokens whose outputs `hidden` has, if not all
        # Keep the views: cutting them takes the host a tenth of a millisecond. The function must not refer to `self`,
        # or a dropped runner would keep its memory until Python's collector runs.
        qkv_width = qkv_layout(self.config).width
        self._activations = functools.lru_cache(_MOST_KEPT_PASSES)(
            lambda count, is_alone=False: Activations(
                workspace, (workspace.alone_hidden if is_alone else workspace.hidden)[:count], qkv_width
            )
        )

    def run(self, batch: Batch, needed: Sequence[int] | None = None) -> None:
        """Run a batch; leave the last layer's outputs in `hidden`.

        `needed`: the indices, in order, of a prompt's tokens whose outputs will be read; those of a row are adjacent.
        None for all. The last layer of a long prompt runs for these alone where that changes no bits.
        Kernels read each lane's row and position on the card, so the same launches serve every step.
        """
        self._alone = None
        if needed is not None and not batch.in_chunks and len(needed) <= min(MOST_ALONE, len(batch.rows) - 1):
            self._alone = tuple(needed)
        for _ in self._pass(batch, self._alone):
            pass

    def by_layer(self, batch: Batch) -> Iterator[Any]:
        """Do what `run` does. Yield `hidden` of all tokens as the embedding leaves it, then as each layer does.

        Shapes: float32 [num_tokens, hidden_size]
        """
        self._alone = None
        return self._pass(batch, None, leaves=False)

    def _pass(self, batch: Batch, alone: tuple[int, ...] | None, *, leaves: bool = True) -> Iterator[Any]:
        """Run all layers; yield `hidden` before the first one and after each. `leaves`: see `_layer`.

        With `alone` the last layer runs for these tokens only. The others give it keys and values, which later tokens
        see; their outputs are not needed.
        """
        own = to = self._activations(len(batch.rows))
        arrays = batch.token_ids, batch.rows, batch.positions, batch.page_table
        others = len(batch.rows), batch.num_rows, batch.slices, batch.in_chunks, leaves
        replays = self._replays_of(self.device.uses_own, *base_addresses(arrays), *others)
        rows = batch.rows if batch.by_row else None
        tokens = {"table": self._weights.embed_tokens, "token_ids": batch.token_ids, "rows": rows}
        self._start(replays, None, lambda: embedding(self.device, **tokens, out=own.hidden))
        yield own.hidden
        for layer in self._layers:
            key: Hashable = layer.kind
            if alone is not None and layer.following is None:
                key, batch, to = (layer.kind, alone), batch.only(alone), self._activations(len(alone), is_alone=True)
                for row, place in zip(to.hidden, alone, strict=True):
                    copy(self.device, row, own.hidden[place])
            run = functools.partial(self._layer, layer, batch, own, to, leaves)
            self._start(replays, key, run, layer.arrays, layer.addresses)
            yield own.hidden

    def _layer(self, layer: CachedLayer, batch: Batch, own: Activations, to: Activations, leaves: bool) -> None:
        """Run a layer. After keys and values, which all tokens get, only the tokens of `to` go on.

        With `leaves` some sums, and rows for the next product, are left to the following layer.
        """
        weights = layer.weights
        before, following = (layer.before, layer.following) if leaves else (None, None)
        products = self._products_of(own, batch.in_chunks)
        left = products.qkv(weights, before)
        is_image = self._attention.attend(layer, batch, own, to, left, takes_image=products.takes_wide(weights.o))
        if to.count > 0:
            self._products_of(to, batch.in_chunks).rest(weights, following, is_image=is_image)

    def _start(
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

    def _products_of(self, activations: Activations, in_chunks: bool = True) -> Products:
        return Products(self.device, activations, self.config.rms_norm_eps, in_chunks)

    def forget_passes(self) -> None:
        """Forget the kept launches. In a dry run their costs also depend on the values assumed of arrays."""
        self._replays_of.cache_clear()

    def project_logits(self, hidden: Any, logits: Any) -> None:
        """Compute logits from `hidden`. Shapes: hidden float32 [n, hidden_size]; logits float32 [n, vocab_size]."""
        products = self._products_of(self._activations(len(hidden)))
        products.head(self._weights.head, self._weights.norm, hidden, logits)

    def outputs_of(self, places: Sequence[int]) -> Any:
        """The outputs of these tokens of the latest run: adjacent rows, or copies.

        Shapes: result float32 [len(places), hidden_size]
        """
        hidden = self.hidden
        if self._alone is not None:
            hidden, places = self._workspace.alone_hidden, [self._alone.index(place) for place in places]
        if places[-1] - places[0] == len(places) - 1:
            return hidden[places[0] : places[-1] + 1]
        rows = self._workspace.outputs[: len(places) * self.config.hidden_size].reshape(len(places), -1)
        for row, place in zip(rows, places, strict=True):
            copy(self.device, row, hidden[place])
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
            before = self._weights.layers[index - 1] if index else None
            following = self._weights.layers[index + 1] if index + 1 < len(self._weights.layers) else None
            arrays = (*weights.arrays, *cache.arrays, *(() if following is None else (following.input_layernorm,)))
            # A layer's neighbours decide what it finds, and what it leaves.
            kind = kinds.setdefault(tuple(map(launched, (index - 1, index, index + 1))), len(kinds))
            layers.append(CachedLayer(index, weights, before, following, cache, kind, arrays, base_addresses(arrays)))
        return layers


def _no_replays(*key: Hashable) -> dict[Hashable, Replay]:
    """The replays of a pass, one for each kind of layer, to extend. `key` is everything that decides its launches."""
    return {}
