"""A layer of many tokens in products that widen weights themselves, on Hopper: nothing widened stands in memory."""

from collections.abc import Callable
from typing import Any

from llmcli.kernels.device import Device
from llmcli.kernels.gemm_wide import gemm_wide, gemm_wide_swiglu
from llmcli.kernels.stage_wide import stage_wide
from llmcli.runners.cuda.activations import Activations
from llmcli.runners.cuda.weight_layout import LayerWeights, Projection


def run_wide(
    device: Device, layer: LayerWeights[Any], activations: Activations, eps: float, attend: Callable[[], None]
) -> None:
    """Run a layer; `attend` makes `mixed` of `qkv`. Inputs of products are rounded to fp16, with one scale a row."""
    hidden, row_scales = activations.hidden, activations.row_scale

    def stage(part: Projection[Any], x: Any, norm_weight: Any = None, largest: Any = None) -> None:
        stage_wide(
            device,
            x=x,
            unit_inputs=part.layout.unit_inputs,
            image=activations.image,
            row_scales=row_scales,
            norm_weight=norm_weight,
            eps=eps,
            largest=largest,
        )

    for part in layer.qkv:
        stage(part, hidden, layer.input_layernorm)
        outputs = activations.qkv_of(part)
        gemm_wide(device, **_of(part), image=activations.image, row_scales=row_scales, out=outputs)
    attend()

    stage(layer.o, activations.mixed)
    gemm_wide(device, **_of(layer.o), image=activations.image, row_scales=row_scales, out=hidden, epilogue="add")

    stage(layer.gate_up, hidden, layer.post_attention_layernorm, activations.largest)
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
    gemm_wide(
        device,
        **_of(layer.down),
        image=activations.gated_image,
        row_scales=activations.gated_scale,
        out=hidden,
        epilogue="add",
    )


def _of(part: Projection[Any]) -> dict[str, Any]:
    return {"matrix": part.matrix, "bias": part.bias}
