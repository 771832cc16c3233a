"""The forward pass on the card: a chunk of a prompt, or one token for each of a few rows.

Everything is queued on the device's stream and nothing is allocated. Up to 8 tokens go through the fused products of
decoding, more through matrix products on the tensor cores with one kernel for each operation between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcli.config.llama import LlamaConfig
from llmcli.kernels.attention_decode import attention_decode
from llmcli.kernels.attention_prefill import attention_prefill
from llmcli.kernels.device import Device
from llmcli.kernels.embedding import embedding
from llmcli.kernels.gemv import gemv
from llmcli.kernels.head_norm import head_norm
from llmcli.kernels.kv_append import kv_append
from llmcli.kernels.residual_add import residual_add
from llmcli.kernels.rms_norm import rms_norm
from llmcli.kernels.rotary import rotary
from llmcli.kernels.round_rows import round_rows
from llmcli.kernels.scale_bias import scale_bias
from llmcli.kernels.swiglu import swiglu
from llmcli.runners.base import AllLogits
from llmcli.runners.cuda.arena import Arena, copy_blocks, fetch, send
from llmcli.runners.cuda.memory import LOGIT_ROWS, MAX_BATCH, MemoryPlan, qkv_layout
from llmcli.runners.cuda.products import MAX_PACKED_TOKENS, Products
from llmcli.runners.cuda.weights import LayerWeights, Projection, Weights


@dataclass(frozen=True)
class Tokens:
    """Tokens to be run, on the card. Shapes: each int32 [num_tokens]."""

    token_ids: Any
    rows: Any
    positions: Any

    def first(self, num_tokens: int) -> "Tokens":
        """The first of them."""
        return Tokens(self.token_ids[:num_tokens], self.rows[:num_tokens], self.positions[:num_tokens])


class Forward:
    """The model's computation over one KV cache and one workspace, one caller at a time.

    Attributes: hidden float32 [chunk_tokens, hidden_size], of the tokens run last
    """

    def __init__(
        self, device: Device, plan: MemoryPlan, weights: Weights, cache: Arena, workspace: Arena, products: Products
    ):
        self.device = device
        self.config: LlamaConfig = plan.stored.config
        self.chunk_tokens = plan.chunk_tokens
        self.hidden = workspace["hidden"]
        self._weights = weights
        self._keys, self._values = cache["keys"], cache["values"]
        self._workspace = workspace
        self._products = products
        self._tokens = Tokens(workspace["token_ids"], workspace["rows"], workspace["positions"])
        self._qkv = qkv_layout(self.config)
        self._layers = list(enumerate(weights.layers))

    def run(self, row: int, position: int, token_ids: Sequence[int], logits: Any) -> None:
        """Run tokens of one row from `position` on and append their keys and values to the cache.

        Shapes: logits float32 [vocab_size] on the card, to be filled with those after the last token, or None
        """
        count = len(token_ids)
        tokens = self._tokens.first(count)
        send(self.device, tokens.token_ids, np.asarray(token_ids, np.int32))
        send(self.device, tokens.rows, np.full(count, row, np.int32))
        send(self.device, tokens.positions, np.arange(position, position + count, dtype=np.int32))
        if count == 1:
            self.run_batch(tokens)
        else:
            self._run_chunk(tokens, row, position)
        if logits is not None:
            self.project_logits(self.hidden[count - 1 : count], logits.reshape(1, -1))

    def run_batch(self, tokens: Tokens) -> None:
        """Run one token for each of up to 8 rows; nothing depends on where they stand but what lies on the card.

        The row and position of each are read on the card, so the same launches serve every step.
        """
        count = len(tokens.token_ids)
        embedding(self.device, table=self._weights.embed_tokens, token_ids=tokens.token_ids, out=self.hidden[:count])
        for index, layer in self._layers:

            def attend(qkv: Any, mixed: Any, index: int = index, layer: LayerWeights = layer) -> None:
                self._attend_batch(index, layer, tokens, qkv, mixed)

            self._few_tokens(layer, count, attend)

    def project_logits(self, hidden: Any, logits: Any) -> None:
        """Scores of every vocabulary entry. Shapes: hidden float32 [n, hidden_size]; logits float32 [n, vocab_size]."""
        gemv(
            self.device,
            matrix=self._weights.head.matrix,
            x=hidden,
            out=logits,
            norm_weight=self._weights.norm,
            eps=self.config.rms_norm_eps,
        )

    def logits_of_chunk(self, begin: int, end: int) -> AllLogits:
        """Logits after the tokens begin ... end - 1 of those run last. Shapes: result float32 [n, vocab_size]."""
        parts = []
        for first in range(begin, end, LOGIT_ROWS):
            hidden = self.hidden[first : min(first + LOGIT_ROWS, end)]
            logits = self._workspace["score_logits"][: len(hidden)]
            self.project_logits(hidden, logits)
            parts.append(fetch(self.device, logits))
        return np.concatenate(parts)

    def copy_cache(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the keys and values of a row's first tokens to another row."""
        if num_tokens == 0:
            return
        num_bytes = num_tokens * self.config.head_dim * self._keys.itemsize
        for cache in (self._keys, self._values):
            for layer in cache:
                copy_blocks(self.device, layer[target], layer[source], num_bytes)

    def rehearse(self) -> None:
        """Go through every form of launch once, on a device that launches nothing."""
        uses_rope = self.config.traits.uses_rope
        distinct = {(layer.layouts, uses_rope[index]): (index, layer) for index, layer in self._layers}
        self._layers = list(distinct.values())
        for count in range(1, MAX_BATCH + 1):
            self.run_batch(self._tokens.first(count))
            self.project_logits(self.hidden[:count], self._workspace["score_logits"][:count])
        for count in (*range(2, min(MAX_PACKED_TOKENS + 2, self.chunk_tokens)), self.chunk_tokens):
            self._run_chunk(self._tokens.first(count), 0, 0)

    def _run_chunk(self, tokens: Tokens, row: int, position: int) -> None:
        count = len(tokens.token_ids)
        embedding(self.device, table=self._weights.embed_tokens, token_ids=tokens.token_ids, out=self.hidden[:count])
        for index, layer in self._layers:

            def attend(qkv: Any, mixed: Any, index: int = index, layer: LayerWeights = layer) -> None:
                self._attend_chunk(index, layer, tokens, row, position, qkv, mixed)

            if count <= MAX_BATCH:
                self._few_tokens(layer, count, attend)
            else:
                self._many_tokens(layer, count, attend)

    def _few_tokens(self, layer: LayerWeights, count: int, attend: Callable[[Any, Any], None]) -> None:
        """One layer in four products, which take norms, biases, SwiGLU and residual additions with them."""
        device, eps = self.device, self.config.rms_norm_eps
        hidden, gated = self.hidden[:count], self._workspace["gated"][:count]
        qkv, mixed = self._outputs(count, self._qkv.width), self._workspace["mixed"][:count]
        for part in layer.qkv:
            gemv(
                device,
                matrix=part.matrix,
                x=hidden,
                out=part.columns_of(qkv),
                norm_weight=layer.input_layernorm,
                eps=eps,
                bias=part.bias,
            )
        attend(qkv, mixed)
        gemv(device, matrix=layer.o.matrix, x=mixed, out=hidden, bias=layer.o.bias, epilogue="add")
        gemv(
            device,
            matrix=layer.gate_up.matrix,
            x=hidden,
            out=gated,
            norm_weight=layer.post_attention_layernorm,
            eps=eps,
            bias=layer.gate_up.bias,
            epilogue="swiglu",
        )
        gemv(device, matrix=layer.down.matrix, x=gated, out=hidden, bias=layer.down.bias, epilogue="add")

    def _many_tokens(self, layer: LayerWeights, count: int, attend: Callable[[Any, Any], None]) -> None:
        """One layer in products of whole matrices, whose inputs are rounded to 16 bits in rows with a common scale."""
        device, eps = self.device, self.config.rms_norm_eps
        hidden, mixed = self.hidden[:count], self._workspace["mixed"][:count]
        row_scale, gated_scale = self._workspace["row_scale"][:count], self._workspace["gated_scale"][:count]

        qkv = self._outputs(count, self._qkv.width)
        for part in layer.qkv:
            x = self._inputs(part, count)
            rms_norm(device, x=hidden, weight=layer.input_layernorm, eps=eps, out=x, row_scale=row_scale)
            self._products.multiply(part, x, part.columns_of(qkv))
            if part.needs_finish:
                bias = None if part.bias is None else part.bias[: part.num_rows]
                scale_bias(device, x=part.columns_of(qkv), row_scale=row_scale, bias=bias)
        attend(qkv, mixed)

        x = self._inputs(layer.o, count)
        round_rows(device, x=mixed, out=x, row_scale=row_scale)
        self._multiply_and_add(layer.o, x, row_scale, hidden)

        x = self._inputs(layer.gate_up, count)
        rms_norm(device, x=hidden, weight=layer.post_attention_layernorm, eps=eps, out=x, row_scale=row_scale)
        gate_up = self._outputs(count, layer.gate_up.num_rows)
        self._products.multiply(layer.gate_up, x, gate_up)
        if layer.gate_up.bias is not None:
            scale_bias(device, x=gate_up, row_scale=row_scale, bias=layer.gate_up.bias)
            row_scale = self._workspace["unit_scale"][:count]
        x = self._inputs(layer.down, count)
        swiglu(device, gate_up=gate_up, row_scale=row_scale, out=x, out_scale=gated_scale)
        self._multiply_and_add(layer.down, x, gated_scale, hidden)

    def _multiply_and_add(self, projection: Projection, x: Any, row_scale: Any, hidden: Any) -> None:
        product = self._outputs(len(hidden), projection.num_rows)
        self._products.multiply(projection, x, product)
        bias = None if projection.bias is None else projection.bias[: projection.num_rows]
        residual_add(self.device, x=product, row_scale=row_scale, bias=bias, hidden=hidden)

    def _attend_batch(self, index: int, layer: LayerWeights, tokens: Tokens, qkv: Any, mixed: Any) -> None:
        """Norms and rotation of query and key, the cache's new entries and attention in one kernel."""
        traits = self.config.traits
        attention_decode(
            self.device,
            qkv=qkv,
            layout=self._qkv,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self.config.rms_norm_eps,
            cos_sin=self._weights.cos_sin if traits.uses_rope[index] else None,
            rows=tokens.rows,
            positions=tokens.positions,
            keys=self._keys[index],
            values=self._values[index],
            window=traits.sliding_windows[index],
            partials=self._workspace["partials"],
            counters=self._workspace["counters"],
            out=mixed,
        )

    def _attend_chunk(
        self, index: int, layer: LayerWeights, tokens: Tokens, row: int, position: int, qkv: Any, mixed: Any
    ) -> None:
        """The same for tokens of one row, each of which sees those before it."""
        device, layout, traits = self.device, self._qkv, self.config.traits
        keys, values = self._keys[index], self._values[index]
        if layer.q_norm is not None:
            eps = self.config.rms_norm_eps
            head_norm(device, x=qkv[:, : layout.q_size], weight=layer.q_norm, eps=eps)
            head_norm(
                device, x=qkv[:, layout.k_offset : layout.k_offset + layout.kv_size], weight=layer.k_norm, eps=eps
            )
        if traits.uses_rope[index]:
            rotary(device, qkv=qkv, layout=layout, positions=tokens.positions, cos_sin=self._weights.cos_sin)
        kv_append(
            device,
            qkv=qkv,
            layout=layout,
            rows=tokens.rows,
            positions=tokens.positions,
            keys=keys,
            values=values,
        )
        attention_prefill(
            device,
            qkv=qkv,
            layout=layout,
            keys=keys,
            values=values,
            row=row,
            start=position,
            window=traits.sliding_windows[index],
            out=mixed,
        )

    def _outputs(self, count: int, width: int) -> Any:
        """Room for the outputs of a product. Shapes: result float32 [count, width]."""
        return self._workspace["outputs"][: count * width].reshape(count, width)

    def _inputs(self, projection: Projection, count: int) -> Any:
        """Room for the input of a product, in the type it takes. Shapes: result [count, num_inputs]."""
        width, dtype = projection.matrix.layout.num_inputs, projection.activation_dtype
        return self._workspace["inputs"][: count * width * dtype.itemsize].view(dtype).reshape(count, width)
