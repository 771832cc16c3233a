"""A packed layer whose groups are not of neighbouring inputs: columns are sorted at load, inputs at each call."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from llmcli.runners.torch.packed_linear import PackedLinear


@dataclass(frozen=True)
class ReorderedLinear:
    """y = x[:, order] @ weight.T + bias. Shapes: order int64 [input_size]"""

    linear: PackedLinear
    order: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to x [num_tokens, input_size] float32; result [num_tokens, output_size] float32."""
        return self.linear(x.index_select(1, self.order))

    def each(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Apply to each part by itself."""
        return self.linear.each([x.index_select(1, self.order) for x in xs])
