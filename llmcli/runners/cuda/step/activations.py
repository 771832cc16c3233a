"""Cached views of the workspace for a number of tokens. Slicing an array costs the host as much as a launch."""

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from llmcli.kernels.gemv import MAX_ROWS
from llmcli.kernels.stage_wide import padded_inputs
from llmcli.runners.cuda.plan.weight_layout import Projection
from llmcli.runners.cuda.plan.workspace import Workspace


class Activations:
    """The arrays that the layers read and write for `count` tokens, those of `hidden`.

    Shapes: hidden float32 [count, hidden_size]; qkv float32 [count, qkv_width], in the memory of `outputs`; mixed
            [count, q_size], in the type that attention writes; row_scale and the constants
            unit_scale, gated_unit float32 [count]; norm_sums, of up to MAX_ROWS tokens, as gemv takes them; uint8,
            flat: image, of a product's input, in the memory of `inputs`; gated_image, of the MLP's inner activations,
            in the memory of `outputs`; gathered, an image whose columns are in another order
    """

    def __init__(self, workspace: Workspace[Any], hidden: Any, qkv_width: int):
        self.count = count = len(hidden)
        self._workspace = workspace
        self._views: dict[Hashable, Any] = {}
        self.hidden = hidden
        self.qkv = self.outputs(qkv_width)
        self.mixed = workspace.mixed[:count]
        self.row_scale = workspace.row_scale[:count]
        self.unit_scale = workspace.unit_scale[:count]
        self.gated_unit = workspace.gated_unit[:count]
        self.norm_sums = workspace.norm_sums[: min(count, MAX_ROWS)]
        self.image, self.gathered = workspace.inputs, workspace.gathered
        self.gated_image = workspace.outputs.view(np.uint8)

    def gated(self, is_float: bool, width: int) -> Any:
        """The MLP's inner activations of a few tokens, in the memory of `outputs`. Shapes: result [count, width]."""
        return self._padded(("gated", is_float), self._workspace.outputs, np.float32 if is_float else np.float16, width)

    def rows(self, width: int, count: int) -> Any:
        """Memory of `inputs` for rows in fp16. Shapes: result float16 [count, width of whole spans]."""
        memory, size = self._workspace.inputs, 2 * count * padded_inputs(width)
        return self._view(("rows", width, count), lambda: memory[:size].view(np.float16).reshape(count, -1))

    def outputs(self, width: int) -> Any:
        """Memory for a product's outputs; all widths share it. Shapes: result float32 [count, width]."""
        size = self.count * width
        return self._view(("outputs", width), lambda: self._workspace.outputs[:size].reshape(self.count, width))

    def others(self, num_parts: int, width: int) -> Any:
        """Memory for the parts of a product after the first. Shapes: result float32 [num_parts, count, width]."""
        memory, size = self._workspace.others, num_parts * self.count * width
        assert memory is not None
        return self._view(("others", num_parts, width), lambda: memory[:size].reshape(num_parts, self.count, width))

    def gathered_rows(self, width: int) -> Any:
        """`gathered` for rows of a few tokens. Shapes: result float16 [count, width]."""
        return self._padded("gathered", self._workspace.gathered, np.float16, width)

    def qkv_of(self, projection: Projection[Any]) -> Any:
        """A projection's columns of `qkv`. Shapes: result float32 [count, num_rows]."""
        columns = slice(projection.begin, projection.begin + projection.num_rows)
        return self._view(("qkv", projection.begin), lambda: self.qkv[:, columns])

    def _padded(self, key: Hashable, memory: Any, dtype: DTypeLike, width: int) -> Any:
        """Rows of whole spans, of which `width` columns are used."""
        size, count = self.count * padded_inputs(width), self.count
        return self._view((key, width), lambda: memory.view(dtype)[:size].reshape(count, -1)[:, :width])

    def _view(self, key: Hashable, cut: Callable[[], Any]) -> Any:
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = cut()
        return view
