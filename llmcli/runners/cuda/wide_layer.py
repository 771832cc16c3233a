"""A layer of many tokens in products that widen weights themselves, on Hopper: nothing widened stands in memory."""

from collections.abc import Callable
from typing import Any

from llmcli.kernels.device import Device
from llmcli.kernels.gemm_wide import gemm_wide, gemm_wide_swiglu
from llmcli.kernels.stage_wide import stage_wide
from llmcli.kernels.wide_plan import parts_of
from llmcli.runners.cuda.activations import Activations
from llmcli.runners.cuda.weight_layout import LayerWeights, Projection


def run_wide(
    device: Device,
    layer: LayerWeights[Any],
    activations: Activations,
    eps: float,
    attend: Callable[[Any | None], None],
    *,
    attend_stages: bool = False,
    parts_for: int | None = None,
    left: Any | None = None,
) -> None:
    """Run a layer; `attend` makes `mixed` of `qkv`, and of what its product has left in parts, if anything.

    Inputs of products are rounded to fp16, with one scale a row.
    With `attend_stages` it makes their image instead, whose scales are 1.
    With `parts_for` products are cut into parts of the inputs, as `parts_of` has them for so many tokens. The next
    rounding adds the parts up; what this layer leaves to the next is `left_by`. `left` is what the layer before has
    left.
    Shapes: left float32 [parts, num_tokens, hidden_size]
    """
    hidden, row_scales = activations.hidden, activations.row_scale

    def stage(part: Projection[Any], x: Any, norm_weight: Any = None, largest: Any = None, parts: Any = None) -> None:
        stage_wide(
            device,
            x=x,
            unit_inputs=part.layout.unit_inputs,
            image=activations.image,
            row_scales=row_scales,
            norm_weight=norm_weight,
            eps=eps,
            largest=largest,
            parts=parts,
        )

    def others(part: Projection[Any]) -> Any | None:
        return _others(device, part, activations, parts_for)

    rest = others(layer.qkv[0]) if len(layer.qkv) == 1 else None
    for number, part in enumerate(layer.qkv):
        stage(part, hidden, layer.input_layernorm, parts=None if number else left)
        outputs = activations.qkv_of(part)
        gemm_wide(device, **_of(part), image=activations.image, row_scales=row_scales, out=outputs, others=rest)
    attend(rest)

    if not attend_stages:
        stage(layer.o, activations.mixed)
    rest, scales = others(layer.o), activations.unit_scale if attend_stages else row_scales
    common = {"out": hidden, "epilogue": "add"}
    gemm_wide(device, **_of(layer.o), image=activations.image, row_scales=scales, others=rest, **common)

    stage(layer.gate_up, hidden, layer.post_attention_layernorm, activations.largest, parts=rest)
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
    image, scales, rest = activations.gated_image, activations.gated_scale, others(layer.down)
    gemm_wide(device, **_of(layer.down), image=image, row_scales=scales, others=rest, **common)


def left_by(device: Device, layer: LayerWeights[Any], activations: Activations, parts_for: int | None) -> Any | None:
    """What `run_wide` of this layer leaves to be added to `hidden`, if anything.

    Shapes: result float32 [parts, num_tokens, hidden_size]
    """
    return _others(device, layer.down, activations, parts_for)


def run_wide_head(
    device: Device,
    head: Projection[Any],
    norm: Any,
    eps: float,
    activations: Activations,
    hidden: Any,
    logits: Any,
) -> None:
    """Compute logits of many rows. Shapes: hidden float32 [n, hidden_size]; logits float32 [n, vocab_size]"""
    rows = {"image": activations.image, "row_scales": activations.row_scale}
    stage_wide(device, x=hidden, unit_inputs=head.layout.unit_inputs, norm_weight=norm, eps=eps, **rows)
    gemm_wide(device, matrix=head.matrix, out=logits, **rows)


def _others(device: Device, part: Projection[Any], activations: Activations, parts_for: int | None) -> Any | None:
    if parts_for is None:
        return None
    num_others = parts_of(part.layout, device.num_multiprocessors, parts_for) - 1
    return activations.others(num_others, part.num_rows) if num_others else None


def _of(part: Projection[Any]) -> dict[str, Any]:
    return {"matrix": part.matrix, "bias": part.bias}
