"""Weights of 8-bit floats (e4m3) with scales: one for a tensor, one for each row, or one for each block.

compressed-tensors calls the form `float-quantized`; DeepSeek's and Qwen's fp8 models have blocks of 128 x 128.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from llmcli.checkpoint.layout import ExpectedTensor
from llmcli.checkpoint.reader import Floats, TensorReader, not_finite, read_rows, read_whole
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.quantization.floats import E4M3_VALUES, Array, widen
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
        num_rows, input_size = self.shape
        step = max(1, _BLOCK_ELEMENTS // input_size)
        for begin in range(0, num_rows, step):
            yield begin, self.read_rows(module, infos, begin, min(begin + step, num_rows), reader)

    def read_rows(
        self, module: str, infos: Mapping[str, TensorInfo], begin: int, end: int, reader: TensorReader
    ) -> Floats:
        """Rows begin ... end - 1 of the weight. Shapes, Raises: as `read`."""
        info, scale_info, input_size = infos[f"{module}.weight"], infos[f"{module}.{self.scale}"], self.shape[1]
        scales = widen(self.read_scales(module, infos, begin, end, reader), scale_info.dtype)
        if not np.isfinite(scales).all():
            raise not_finite(scale_info)
        if self.scheme.block_inputs is not None:
            scales = scales.repeat(min(self.scheme.block_inputs, input_size), axis=1)[:, :input_size]
        weights: Floats = E4M3_VALUES[read_rows(info, begin, end, reader)]
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is seen below
            weights *= scales
        if not np.isfinite(weights).all():
            raise not_finite(info)
        return weights

    def read_scales(
        self, module: str, infos: Mapping[str, TensorInfo], begin: int, end: int, reader: TensorReader
    ) -> Array:
        """The scales of rows begin ... end - 1, as they are stored. Shapes: result [end - begin, input blocks]"""
        info, num_rows = infos[f"{module}.{self.scale}"], self.shape[0]
        scales = read_whole(info, reader).reshape(self.scheme.scale_shape(self.shape))
        # A block may be larger than the weight, by any number that a config.json holds.
        rows_of_block = min(self.scheme.block_rows or num_rows, num_rows)
        result: Array = scales[np.arange(begin, end) // rows_of_block]
        return result
