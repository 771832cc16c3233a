"""`PlannedWeight`: one tensor of an export, before it is written; `Shard`: those that share a file."""

from dataclasses import dataclass
from functools import cached_property

from llmcli.checkpoint.formats import PackedLayer
from llmcli.checkpoint.layout import EMBEDDING, HEAD
from llmcli.checkpoint.safetensors_file import OutputTensor, TensorInfo
from llmcli.quantization.schemes import WeightScheme

LINEAR_SUFFIX = "_proj.weight"
WEIGHT_SUFFIX = ".weight"


@dataclass(frozen=True)
class PlannedWeight:
    """A tensor of the export by its name there, where it comes from, and how it is quantized: None is byte by byte.

    With a `layer` it is quantized in the source already: `parts` are its tensors there, `info` the first of them.
    With `stores_order` the group of each input is written, too.
    """

    name: str
    info: TensorInfo
    scheme: WeightScheme | None
    scale_dtype: str
    layer: PackedLayer | None = None
    parts: tuple[TensorInfo, ...] = ()
    stores_order: bool = False

    @property
    def module(self) -> str:
        """The module's name, as config.json lists it."""
        return self.name.removesuffix(WEIGHT_SUFFIX)

    @property
    def shape(self) -> tuple[int, int]:
        """[output_size, input_size] of a linear weight."""
        if self.layer is not None:
            return self.layer.shape
        output_size, input_size = self.info.shape
        return output_size, input_size

    @property
    def kind(self) -> str:
        """The row of the table of sizes it counts in."""
        if self.name == EMBEDDING:
            return "embedding"
        if self.name == HEAD:
            return "output head"
        if self.name.endswith(LINEAR_SUFFIX):
            return "attention" if ".self_attn." in self.name else "MLP"
        return "norms and biases"

    @cached_property
    def outputs(self) -> tuple[OutputTensor, ...]:
        """The tensors written for it."""
        if self.scheme is None:
            return (OutputTensor(self.name, self.info.dtype, self.info.shape),)
        tensors = [
            OutputTensor(f"{self.name}_packed", "I32", self.scheme.packed_shape(self.shape)),
            OutputTensor(f"{self.name}_scale", self.scale_dtype, self.scheme.scale_shape(self.shape)),
            OutputTensor(f"{self.name}_shape", "I64", (2,)),
        ]
        if not self.scheme.is_symmetric:
            tensors.append(OutputTensor(f"{self.name}_zero_point", "I32", self.scheme.zero_point_shape(self.shape)))
        if self.stores_order:
            tensors.append(OutputTensor(f"{self.name}_g_idx", "I32", (self.shape[1],)))
        return tuple(tensors)

    @property
    def source_bytes(self) -> int:
        """What it takes in the source."""
        return sum(info.num_bytes for info in self.parts) if self.parts else self.info.num_bytes

    @property
    def num_bytes(self) -> int:
        """What it takes in the export."""
        return sum(tensor.num_bytes for tensor in self.outputs)


@dataclass(frozen=True)
class Shard:
    """One weight file of the export."""

    file_name: str
    weights: tuple[PlannedWeight, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes of the source that are read for it."""
        return sum(weight.source_bytes for weight in self.weights)
