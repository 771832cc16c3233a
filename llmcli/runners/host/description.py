"""How a run on the CPU is told to the user."""

from llmcli.checkpoint.model import Model


def describe(model: Model, dtype: str) -> str:
    """What is computed in what, for the user: `int4 weights, bfloat16`, or the type alone where weights have it too."""
    types = [f"int{bits}" for bits in sorted({layer.scheme.num_bits for layer in model.tensors.packed.values()})]
    if model.tensors.scaled:
        types.append("fp8")
    return f"{' and '.join(types)} weights, {dtype}" if types else dtype
