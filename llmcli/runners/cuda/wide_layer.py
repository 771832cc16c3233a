"""A layer of many tokens in products that widen weights themselves, on Hopper: no widened weights are stored."""

from collections.abc import Iterable
from typing import Any

from llmcli.kernels.device import Device
from llmcli.kernels.gemm_codes import takes as takes_codes
from llmcli.kernels.gemm_wide import gemm_wide, gemm_wide_swiglu
from llmcli.kernels.stage_wide import stage_wide
from llmcli.kernels.wide_plan import parts_of
from llmcli.runners.base import MOST_EXACT_ROWS
from llmcli.runners.cuda.activations import Activations
from llmcli.runners.cuda.weight_layout import LayerWeights, Projection

# Up to this many rows gemm_codes multiplies int4 as fast as gemm_narrow does (docs/log/2026-11-27-wide.md).
_MOST_EXACT_ROWS_OF_INT4 = 16


def most_exact_lanes(projections: Iterable[Projection[Any]]) -> int:
    """Return the largest number of lanes that keep the bits of single rows where speed comes first.

    With so few lanes the products of prompts are not faster.
    """
    is_fast = any(one.layout.weight_type == "int4" and takes_codes(one.layout) for one in projections)
    return _MOST_EXACT_ROWS_OF_INT4 if is_fast else MOST_EXACT_ROWS


def run_wide_qkv(
    device: Device,
    layer: LayerWeights[Any],
    activations: Activations,
    eps: float,
    *,
    parts_for: int | None = None,
    left: Any | None = None,
) -> Any | None:
    """Compute `qkv`; return the partial sums still to be added to it, or None.

    Inputs of products are rounded to fp16, with one scale a row.
    With `parts_for` products are cut into parts of the inputs, the parts that `parts_of` gives for that many tokens.
    The next rounding adds them up; `left` are the partial sums of the layer before.
    Shapes: left float32 [parts, num_tokens, hidden_size]; result float32 [parts, num_tokens, width of qkv]
    """
    norm = {"norm_weight": layer.input_layernorm, "eps": eps}
    rest = _others(device, layer.qkv[0], activations, parts_for) if len(layer.qkv) == 1 else None
    for number, part in enumerate(layer.qkv):
        _stage(device, part, activations, activations.hidden, **norm, parts=None if number else left)
        rows = {"image": activations.image, "row_scales": activations.row_scale}
        gemm_wide(device, **_of(part), **rows, out=activations.qkv_of(part), others=rest)
    return rest


def run_wide_rest(
    device: Device,
    layer: LayerWeights[Any],
    activations: Activations,
    eps: float,
    *,
    is_staged: bool,
    parts_for: int | None = None,
) -> None:
    """Run the part of the layer after attention. Its input is `mixed`, or with `is_staged` its image with scales of 1.

    `parts_for`: see `run_wide_qkv`. `left_by` returns the partial sums that this layer leaves to the next.
    """
    hidden, row_scales = activations.hidden, activations.row_scale
    if not is_staged:
        _stage(device, layer.o, activations, activations.mixed)
    rest, scales = _others(device, layer.o, activations, parts_for), activations.unit_scale if is_staged else row_scales
    common = {"out": hidden, "epilogue": "add"}
    gemm_wide(device, **_of(layer.o), image=activations.image, row_scales=scales, others=rest, **common)

    norm = {"norm_weight": layer.post_attention_layernorm, "eps": eps}
    _stage(device, layer.gate_up, activations, hidden, **norm, largest=activations.largest, parts=rest)
    gemm_wide_swiglu(
        device,
        **_of(layer.gate_up),
        image=activations.image,
        row_scales=row_scales,
        down=layer.down.layout,
        out=activations.gated_image,
        out_scales=activations.gated_scale,
        largest=activations.largest,
    )
    rest = _others(device, layer.down, activations, parts_for)
    image, scales = activations.gated_image, activations.gated_scale
    gemm_wide(device, **_of(layer.down), image=image, row_scales=scales, others=rest, **common)


def left_by(device: Device, layer: LayerWeights[Any], activations: Activations, parts_for: int | None) -> Any | None:
    """The partial sums of `run_wide_rest` of this layer still to be added to `hidden`, or None.

    Shapes: result float32 [parts, num_tokens, hidden_size]
    """
    return _others(device, layer.down, activations, parts_for)


def run_wide_head(
    device: Device,
    head: Projection[Any],
    norm: Any,
    eps: float,
    activations: Activations,
    logits: Any,
) -> None:
    """Compute logits of many rows from `hidden`. Shapes: logits float32 [n, vocab_size]"""
    rows = {"image": activations.image, "row_scales": activations.row_scale}
    stage_wide(device, x=activations.hidden, unit_inputs=head.layout.unit_inputs, norm_weight=norm, eps=eps, **rows)
    gemm_wide(device, matrix=head.matrix, out=logits, **rows)


def _stage(device: Device, part: Projection[Any], activations: Activations, x: Any, **options: Any) -> None:
    rows = {"image": activations.image, "row_scales": activations.row_scale}
    stage_wide(device, x=x, unit_inputs=part.layout.unit_inputs, **rows, **options)


def _others(device: Device, part: Projection[Any], activations: Activations, parts_for: int | None) -> Any | None:
    if parts_for is None:
        return None
    num_others = parts_of(part.layout, device.num_multiprocessors, parts_for) - 1
    return activations.others(num_others, part.num_rows) if num_others else None


def _of(part: Projection[Any]) -> dict[str, Any]:
    return {"matrix": part.matrix, "bias": part.bias}
