"""`WeightScheme` and `Fp8Scheme`: how the weights of one linear layer become integers, and their size in bytes.

Stored integers are called codes and are unsigned, as in the format: code = q + offset. A weight is
(code - zero_point) * scale; in a symmetric scheme the zero point is the offset.
"""

from collections.abc import Mapping
from dataclasses import dataclass

PACKED_ITEMSIZE = 4  # codes and zero points are packed into int32


@dataclass(frozen=True)
class WeightScheme:
    """Integers of `num_bits` with one scale per row (`group_size` None: channel) or per `group_size` inputs of a row.

    Ranges of q: int8 symmetric -127..127, so that negation is exact; int4 symmetric -8..7; int4 asymmetric codes
    0..15 around an integer zero point of each group.
    """

    num_bits: int
    group_size: int | None
    is_symmetric: bool = True

    @property
    def offset(self) -> int:
        """What is added to q to store it: 128 or 8."""
        return 1 << (self.num_bits - 1)

    @property
    def code_range(self) -> tuple[int, int]:
        """The lowest and the highest code of quantized weights."""
        highest = (1 << self.num_bits) - 1
        return (1, highest) if self.num_bits == 8 and self.is_symmetric else (0, highest)

    def divides(self, input_size: int) -> bool:
        """Whether rows of `input_size` weights divide into whole groups."""
        return self.group_size is None or input_size % self.group_size == 0

    def num_groups(self, input_size: int) -> int:
        """Scales per row of `input_size` weights, with a last partial group."""
        return 1 if self.group_size is None else -(-input_size // self.group_size)

    def packed_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of weight_packed, int32, for a weight of `shape` [output_size, input_size]."""
        return shape[0], packed_size(shape[1], self.num_bits)

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of weight_scale for a weight of `shape` [output_size, input_size]."""
        return shape[0], self.num_groups(shape[1])

    def zero_point_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of weight_zero_point, int32 packed along the rows; only asymmetric schemes have one."""
        return packed_size(shape[0], self.num_bits), self.num_groups(shape[1])

    def __str__(self) -> str:
        """For users: `int4, groups of 128, asymmetric`."""
        granularity = "one scale a row" if self.group_size is None else f"groups of {self.group_size}"
        return f"int{self.num_bits}, {granularity}{'' if self.is_symmetric else ', asymmetric'}"


@dataclass(frozen=True)
class Fp8Scheme:
    """8-bit floats (e4m3). Blocks of `block_rows` rows and `block_inputs` inputs share a scale; None is all of them."""

    block_rows: int | None
    block_inputs: int | None

    @property
    def group_size(self) -> int | None:
        """Inputs of a row that share a scale; None is all of them."""
        return self.block_inputs

    @property
    def is_symmetric(self) -> bool:
        """Floats have no zero points."""
        return True

    def num_groups(self, input_size: int) -> int:
        """Scales of a row of `input_size` weights, its own or shared with other rows."""
        return 1 if self.block_inputs is None else -(-input_size // self.block_inputs)

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of the scales for a weight of `shape` [output_size, input_size]; a last block may be smaller."""
        rows = 1 if self.block_rows is None else -(-shape[0] // self.block_rows)
        return rows, 1 if self.block_inputs is None else -(-shape[1] // self.block_inputs)

    def __str__(self) -> str:
        """For users: `fp8, blocks of 128 x 128`."""
        if self.block_rows is None:
            return "fp8, one scale"
        if self.block_inputs is None:
            return "fp8, one scale a row" if self.block_rows == 1 else f"fp8, one scale for {self.block_rows} rows"
        return f"fp8, blocks of {self.block_rows} x {self.block_inputs}"


def packed_size(num_codes: int, num_bits: int) -> int:
    """The int32 that hold `num_codes` codes of 4 or 8 bits."""
    return -(-num_codes * num_bits // (8 * PACKED_ITEMSIZE))


# What vLLM is known to refuse or run slowly in a pack-quantized model, for a warning before an export.
#
# Source: vLLM's model_executor/layers/quantization (compressed_tensors, utils/marlin_utils), read, not run.

# vLLM runs each of these sets as one matrix.
FUSED_LAYERS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
MARLIN_INPUT_MULTIPLE = 128
MARLIN_OUTPUT_MULTIPLE = 64


def vllm_concerns(
    schemes: Mapping[str, WeightScheme | None], shapes: Mapping[str, tuple[int, ...]], head: str
) -> list[str]:
    """One line for each reason why vLLM may not accept a model.

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


# What a user asks of an export, as a value; light, so that the command line can build it at once.

DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ExportOptions:
    """The user's choices. `head_bits` None keeps the output head; `skip` are patterns of layers to keep."""

    scheme: WeightScheme
    head_bits: int | None = None
    skip: tuple[str, ...] = ()
    shard_bytes: int = DEFAULT_SHARD_BYTES
