"""Finds the quantized layers of a model: which they are, their scheme and their format, from config and tensors."""

from collections.abc import Iterator, Mapping, Sequence

from llmcli.checkpoint.formats import (
    AWQ_WORD_COLUMNS,
    SCALE_SUFFIXES,
    Awq,
    Fp8Layer,
    Gptq,
    IntQuantized,
    PackedLayer,
    PackQuantized,
)
from llmcli.checkpoint.layout import WEIGHT_DTYPES, ExpectedTensor
from llmcli.checkpoint.safetensors_file import TensorInfo
from llmcli.errors import CheckpointError, UnsupportedModelError
from llmcli.quantization.config import (
    INT_FORMAT,
    AwqConfig,
    ConfigGroup,
    Fp8Config,
    GptqConfig,
    Quantization,
    QuantizationConfig,
)
from llmcli.quantization.schemes import Fp8Scheme

# A module with one of these holds codes instead of a weight.
CODE_SUFFIXES = (".weight_packed", ".qweight")
# Scales and zero points of activations and of the KV cache, which are not used here.
ACTIVATION_SUFFIXES = (
    ".activation_scale",
    ".azp_adj",
    ".input_scale_ub",
    *(f".{side}_{what}" for side in ("input", "output") for what in ("scale", "zero_point")),
    *(f".{side}_scale" for side in ("q", "k", "v")),
)

Layer = PackedLayer | Fp8Layer


def find_layers(
    quantization: Quantization, linear: Sequence[ExpectedTensor], stored: Mapping[str, TensorInfo], where: str
) -> dict[str, Layer]:
    """The quantized ones of the linear layers `linear`, by module name; `stored` are all tensors by the model's names.

    Raises: CheckpointError for groups that do not divide a layer, and for tensors that contradict the config.
    """
    found: Iterator[tuple[ExpectedTensor, Layer | None]]
    if isinstance(quantization, QuantizationConfig):
        groups = quantization.groups_of([weight.layer for weight in linear], where)
        found = (
            (weight, _listed(group, weight, stored, where)) for weight in linear if (group := groups[weight.layer])
        )
    else:
        # These methods keep layers in 16 bits without listing them, so the tensors of a layer show what it is.
        # Where one lacks its scales, they are missing under the name that the others have.
        scale = max(SCALE_SUFFIXES, key=lambda suffix: sum(name.endswith(f".{suffix}") for name in stored))
        found = ((weight, _told(quantization, weight, stored, where, scale)) for weight in linear)
    layers = {weight.layer: layer for weight, layer in found if layer is not None}
    if not layers and all(weight.name in stored for weight in linear):
        raise CheckpointError(
            f"{where}: config.json says that weights are quantized, and none is; remove quantization_config there if "
            "they are meant to have 16 bits"
        )
    for module, layer in layers.items():
        if isinstance(layer, PackedLayer) and not layer.scheme.divides(layer.shape[1]):
            raise CheckpointError(
                f"{where}: {module} has {layer.shape[1]} inputs, which groups of {layer.scheme.group_size} do not "
                "divide; its quantization_config belongs to another model"
            )
    return layers


def _listed(group: ConfigGroup, weight: ExpectedTensor, stored: Mapping[str, TensorInfo], where: str) -> Layer:
    """A layer that the config of compressed-tensors lists."""
    output_size, input_size = weight.shape
    if isinstance(group.scheme, Fp8Scheme):
        scale = _scale_of(weight.layer, stored, where) or SCALE_SUFFIXES[0]
        return Fp8Layer(group.scheme, (output_size, input_size), scale)
    zero_points = stored.get(f"{weight.layer}.weight_zero_point")
    if zero_points is not None and group.scheme.is_symmetric:  # the library leaves those out that mean nothing
        raise CheckpointError(
            f"{where}: {weight.layer}.weight_zero_point is there, and config.json says that the weights are symmetric; "
            "one of them is wrong: download the model again"
        )
    if group.format == INT_FORMAT:
        return PackedLayer(group.scheme, (output_size, input_size), IntQuantized())
    # An order that is declared must be there; one that is not declared is read too, as it may contradict.
    stores_order = group.has_group_index or f"{weight.layer}.weight_g_idx" in stored
    return PackedLayer(group.scheme, (output_size, input_size), PackQuantized(stores_order, group.has_group_index))


def _scale_of(module: str, stored: Mapping[str, TensorInfo], where: str) -> str | None:
    """The name of a layer's scales as 8-bit floats have them, None without any."""
    scales = [suffix for suffix in SCALE_SUFFIXES if f"{module}.{suffix}" in stored]
    if len(scales) > 1:
        raise CheckpointError(
            f"{where}: {module} has both {' and '.join(scales)}, expected one of them; download the model again"
        )
    return scales[0] if scales else None


def _told(
    quantization: AwqConfig | GptqConfig | Fp8Config,
    weight: ExpectedTensor,
    stored: Mapping[str, TensorInfo],
    where: str,
    usual_scale: str,
) -> Layer | None:
    """The kind of a layer by its tensors; None for a plain one."""
    module, (output_size, input_size) = weight.layer, weight.shape
    plain = stored.get(weight.name)
    if isinstance(quantization, Fp8Config):
        scale = _scale_of(module, stored, where)
        if plain is None or plain.dtype in WEIGHT_DTYPES:
            if plain is not None and scale is not None:
                raise CheckpointError(
                    f"{where}: {weight.name} is {plain.dtype}, and there is {module}.{scale}, which belongs to 8-bit "
                    "floats; one of them is wrong: download the model again"
                )
            return None
        scheme = quantization.scheme or _scheme_of_scales(stored.get(f"{module}.{scale}"), output_size)
        return Fp8Layer(scheme, (output_size, input_size), scale or usual_scale)
    has_codes = f"{module}.qweight" in stored
    if not has_codes and (plain is not None or not any(f"{module}.{part}" in stored for part in ("qzeros", "scales"))):
        return None
    if plain is not None:
        raise CheckpointError(
            f"{where}: {module} has both weight and qweight, expected one of them; download the model again"
        )
    if isinstance(quantization, AwqConfig):
        if output_size % AWQ_WORD_COLUMNS:
            raise UnsupportedModelError(
                f"{where}: {module} has {output_size} outputs, which AWQ cannot pack by the {AWQ_WORD_COLUMNS}; "
                "config.json of another model?"
            )
        return PackedLayer(quantization.scheme, (output_size, input_size), Awq())
    orders_inputs = quantization.orders_inputs
    form = Gptq(quantization.zero_offset, bool(orders_inputs) or f"{module}.g_idx" in stored, orders_inputs)
    return PackedLayer(quantization.scheme, (output_size, input_size), form)


def _scheme_of_scales(scales: TensorInfo | None, output_size: int) -> Fp8Scheme:
    """One scale or one a row: configs without blocks do not say, so the shape decides."""
    is_of_rows = scales is not None and output_size > 1 and scales.shape in ((output_size,), (output_size, 1))
    return Fp8Scheme(1 if is_of_rows else None, None)
