"""Finds the quantized layers of a model: which they are, their scheme and their format, from config and tensors."""

from collections.abc import Iterator, Mapping, Sequence

from llmcli.checkpoint.formats.awq import AWQ_WORD_COLUMNS, Awq
from llmcli.checkpoint.formats.base import Format, PackedLayer
from llmcli.checkpoint.formats.gptq import Gptq
from llmcli.checkpoint.formats.int_quantized import IntQuantized
from llmcli.checkpoint.formats.pack_quantized import PackQuantized
from llmcli.checkpoint.layout import WEIGHT_SUFFIX, ExpectedTensor
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.quantization.config import INT_FORMAT, ConfigGroup, QuantizationConfig
from llmcli.quantization.methods import AwqConfig, GptqConfig, Quantization
from llmcli.quantization.schemes import WeightScheme

# A module with one of these holds codes instead of a weight.
CODE_SUFFIXES = (".weight_packed", ".qweight")
# What a w8a8 model stores for its activations, which stay in 16 bits here.
ACTIVATION_SUFFIXES = (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point")


def find_layers(
    quantization: Quantization, linear: Sequence[ExpectedTensor], stored: Mapping[str, TensorInfo], where: str
) -> dict[str, PackedLayer]:
    """The quantized ones of the linear layers `linear`, by module name; `stored` are all tensors by the model's names.

    Raises: CheckpointError for groups that do not divide a layer, and for tensors that contradict the config.
    """
    if isinstance(quantization, QuantizationConfig):
        found = _of_config(quantization, linear, stored, where)
    else:
        found = _of_tensors(quantization, linear, stored, where)
    layers = {}
    for weight, scheme, form in found:
        output_size, input_size = weight.shape
        if not scheme.divides(input_size):
            raise CheckpointError(
                f"{where}: {weight.layer} has {input_size} inputs, which groups of {scheme.group_size} do not divide; "
                "its quantization_config belongs to another model"
            )
        layers[weight.layer] = PackedLayer(scheme, (output_size, input_size), form)
    return layers


Found = Iterator[tuple[ExpectedTensor, WeightScheme, Format]]


def _of_config(
    quantization: QuantizationConfig, linear: Sequence[ExpectedTensor], stored: Mapping[str, TensorInfo], where: str
) -> Found:
    """What compressed-tensors lists by name."""
    groups = quantization.groups_of([weight.layer for weight in linear], where)
    for weight in linear:
        group = groups[weight.layer]
        if group is not None:
            yield weight, group.scheme, _format_of(group, weight.layer, stored)


def _format_of(group: ConfigGroup, module: str, stored: Mapping[str, TensorInfo]) -> Format:
    if group.format == INT_FORMAT:
        return IntQuantized()
    # An index that is declared must be there; one that is not declared is read too, as it may contradict.
    return PackQuantized(group.has_group_index or f"{module}.weight_g_idx" in stored, group.has_group_index)


def _of_tensors(
    quantization: AwqConfig | GptqConfig,
    linear: Sequence[ExpectedTensor],
    stored: Mapping[str, TensorInfo],
    where: str,
) -> Found:
    """AWQ and GPTQ keep layers in 16 bits without listing them, so a layer with codes is a quantized one."""
    for weight in linear:
        codes = f"{weight.layer}.qweight"
        if codes not in stored:
            continue
        if weight.layer + WEIGHT_SUFFIX in stored:
            raise CheckpointError(f"{where}: {weight.layer} has both weight and qweight; files of two models mixed?")
        if isinstance(quantization, AwqConfig) and weight.shape[0] % AWQ_WORD_COLUMNS:
            raise UnsupportedModelError(
                f"{where}: {weight.layer} has {weight.shape[0]} outputs, which AWQ cannot pack by the "
                f"{AWQ_WORD_COLUMNS}; config.json of another model?"
            )
        if isinstance(quantization, AwqConfig):
            yield weight, quantization.scheme, Awq()
        else:
            orders = quantization.orders_inputs
            stores_order = bool(orders) or f"{weight.layer}.g_idx" in stored
            yield weight, quantization.scheme, Gptq(quantization.zero_offset, stores_order, orders)
