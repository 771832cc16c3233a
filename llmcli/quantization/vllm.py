"""What vLLM is known to refuse or run slowly in a pack-quantized model, so that an exporter can say it beforehand.

Source: vLLM's model_executor/layers/quantization (compressed_tensors, utils/marlin_utils), read, not run.
"""

from collections.abc import Mapping

from llmcli.quantization.schemes import WeightScheme

# vLLM runs each of these sets as one matrix.
FUSED_LAYERS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
MARLIN_INPUT_MULTIPLE = 128
MARLIN_OUTPUT_MULTIPLE = 64


def vllm_concerns(
    schemes: Mapping[str, WeightScheme | None], shapes: Mapping[str, tuple[int, ...]], head: str
) -> list[str]:
    """One line for each way in which vLLM may not take a model.

    Shapes: schemes and shapes have one entry per linear layer, by module name; shapes are [output_size, input_size];
    `head` is the name of the output head, which may be missing in both.
    """
    concerns = []
    outputs = {name: shape[0] for name, shape in shapes.items()}  # of the matrix that a layer is part of
    for layers in FUSED_LAYERS:
        prefixes = [name.removesuffix(layers[0]) for name in schemes if name.endswith(layers[0])]
        split = [prefix for prefix in prefixes if len({schemes[prefix + layer] for layer in layers}) > 1]
        for prefix in prefixes:
            fused = [prefix + layer for layer in layers]
            outputs |= dict.fromkeys(fused, sum(shapes[name][0] for name in fused))
        if split:
            names = ", ".join(layer.split(".")[1] for layer in layers)
            concerns.append(
                f"vLLM needs one scheme for {names} of a layer; they differ in {len(split)} of {len(prefixes)} layers, "
                f"first in {split[0].removesuffix('.')}; it will refuse this export"
            )
    quantized = {name: scheme for name, scheme in schemes.items() if scheme is not None}
    odd = [
        name for name in quantized if shapes[name][1] % MARLIN_INPUT_MULTIPLE or outputs[name] % MARLIN_OUTPUT_MULTIPLE
    ]
    if odd:
        concerns.append(
            f"vLLM's fast kernels (Marlin) need multiples of {MARLIN_INPUT_MULTIPLE} inputs and "
            f"{MARLIN_OUTPUT_MULTIPLE} outputs; {len(odd)} of {len(quantized)} layers have other sizes, first {odd[0]} "
            f"{list(shapes[odd[0]])}; it may run them slowly or refuse them"
        )
    if head in quantized:
        concerns.append("vLLM takes a quantized output head only in versions of spring 2026 and later (its PR 37291)")
    if any(not scheme.is_symmetric for scheme in quantized.values()):
        concerns.append("vLLM takes asymmetric weights only in versions of spring 2025 and later (its PR 14211)")
    return concerns
