"""How a run on the CPU is told to the user."""

from llmcli.checkpoint.model import Model


def describe(model: Model, dtype: str) -> str:
    """What is computed in what, for the user: `int4 weights, bfloat16`, or the type alone where weights have it too."""
    bits = sorted({layer.scheme.num_bits for layer in model.tensors.packed.values()})
    return f"{' and '.join(f'int{count}' for count in bits)} weights, {dtype}" if bits else dtype
