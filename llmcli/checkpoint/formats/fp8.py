"""Weights of 8-bit floats (e4m3) with scales: one for a tensor, one for each row, or one for each block.

compressed-tensors calls the form `float-quantized`; DeepSeek's and Qwen's fp8 models have blocks of 128 x 128.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from llmcli.checkpoint.arrays import Floats, not_finite, read_rows, read_whole
from llmcli.checkpoint.layout import ExpectedTensor
from llmcli.checkpoint.reader import TensorReader
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.quantization.floats import E4M3_VALUES, widen
from llmcli.quantization.schemes import Fp8Scheme

FP8_DTYPE = "F8_E4M3"
# Both mean weight = stored * scale; the inverse is that of the scale with which the weight was divided.
SCALE_SUFFIXES = ("weight_scale", "weight_scale_inv")

# Weights widened at a time: long against a call of numpy, short enough for the cache.
_BLOCK_ELEMENTS = 2**20


@dataclass(frozen=True)
class Fp8Layer:
    """A linear layer of 8-bit floats: the shape [output_size, input_size] of its weight, and its scales' name."""

    scheme: Fp8Scheme
    shape: tuple[int, int]
    scale: str

    def tensors(self, weight: ExpectedTensor) -> Iterator[ExpectedTensor]:
        """What stands for a linear weight."""
        reason = f"{weight.name} {list(weight.shape)} as {self.scheme}"
        scale_shape = self.scheme.scale_shape(self.shape)
        # Scales that are one for all, or one a row, are stored with more or fewer dimensions of size 1.
        alike = ((), (1,), (1, 1)) if scale_shape == (1, 1) else ((scale_shape[0],),) if scale_shape[1] == 1 else ()
        yield ExpectedTensor(weight.name, weight.shape, reason, dtypes=(FP8_DTYPE,))
        yield ExpectedTensor(f"{weight.layer}.{self.scale}", scale_shape, reason, other_shapes=alike)

    def read(self, module: str, infos: Mapping[str, TensorInfo], reader: TensorReader) -> Iterator[tuple[int, Floats]]:
        """The weight in blocks of rows, each with the number of its first row.

        Shapes: blocks float32 [rows, input_size]
        Raises: CheckpointError for read errors, NaN and infinity
        """
        info, scale_info = infos[f"{module}.weight"], infos[f"{module}.{self.scale}"]
        num_rows, input_size = self.shape
        scales = widen(read_whole(scale_info, reader), scale_info.dtype).reshape(self.scheme.scale_shape(self.shape))
        if not np.isfinite(scales).all():
            raise not_finite(scale_info)
        step = max(1, _BLOCK_ELEMENTS // input_size)
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            weights = E4M3_VALUES[read_rows(info, begin, end, reader)]
            weights *= self._spread(scales, begin, end)
            if not np.isfinite(weights).all():
                raise not_finite(info)
            yield begin, weights

    def _spread(self, scales: Floats, begin: int, end: int) -> Floats:
        """The scales of some rows. Shapes: scales [row blocks, input blocks]; result [1 or rows, 1 or input_size]"""
        (num_rows, input_size), scheme = self.shape, self.scheme
        # A block may be larger than the weight, by any number that a config.json holds.
        if scheme.block_rows is not None:
            scales = scales[np.arange(begin, end) // min(scheme.block_rows, num_rows)]
        if scheme.block_inputs is not None:
            scales = scales.repeat(min(scheme.block_inputs, input_size), axis=1)[:, :input_size]
        return scales
