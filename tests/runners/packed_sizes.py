"""A sweep of sizes through torch's packed operators, to run in a process of its own: a read past the end kills it.

Every tensor of an operator follows bytes of NaN and ends where unreadable memory begins.

    PYTHONPATH=. python tests/runners/packed_sizes.py INPUTS OUTPUTS

Each is a range such as 8-300 or a list such as 16,24: products of all these sizes, for 1 to 5 tokens, against float64.
`8-300 8-300` is the whole of it and takes two minutes; ATEN_CPU_CAPABILITY=avx2 runs it on the operators' other form.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from llmcli.quantization.schemes import WeightScheme
from llmcli.runners.torch import codes_product
from llmcli.runners.torch.packed_linear import WideningProduct, choose_product
from llmcli.runners.torch.weights import PackedWeight

SCHEMES = (
    WeightScheme(8, None),
    WeightScheme(4, None),
    WeightScheme(8, 32),
    WeightScheme(4, 32),
    WeightScheme(4, 96),
    WeightScheme(8, 128),
    WeightScheme(4, 64, is_symmetric=False),
    WeightScheme(4, None, is_symmetric=False),
)
MAX_TOKENS = 5
_REGION_BYTES = 2**20


class GuardedMemory:
    """Memory before a page that may not be read."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _REGION_BYTES + mmap.PAGESIZE)
        self._map.write(b"\xff" * _REGION_BYTES)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        page, size = ctypes.c_void_p(start + _REGION_BYTES), ctypes.c_size_t(mmap.PAGESIZE)
        if ctypes.CDLL(None, use_errno=True).mprotect(page, size, 0):
            raise OSError(ctypes.get_errno(), "mprotect failed")

    def copy_of(self, tensor: Tensor) -> Tensor:
        """The same values in memory that ends at the guard; the earlier copy is overwritten."""
        num_bytes = prod(tensor.shape) * tensor.itemsize
        place = torch.frombuffer(
            self._map, dtype=tensor.dtype, count=prod(tensor.shape), offset=_REGION_BYTES - num_bytes
        )
        return place.view(tensor.shape).copy_(tensor)


def guard_operators() -> None:
    """Take torch's packed operators, and let them see their tensors in guarded memory only."""
    codes_product.is_available = lambda on_compile=None: False

    def guarded(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
        memories = [GuardedMemory() for _ in range(4)]

        def call(*arguments: Tensor | int) -> Tensor:
            return operator(
                *(
                    memory.copy_of(argument) if isinstance(argument, Tensor) else argument
                    for memory, argument in zip(memories, arguments, strict=False)
                )
            )

        return call

    torch._weight_int8pack_mm = guarded(torch._weight_int8pack_mm)
    for name in ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu"):
        setattr(torch.ops.aten, name, guarded(getattr(torch.ops.aten, name)))


def random_weight(scheme: WeightScheme, shape: tuple[int, int], generator: torch.Generator) -> PackedWeight:
    def random_bytes(limit: int, *shape: int) -> Tensor:
        return torch.randint(0, limit, shape, dtype=torch.uint8, generator=generator)

    codes = random_bytes(256, shape[0], 4 * scheme.packed_shape(shape)[1])
    scales = (torch.rand(scheme.scale_shape(shape), generator=generator) + 0.5).to(torch.bfloat16)
    zero_points = None if scheme.is_symmetric else random_bytes(16, *scales.shape)
    return PackedWeight(scheme, shape, codes, scales, zero_points)


def check(scheme: WeightScheme, shape: tuple[int, int], generator: torch.Generator) -> bool:
    """Compare the products of one shape with float64; whether one of torch's packed operators made them."""
    weight = random_weight(scheme, shape, generator)
    product = choose_product(weight, torch.bfloat16)
    if isinstance(product, WideningProduct):
        return False
    x = torch.randn(MAX_TOKENS, shape[1], generator=generator).to(torch.bfloat16).float()
    exact = weight.widened(slice(None)).double()
    expected, magnitude = x.double() @ exact.T, x.double().abs() @ exact.abs().T
    # Results, and zero points times scales, are rounded to bfloat16: 2^-8 of the sum of magnitudes.
    for num_tokens in range(1, MAX_TOKENS + 1):
        error = (product(x[:num_tokens]) - expected[:num_tokens]).abs()
        if not bool((error <= 2**-8 * magnitude[:num_tokens]).all()):
            raise SystemExit(f"{scheme}, {shape}, {num_tokens} tokens: wrong by {error.max().item()}")
    return True


def sizes(text: str) -> list[int]:
    if "-" in text:
        first, last = map(int, text.split("-"))
        return list(range(first, last + 1))
    return [int(part) for part in text.split(",")]


def main(inputs: list[int], outputs: list[int]) -> None:
    torch.set_num_threads(1)
    guard_operators()
    generator = torch.Generator().manual_seed(0)
    count = 0
    for input_size in inputs:
        for scheme in SCHEMES:
            if scheme.divides(input_size):
                count += sum(check(scheme, (output_size, input_size), generator) for output_size in outputs)
    print(f"{count} matrices")


if __name__ == "__main__":
    main(sizes(sys.argv[1]), sizes(sys.argv[2]))
