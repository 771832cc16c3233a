"""The workspace's arrays for a number of tokens, each cut once: a view takes the host as long as a launch."""

from collections.abc import Callable, Hashable
from typing import Any

from llmcli.runners.cuda.regions import Arrays
from llmcli.runners.cuda.weights import Projection


class Activations:
    """What the layers of one chunk or batch of `count` tokens read and write.

    Shapes: hidden float32 [count, hidden_size]; qkv float32 [count, qkv_width], where other outputs go too; mixed
            float32 [count, q_size]; row_scale, gated_scale, unit_scale float32 [count]
    """

    def __init__(self, workspace: Arrays, count: int, qkv_width: int):
        self.count = count
        self._workspace = workspace
        self._views: dict[Hashable, Any] = {}
        self.hidden = workspace["hidden"][:count]
        self.qkv = self.outputs(qkv_width)
        self.mixed = workspace["mixed"][:count]
        self.row_scale = workspace["row_scale"][:count]
        self.gated_scale = workspace["gated_scale"][:count]
        self.unit_scale = workspace["unit_scale"][:count]

    @property
    def gated(self) -> Any:
        """The MLP's inner activations of a few tokens. Shapes: result float32 [count, intermediate_size]."""
        return self._view("gated", lambda: self._workspace["gated"][: self.count])

    def outputs(self, width: int) -> Any:
        """Room for the outputs of a product. Shapes: result float32 [count, width]."""
        size = self.count * width
        return self._view(("outputs", width), lambda: self._workspace["outputs"][:size].reshape(self.count, width))

    def inputs(self, projection: Projection) -> Any:
        """Room for the input of a product, in the type it takes. Shapes: result [count, num_inputs]."""
        width, dtype = projection.matrix.layout.num_inputs, projection.activation_dtype
        size = self.count * width * dtype.itemsize
        return self._view(
            ("inputs", width, dtype), lambda: self._workspace["inputs"][:size].view(dtype).reshape(self.count, width)
        )

    def qkv_of(self, projection: Projection) -> Any:
        """A projection's columns of `qkv`. Shapes: result float32 [count, num_rows]."""
        return self.qkv_columns(projection.begin, projection.num_rows)

    def qkv_columns(self, begin: int, size: int) -> Any:
        """Columns of `qkv`. Shapes: result float32 [count, size]."""
        return self._view(("qkv", begin, size), lambda: self.qkv[:, begin : begin + size])

    def _view(self, key: Hashable, cut: Callable[[], Any]) -> Any:
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = cut()
        return view
