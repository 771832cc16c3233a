"""`TorchProbes`: the products of the torch runner, to be timed."""

from collections.abc import Callable, Sequence

import torch

from llmcli.runners.host.predict import Form
from llmcli.runners.torch.llama import Linear
from llmcli.runners.torch.load import DTYPES
from llmcli.runners.torch.packed_linear import PackedLinear
from llmcli.runners.torch.packed_weight import PackedWeight


class TorchProbes:
    """The `HostProbes` of a run in `dtype`. The threads stay set, as `load` sets them."""

    def __init__(self, dtype: str, num_threads: int | None):
        self._dtype = DTYPES[dtype]
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.num_threads = torch.get_num_threads()

    def read(self, num_bytes: int) -> Callable[[], object]:
        """A sum over `num_bytes` bytes."""
        return torch.ones(num_bytes // 4).sum

    def multiply(self, form: Form, shape: tuple[int, int], chunks: Sequence[int]) -> Callable[[], object]:
        """Products of chunks with a random weight; see `HostProbes.multiply`."""
        generator = torch.Generator().manual_seed(0)
        xs = [torch.ones(num_tokens, shape[1]) for num_tokens in chunks]
        if form is None:
            plain = Linear(torch.rand(shape, generator=generator).to(self._dtype))
            return torch.inference_mode()(lambda: plain.each(xs))
        code_bytes = shape[0], 4 * form.packed_shape(shape)[1]
        codes = torch.randint(0, 256, code_bytes, dtype=torch.uint8, generator=generator)
        scales = torch.full(form.scale_shape(shape), 0.01)
        zero_points = None if form.is_symmetric else torch.full(scales.shape, form.offset, dtype=torch.uint8)
        packed = PackedLinear(PackedWeight(form, shape, codes, scales, zero_points), None, self._dtype)
        return torch.inference_mode()(lambda: packed.each(xs))
