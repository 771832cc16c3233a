"""The products of a layer.

The kernel is chosen by speed alone. Up to 8 rows are multiplied by gemv, more of them by gemm_narrow, gemm_wide or
gemm_mma; weights of 32 bits always by gemv_float. All give a row the same bits: the matrix decides into how many chunks
its inputs are cut, and how weights are rounded; the row, how it is rounded. Long prompts have their inputs in one
chunk, since the sums of chunks would have to be written and added.

A product of few rows that adds to `hidden` also writes what the next product takes (`_leads`): that saves a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcli.kernels.chunks import num_chunks
from llmcli.kernels.device import Device
from llmcli.kernels.elementwise import add_parts, gather_columns, gather_image
from llmcli.kernels.gemm_wide import gemm_wide, gemm_wide_swiglu
from llmcli.kernels.gemv import MAX_ROWS, Epilogue, NextRows, RowNorm, gemv, gemv_float
from llmcli.kernels.stage_wide import stage_wide
from llmcli.runners.cuda.plan.weight_layout import LayerWeights, Projection, is_wide
from llmcli.runners.cuda.step.activations import Activations


@dataclass(frozen=True)
class Rows:
    """Rows of activations: float32, normed where there is a weight; or float16, times `scales`.

    `is_led`: the product before has written them as this one takes them.
    Shapes: x [num_rows, num_inputs]; norm float32 [num_inputs]; scales float32 [num_rows]
    """

    x: Any
    norm: Any | None = None
    scales: Any | None = None
    is_led: bool = False


@dataclass(frozen=True)
class Products:
    """Products of the rows of `activations`. With `in_chunks` they have the bits of any other number of rows."""

    device: Device
    activations: Activations
    eps: float
    in_chunks: bool = True

    def takes_wide(self, *parts: Projection[Any]) -> bool:
        """Whether these matrices are multiplied with an image."""
        return is_wide(parts) and (self.activations.count > MAX_ROWS or not self.in_chunks)

    def _leads(self, product: Projection[Any], following: Sequence[Projection[Any]]) -> bool:
        """Whether `product`, which adds to `hidden`, also writes what `following` take."""
        return (
            self.activations.count <= MAX_ROWS
            and self.activations.hidden.shape[1] % 8 == 0
            and not product.is_float
            and not any(one.is_float or one.order is not None for one in following)
            and not self.takes_wide(product)
            and not any(self.takes_wide(one) for one in following)
        )

    def qkv(self, layer: LayerWeights[Any], before: LayerWeights[Any] | None = None) -> Any | None:
        """Compute `qkv`; return the partial sums still to be added to it, or None.

        `before`: the layer whose `rest` has run with this one as the `following`, if there is one.
        Shapes: result float32 [parts, num_tokens, width of qkv]
        """
        left, is_led = None, False
        if before is not None:
            left = self._others(before.down) if self.takes_wide(before.gate_up, before.down) else None
            is_led = self._leads(before.down, layer.qkv)
        normed = Rows(self.activations.hidden, layer.input_layernorm, is_led=is_led)
        if len(layer.qkv) == 1:
            return self._multiply(layer.qkv[0], normed, self.activations.qkv, left=left)
        self._finish(left, normed.x)
        for part in layer.qkv:
            multiply = self._few if self.in_chunks else self._multiply  # partial sums of columns have no place
            multiply(part, normed, self.activations.qkv_of(part), "store")
        return None

    def rest(
        self, layer: LayerWeights[Any], following: LayerWeights[Any] | None = None, *, is_image: bool = False
    ) -> None:
        """Run the part of the layer after attention. Its input is `mixed`, or with `is_image` its image.

        With a `following` layer some sums may be left to it (`qkv`); else all are added to `hidden`.
        """
        hidden, own = self.activations.hidden, self.activations
        is_led = self._leads(layer.o, (layer.gate_up,))
        if is_image:
            left = self._wide(layer.o, own.image, own.unit_scale, hidden, "add")
        elif is_led:
            self._few(layer.o, Rows(own.mixed), hidden, "add", layer.post_attention_layernorm)
            left = None
        else:
            left = self._multiply(layer.o, Rows(own.mixed), hidden, "add")
        normed = Rows(hidden, layer.post_attention_layernorm, is_led=is_led)
        if self.takes_wide(layer.gate_up, layer.down):
            self._stage_image(layer.gate_up, normed, left)
            gemm_wide_swiglu(
                self.device,
                matrix=layer.gate_up.matrix,
                bias=layer.gate_up.bias,
                image=self._in_order(layer.gate_up, own.image),
                row_scales=own.row_scale,
                down=layer.down.layout,
                out=own.gated_image,
            )
            left = self._wide(layer.down, own.gated_image, own.gated_unit, hidden, "add")
            if following is None:
                self._finish(left, hidden)
            return
        self._finish(left, hidden)
        gated = own.gated(layer.gate_up.is_float, layer.down.layout.num_inputs)
        self._few(layer.gate_up, normed, gated, "swiglu")
        rows = Rows(gated, scales=None if gated.dtype == np.float32 else own.gated_unit)
        leads = following is not None and self._leads(layer.down, following.qkv)
        self._few(layer.down, rows, hidden, "add", following.input_layernorm if following and leads else None)

    def head(self, head: Projection[Any], norm: Any, hidden: Any, logits: Any) -> None:
        """Compute logits from `hidden`. Shapes: hidden float32 [n, hidden_size]; logits float32 [n, vocab_size]"""
        self._finish(self._multiply(head, Rows(hidden, norm), logits), logits)

    def _multiply(
        self, part: Projection[Any], rows: Rows, out: Any, epilogue: Epilogue = "store", *, left: Any | None = None
    ) -> Any | None:
        """Write a product, or add it; return the partial sums still to be added."""
        if self.takes_wide(part):
            self._stage_image(part, rows, left)
            return self._wide(part, self.activations.image, self.activations.row_scale, out, epilogue)
        self._finish(left, rows.x)
        self._few(part, rows, out, epilogue)
        return None

    def _few(
        self, part: Projection[Any], rows: Rows, out: Any, epilogue: Epilogue, next_norm: Any | None = None
    ) -> None:
        """Multiply by gemv, eight rows at a time. With `next_norm`, a norm's weights, the product leads."""
        x, scales, own = rows.x, rows.scales, self.activations
        if part.is_float:
            gemv_float(
                self.device,
                matrix=part.matrix,
                x=x,
                out=out,
                row_scales=scales,
                norm_weight=rows.norm,
                eps=self.eps,
                bias=part.bias,
                epilogue=epilogue,
            )
            return
        num_rows, width = x.shape
        staged = own.rows(width, num_rows)
        norm, led = None, None
        if rows.is_led:
            norm = RowNorm(own.norm_sums, x, rows.norm, self.eps)
            x = staged[:, :width]
        elif x.dtype == np.float32 or x.strides[0] % 16:
            scales = own.row_scale[:num_rows]
            stage_wide(
                self.device, x=x, unit_inputs=0, out=staged, row_scales=scales, norm_weight=rows.norm, eps=self.eps
            )
            x = staged[:, :width]
        if part.order is not None:
            gathered = own.gathered_rows(width)
            gather_columns(self.device, x=x, order=part.order, out=gathered)
            x = gathered
        if next_norm is not None:
            next_x = own.rows(out.shape[1], num_rows)[:, : out.shape[1]]
            led = NextRows(next_norm, next_x, own.norm_sums)
        gemv(
            self.device,
            matrix=part.matrix,
            x=x,
            out=out,
            row_scales=scales,
            norm=norm,
            bias=part.bias,
            epilogue=epilogue,
            next_rows=led,
        )

    def _wide(self, part: Projection[Any], image: Any, scales: Any, out: Any, epilogue: Epilogue) -> Any | None:
        others, to = self._others(part), {"out": out, "epilogue": epilogue}
        rows = {"image": self._in_order(part, image), "row_scales": scales[: len(out)]}
        gemm_wide(self.device, matrix=part.matrix, bias=part.bias, **rows, others=others, **to)
        return others

    def _in_order(self, part: Projection[Any], image: Any) -> Any:
        """The image with its columns in the order of a matrix."""
        if part.order is None:
            return image
        unit_inputs, rows, out = part.layout.unit_inputs, self.activations.count, self.activations.gathered
        gather_image(self.device, image=image, order=part.order, unit_inputs=unit_inputs, rows=rows, out=out)
        return out

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
