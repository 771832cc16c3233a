"""Products of many tokens with a matrix: which kernels make them, depending on the matrix and the number of tokens."""

from typing import Any, Literal

from llmcli.kernels.cublas import Cublas
from llmcli.kernels.dequantize import dequantize
from llmcli.kernels.device import Device
from llmcli.kernels.gemm_packed import gemm_packed, takes
from llmcli.kernels.tiles import TILE_ROWS, TileLayout
from llmcli.runners.cuda.memory import tiles_at_a_time
from llmcli.runners.cuda.weights import Projection

# Up to here codes are multiplied as they are: widening them would take longer than the product itself.
MAX_PACKED_TOKENS = 64

Way = Literal["packed", "widened"]


def way_of(layout: TileLayout, num_tokens: int) -> Way:
    """How a product is made: from the codes, or from weights that are widened for the matrix library first."""
    return "packed" if num_tokens <= MAX_PACKED_TOKENS and takes(layout) else "widened"


class Products:
    """x @ W.T with float32 results. `widened`, uint8, is where weights are widened, some tiles at a time.

    Without a library its products are left out, as a rehearsal wants it.
    """

    def __init__(self, device: Device, library: Cublas | None, widened: Any):
        self._device = device
        self._library = library
        self._widened = widened

    def multiply(self, projection: Projection, x: Any, out: Any) -> None:
        """Write the product, without scales of rows and bias.

        Shapes: x [num_tokens, num_inputs] in the projection's activation_dtype; out float32 [num_tokens, num_rows],
                rows may be further apart
        """
        matrix, layout = projection.matrix, projection.matrix.layout
        if way_of(layout, len(x)) == "packed":
            gemm_packed(self._device, matrix=matrix, x=x, out=out)
            return
        row_bytes = layout.num_inputs * x.itemsize
        step = tiles_at_a_time(layout, x.itemsize, self._widened.size)
        for first in range(0, layout.num_tiles, step):
            count = min(step, layout.num_tiles - first)
            rows = self._widened[: count * TILE_ROWS * row_bytes].view(x.dtype).reshape(-1, layout.num_inputs)
            dequantize(self._device, matrix=matrix, first_tile=first, num_tiles=count, out=rows)
            begin, end = first * TILE_ROWS, min((first + count) * TILE_ROWS, layout.num_rows)
            if self._library is not None:
                self._library.matmul(x=x, weight=rows[: end - begin], out=out[:, begin:end])
