"""The products of a layer for some rows of activations. The kernel is chosen by speed alone.

Up to 8 rows are multiplied by gemv, more of them on Hopper by gemm_narrow and gemm_wide. All give a row the same bits:
the matrix decides into how many chunks its inputs are cut, and how weights are rounded; the row, how it is rounded.
Long prompts have their inputs in one chunk, since the sums of chunks would have to be written and added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcli.kernels.chunks import num_chunks
from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import add_parts, gather_columns, swiglu
from llmcli.kernels.gemm_wide import gemm_wide, gemm_wide_swiglu
from llmcli.kernels.gemv import MAX_ROWS, Epilogue, gemv
from llmcli.kernels.stage_wide import stage_wide
from llmcli.runners.cuda.activations import Activations
from llmcli.runners.cuda.weight_layout import LayerWeights, Projection, is_wide


@dataclass(frozen=True)
class Rows:
    """Rows of activations: float32, normed where there is a weight; or float16, times `scales`.

    Shapes: x [num_rows, num_inputs]; norm, ordered_norm float32 [num_inputs]; scales float32 [num_rows]
    """

    x: Any
    norm: Any | None = None
    scales: Any | None = None


@dataclass(frozen=True)
class RowProducts:
    """Products of the rows of `activations`. With `in_chunks` they have the bits of any other number of rows."""

    device: Device
    activations: Activations
    eps: float
    in_chunks: bool = True

    def takes_wide(self, *parts: Projection[Any]) -> bool:
        """Whether gemm_wide multiplies these matrices."""
        return is_wide(self.device, parts) and (self.activations.count > MAX_ROWS or not self.in_chunks)

    def qkv(self, layer: LayerWeights[Any], left: Any | None = None) -> Any | None:
        """Compute `qkv`; return the partial sums still to be added to it, or None.

        `left` are the partial sums that the layer before has left (`left_by`).
        Shapes: left float32 [parts, num_tokens, hidden_size]; result float32 [parts, num_tokens, width of qkv]
        """
        normed = Rows(self.activations.hidden, layer.input_layernorm)
        if len(layer.qkv) == 1:
            return self._multiply(layer.qkv[0], normed, self.activations.qkv, left=left)
        self._finish(left, normed.x)
        for part in layer.qkv:
            multiply = self.few if self.in_chunks else self._multiply  # partial sums of columns have no place
            multiply(part, normed, self.activations.qkv_of(part), "store")
        return None

    def rest(self, layer: LayerWeights[Any], *, is_image: bool = False) -> None:
        """Run the part of the layer after attention. Its input is `mixed`, or with `is_image` its image.

        `left_by` returns the partial sums that this layer leaves to the next.
        """
        hidden, own = self.activations.hidden, self.activations
        if is_image:
            left = self._wide(layer.o, own.image, own.unit_scale, hidden, "add")
        else:
            left = self._multiply(layer.o, Rows(own.mixed), hidden, "add")
        normed = Rows(hidden, layer.post_attention_layernorm)
        if self.takes_wide(layer.gate_up, layer.down):
            self._stage_image(layer.gate_up, normed, left)
            gemm_wide_swiglu(
                self.device,
                matrix=layer.gate_up.matrix,
                bias=layer.gate_up.bias,
                image=own.image,
                row_scales=own.row_scale,
                down=layer.down.layout,
                out=own.gated_image,
            )
            self._wide(layer.down, own.gated_image, own.gated_unit, hidden, "add")
            return
        self._finish(left, hidden)
        gates_floats, takes_floats = (one.layout.weight_type == "float32" for one in (layer.gate_up, layer.down))
        if takes_floats and not gates_floats:  # gemv's would be fp16
            gate_up, gated = own.outputs(layer.gate_up.num_rows), own.inputs(layer.down)
            self.few(layer.gate_up, normed, gate_up, "store")
            swiglu(self.device, gate_up=gate_up, row_scale=own.unit_scale, out=gated, out_scale=own.gated_scale)
        else:
            gated = own.gated(gates_floats, layer.down.layout.num_inputs)
            self.few(layer.gate_up, normed, gated, "swiglu")
        self.few(layer.down, Rows(gated, scales=None if gated.dtype == np.float32 else own.gated_unit), hidden, "add")

    def left_by(self, layer: LayerWeights[Any]) -> Any | None:
        """The partial sums of a layer's last product still to be added to `hidden`, or None.

        Shapes: result float32 [parts, num_tokens, hidden_size]
        """
        return self._others(layer.down) if self.takes_wide(layer.gate_up, layer.down) else None

    def head(self, head: Projection[Any], norm: Any, hidden: Any, logits: Any) -> None:
        """Compute logits from `hidden`. Shapes: hidden float32 [n, hidden_size]; logits float32 [n, vocab_size]"""
        self._finish(self._multiply(head, Rows(hidden, norm), logits), logits)

    def _multiply(
        self,
        part: Projection[Any],
        rows: Rows,
        out: Any,
        epilogue: Epilogue = "store",
        *,
        left: Any | None = None,
    ) -> Any | None:
        """Write a product, or add it; return the partial sums still to be added."""
        if self.takes_wide(part):
            self._stage_image(part, rows, left)
            return self._wide(part, self.activations.image, self.activations.row_scale, out, epilogue)
        self._finish(left, rows.x)
        self.few(part, rows, out, epilogue)
        return None

    def few(self, part: Projection[Any], rows: Rows, out: Any, epilogue: Epilogue) -> None:
        """Multiply by gemv, eight rows at a time. Several rows are rounded first, one is rounded inside."""
        x, norm, scales = rows.x, rows.norm, rows.scales
        if part.order is not None:
            gathered = self.activations.gathered(x)
            gather_columns(self.device, x=x, order=part.order, out=gathered)
            x, norm = gathered, part.ordered_norm if norm is not None else None
        is_float = part.layout.weight_type == "float32"
        if not is_float and x.dtype == np.float32 and (len(x) > 1 or x.shape[1] % 8):
            staged, scales = self.activations.rows(x.shape[1], len(x)), self.activations.row_scale[: len(x)]
            stage_wide(self.device, x=x, unit_inputs=0, out=staged, row_scales=scales, norm_weight=norm, eps=self.eps)
            x, norm = staged[:, : x.shape[1]], None
        gemv(
            self.device,
            matrix=part.matrix,
            x=x,
            out=out,
            row_scales=scales,
            norm_weight=norm,
            eps=self.eps,
            bias=part.bias,
            epilogue=epilogue,
        )

    def _wide(self, part: Projection[Any], image: Any, scales: Any, out: Any, epilogue: Epilogue) -> Any | None:
        others, to = self._others(part), {"out": out, "epilogue": epilogue}
        rows = {"image": image, "row_scales": scales[: len(out)]}
        gemm_wide(self.device, matrix=part.matrix, bias=part.bias, **rows, others=others, **to)
        return others

    def _stage_image(self, part: Projection[Any], rows: Rows, left: Any | None) -> None:
        stage_wide(
            self.device,
            x=rows.x,
            unit_inputs=part.layout.unit_inputs,
            out=self.activations.image,
            row_scales=self.activations.row_scale[: len(rows.x)],
            norm_weight=rows.norm,
            eps=self.eps,
            parts=left,
        )

    def _others(self, part: Projection[Any]) -> Any | None:
        others = num_chunks(part.layout) - 1 if self.in_chunks else 0
        return self.activations.others(others, part.num_rows) if others else None

    def _finish(self, left: Any | None, out: Any) -> None:
        """Add partial sums, if any."""
        if left is not None:
            add_parts(self.device, parts=left, out=out)
