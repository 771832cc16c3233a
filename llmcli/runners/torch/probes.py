"""`TorchProbes`: the products of the torch runner, to be timed."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from llmcli.runners.host.predict import Form
from llmcli.runners.torch.load import DTYPES
from llmcli.runners.torch.packed_linear import PackedWeight, choose_product


class TorchProbes:
    """The `HostProbes` of a run in `dtype`. The threads stay set, as `load` sets them."""

    def __init__(self, dtype: str, num_threads: int | None):
        self._dtype = DTYPES[dtype]
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.num_threads = torch.get_num_threads()

    def read(self, num_bytes: int) -> Callable[[], object]:
        """A sum over so many bytes."""
        return torch.ones(num_bytes // 4).sum

    def multiply(self, form: Form, shape: tuple[int, int], num_tokens: int) -> Callable[[], object]:
        """A product of so many tokens with a random weight; see `HostProbes.multiply`."""
        generator = torch.Generator().manual_seed(0)
        x = torch.ones(num_tokens, shape[1])
        if form is None:
            plain = torch.rand(shape, generator=generator).to(self._dtype)
            return torch.inference_mode()(lambda: F.linear(x.to(self._dtype), plain).float())
        code_bytes = shape[0], 4 * form.packed_shape(shape)[1]
        codes = torch.randint(0, 256, code_bytes, dtype=torch.uint8, generator=generator)
        scales = torch.full(form.scale_shape(shape), 0.01)
        zero_points = None if form.is_symmetric else torch.full(scales.shape, form.offset, dtype=torch.uint8)
        product = choose_product(PackedWeight(form, shape, codes, scales, zero_points), self._dtype)
        return torch.inference_mode()(lambda: product(x))
