"""How long a model takes on a card, from the bytes and operations of every launch. Nothing here needs CuPy.

All constants that are neither bytes nor measured in the same process stand here and, those of decoding, in
decode_card.py, each with its source.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from llmcli.kernels.attention_prefill import attention_prefill_cost
from llmcli.kernels.card_facts import TYPICAL_CARD, CardFacts
from llmcli.kernels.cublas import matmul_cost
from llmcli.kernels.dequantize import dequantize_cost
from llmcli.kernels.embedding import embedding_cost
from llmcli.kernels.gemm_packed import gemm_packed_cost
from llmcli.kernels.head_norm import head_norm_cost
from llmcli.kernels.kv_append import kv_append_cost
from llmcli.kernels.qkv import cached_bytes
from llmcli.kernels.residual_add import residual_add_cost
from llmcli.kernels.rms_norm import rms_norm_cost
from llmcli.kernels.rotary import rotary_cost
from llmcli.kernels.round_rows import round_rows_cost
from llmcli.kernels.scale_bias import scale_bias_cost
from llmcli.kernels.spec import KernelCost
from llmcli.kernels.swiglu import swiglu_cost
from llmcli.kernels.tiles import TILE_ROWS
from llmcli.runners.cuda.decode_card import STEP_SECONDS, DecodeCard
from llmcli.runners.cuda.memory import MemoryPlan
from llmcli.runners.cuda.products import way_of
from llmcli.runners.cuda.regions import ARRAY_DTYPES
from llmcli.runners.cuda.weight_layout import LayerWeights, Projection, Space, qkv_layout
from llmcli.runners.cuda.workspace import MAX_BATCH, WIDENED_BYTES, tiles_at_a_time

# Shares of the measured rates that kernels of prefill reach, on one H200 (docs/performance.md): of the matrix library's
# large product; of reading, where few tokens wait for their weights, and where codes are widened or multiplied packed.
MATMUL_SHARE = 0.93
MATMUL_READ_SHARE = 0.7
WIDEN_READ_SHARES = {"int8": 0.65, "int4": 0.34}
PACKED_SHARE = 0.16
PACKED_READ_SHARES = {"int8": 0.46, "int4": 0.28}
ATTENTION_SHARE = 0.35
# A kernel's own start and end.
KERNEL_SECONDS = 3e-6
# What the host does while the card waits, in launches that are started again: one that is new is checked and planned
# first (6 to 9 times as long), a chunk's tokens are sent and its arrays cut. Fitted to prompts of 40 to 2,048 tokens
# through ten models on three hosts, of which those of 1B models and less differ by 20 % from one process to the next.
NEW_LAUNCH, CHUNK_LAUNCHES = 7, 60
# From asking for a token to having it, beside the kernel that samples it: what is sent to the card, one graph launch.
FIRST_TOKEN_SECONDS = 150e-6


@dataclass(frozen=True)
class Rates:
    """What a card and its host reach, measured or as the maker says; without products' rates no prefill is predicted.

    Units: bytes and floating-point operations a second; `flops` by the type of the factors, as config.json names it;
    `launch_seconds` the host takes to start again what it has launched for a layer before
    """

    read_bytes: float
    flops: Mapping[str, float]
    launch_seconds: float = 0.0


@dataclass(frozen=True)
class Launch:
    """One kernel: what it moves and computes, and the rate at which it computes, if that may be what takes long."""

    cost: KernelCost
    flops_per_second: float | None = None
    read_share: float = 1.0
    is_overlapped: bool = True  # moving and computing

    def seconds(self, read_bytes_per_second: float) -> float:
        """Moving and computing, with the kernel's own start and end."""
        moving = (self.cost.read_bytes + self.cost.written_bytes) / (self.read_share * read_bytes_per_second)
        computing = self.cost.flops / self.flops_per_second if self.flops_per_second else 0.0
        return (max(moving, computing) if self.is_overlapped else moving + computing) + KERNEL_SECONDS


class CardPredictor:
    """Times of a model that is laid out as `plan` on a card of these rates."""

    def __init__(
        self,
        plan: MemoryPlan,
        rates: Rates,
        card: CardFacts = TYPICAL_CARD,
    ):
        self._plan = plan
        self._rates = rates
        self._card = DecodeCard(rates.read_bytes, card)
        self._config = plan.stored.config
        self._qkv = qkv_layout(self._config)
        self._itemsize = ARRAY_DTYPES[plan.stored.cache_type].itemsize
        self._embedding_itemsize = ARRAY_DTYPES[plan.stored.embedding_type].itemsize

    def decode_bytes(self, depth: int, num_rows: int = 1) -> int:
        """Bytes that one step reads for `num_rows` rows of `depth` tokens each: weights, keys and values."""
        config = self._config
        total = num_rows * config.hidden_size * self._embedding_itemsize
        total += 4 * config.hidden_size * (2 * config.num_hidden_layers + 1)  # norms
        for matrix in self._plan.weights.projections:
            passes = len(self._card.gemv_plans(matrix.layout, num_rows))
            bias_bytes = 4 * matrix.layout.padded_rows if matrix.bias is not None else 0
            total += passes * (matrix.layout.num_bytes + bias_bytes)
        return total + num_rows * sum(self._cache_bytes(depth))

    def decode_seconds(self, depth: int, num_rows: int = 1) -> float:
        """One step of `num_rows` rows of `depth` tokens each."""
        has_codes = self._plan.stored.cache_type == "int8"
        return (
            STEP_SECONDS
            + sum(self._card.gemv_seconds(matrix.layout, num_rows) for matrix in self._plan.weights.projections)
            + sum(self._card.attention_seconds(of_layer, num_rows, has_codes) for of_layer in self._cache_bytes(depth))
        )

    def decode_kernels(self, num_rows: int = 1) -> int:
        """Kernels of one step."""
        num_products = sum(
            len(self._card.gemv_plans(matrix.layout, num_rows)) for matrix in self._plan.weights.projections
        )
        return num_products + self._config.num_hidden_layers + 2  # attention; embedding and sampling

    def prefill_seconds(self, num_tokens: int) -> float | None:
        """The logits after a prompt."""
        if not self._rates.flops:
            return None
        chunk = self._plan.chunk_tokens
        begins = range(0, num_tokens, chunk)
        return (
            sum(self._chunk_seconds(min(chunk, num_tokens - begin), begin) for begin in begins) + self._head_seconds()
        )

    def first_token_seconds(self, num_tokens: int) -> float | None:
        """A prompt and the first token after it."""
        prefill = self.prefill_seconds(num_tokens)
        return None if prefill is None else prefill + FIRST_TOKEN_SECONDS

    def _chunk_seconds(self, count: int, start: int) -> float:
        if count <= MAX_BATCH:
            return self.decode_seconds(start + count, count) - self._head_seconds()
        launches = self.chunk_launches(count, start)
        computing = sum(launch.seconds(self._rates.read_bytes) for launch in launches)
        num_new, seconds = self.new_launches(count), self._rates.launch_seconds
        waiting = (CHUNK_LAUNCHES + NEW_LAUNCH * num_new) * seconds
        return waiting + max(computing, (len(launches) - num_new) * seconds)

    def chunk_launches(self, count: int, start: int) -> list[Launch]:
        """The kernels of a chunk of more than 8 tokens from position `start` on, without the head's."""
        embedding = embedding_cost(
            num_tokens=count, hidden_size=self._config.hidden_size, itemsize=self._embedding_itemsize
        )
        launches = [Launch(embedding)]
        for index, layer in enumerate(self._plan.weights.layers):
            launches += self._layer(index, layer, count, start)
        return launches

    def new_launches(self, count: int) -> int:
        """Launches of a chunk that no layer before has made alike."""
        traits, layers = self._config.traits, self._plan.weights.layers
        firsts: dict[Hashable, int] = {}
        for index, layer in enumerate(layers):
            kind = (
                *(matrix.layout for matrix in layer.projections),
                traits.uses_rope[index],
                traits.sliding_windows[index],
            )
            firsts.setdefault(kind, index)
        return 1 + sum(len(list(self._layer(index, layers[index], count, 0))) for index in firsts.values())

    def _head_seconds(self) -> float:
        return self._card.gemv_seconds(self._plan.weights.head.layout, 1)

    def _layer(self, index: int, layer: LayerWeights[Space], count: int, start: int) -> Iterator[Launch]:
        """The launches of one layer for a chunk of a prompt, as `Forward` makes them."""
        config, qkv = self._config, self._qkv
        itemsize = ARRAY_DTYPES[layer.o.format.activation_type].itemsize
        hidden = config.hidden_size
        norm = rms_norm_cost(num_rows=count, num_columns=hidden, itemsize=itemsize)
        for matrix in layer.qkv:
            yield Launch(norm)
            yield from self._product(matrix, count)
            if matrix.needs_finish:
                has_bias = matrix.bias is not None
                yield Launch(scale_bias_cost(num_rows=count, num_columns=matrix.num_rows, has_bias=has_bias))
        yield from self._attention(index, count, start)
        yield Launch(round_rows_cost(num_rows=count, num_columns=qkv.q_size, itemsize=itemsize))
        yield from self._product(layer.o, count)
        add = residual_add_cost(num_rows=count, num_columns=hidden, has_bias=layer.o.bias is not None)
        yield Launch(add)
        yield Launch(norm)
        yield from self._product(layer.gate_up, count)
        if layer.gate_up.bias is not None:
            width = layer.gate_up.layout.num_rows
            yield Launch(scale_bias_cost(num_rows=count, num_columns=width, has_bias=True))
        yield Launch(swiglu_cost(num_rows=count, num_columns=config.intermediate_size, itemsize=itemsize))
        yield from self._product(layer.down, count)
        yield Launch(add)

    def _attention(self, index: int, count: int, start: int) -> Iterator[Launch]:
        config, qkv = self._config, self._qkv
        if config.traits.qk_norm:
            for num_heads in (qkv.num_attention_heads, qkv.num_key_value_heads):
                yield Launch(head_norm_cost(num_rows=count, num_heads=num_heads, head_dim=qkv.head_dim))
        if config.traits.uses_rope[index]:
            yield Launch(rotary_cost(count, qkv))
        yield Launch(kv_append_cost(count, qkv, self._itemsize))
        window = config.traits.sliding_windows[index]
        cost = attention_prefill_cost(count, start, qkv, self._itemsize, window)
        yield Launch(cost, ATTENTION_SHARE * self._flops(self._plan.stored.attention_type))

    def _product(self, matrix: Projection[Space], count: int) -> Iterator[Launch]:
        layout, kind = matrix.layout, matrix.format.activation_type
        if way_of(layout, count) == "packed":
            cost = gemm_packed_cost(layout=layout, num_tokens=count)
            share = PACKED_READ_SHARES[layout.weight_type]
            yield Launch(cost, PACKED_SHARE * self._flops(kind), share, is_overlapped=False)
            return
        itemsize = ARRAY_DTYPES[kind].itemsize
        step = tiles_at_a_time(layout, itemsize, WIDENED_BYTES)
        for first in range(0, layout.num_tiles, step):
            tiles = min(step, layout.num_tiles - first)
            widening = dequantize_cost(layout=layout, num_tiles=tiles)
            yield Launch(widening, read_share=WIDEN_READ_SHARES.get(layout.weight_type, 1.0))
            rows = tiles * TILE_ROWS
            cost = matmul_cost(num_tokens=count, num_rows=rows, num_inputs=layout.num_inputs, itemsize=itemsize)
            yield Launch(cost, MATMUL_SHARE * self._flops(kind), MATMUL_READ_SHARE)

    def _flops(self, kind: str) -> float:
        flops = self._rates.flops
        return flops[kind] if kind in flops else max(flops.values())

    def _cache_bytes(self, depth: int) -> list[int]:
        """Keys and values that a token reads after `depth` others, in each layer."""
        per_token = 2 * cached_bytes(self._qkv, self._itemsize)
        return [per_token * min(depth, window or depth) for window in self._config.traits.sliding_windows]
