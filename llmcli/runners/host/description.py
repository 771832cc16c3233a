"""Describes a run on the CPU to the user."""

from llmcli.checkpoint.model import Model


def describe(model: Model, dtype: str) -> str:
    """Name the types of weights and arithmetic: `int4 weights, bfloat16`, or one type if both are the same."""
    types = [f"int{bits}" for bits in sorted({layer.scheme.num_bits for layer in model.tensors.packed.values()})]
    if model.tensors.scaled:
        types.append("fp8")
    return f"{' and '.join(types)} weights, {dtype}" if types else dtype
