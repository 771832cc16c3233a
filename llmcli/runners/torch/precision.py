"""Which type the CPU computes a model in."""

import torch

from llmcli.checkpoint.model import Model, num_parameters
from llmcli.runners.host.memory import SMALL_PARAMETERS
from llmcli.runners.torch import codes_product

AUTO = "auto"


def resolve_dtype(asked: str, model: Model) -> str:
    """The type asked for; `auto` is bfloat16 where that is faster and changes no stored weight, else float32.

    - A small model: float32, which computes what transformers computes in float32.
    - Quantized weights: bfloat16 if torch's packed operators have vector code for this processor. They need a half to a
      tenth of the time of float32, which widens all weights for each token. Their plain code takes three times as long.
    - Weights stored as bfloat16, with or without 8-bit floats: bfloat16 if the processor multiplies in it. Decoding
      takes less than half of float32's time, prompts two fifths, memory half. Without such instructions prompts take
      two to three times as long.
    - Others: float32, as bfloat16 would round what the files say.

    Figures: docs/log/2026-11-23-cpu.md. Only the model and the processor decide: the same seed gives the same text.
    """
    if asked != AUTO:
        return asked
    if num_parameters(model) < SMALL_PARAMETERS:
        return "float32"
    if model.tensors.packed:
        return "bfloat16" if has_vector_operators() else "float32"
    plain = (infos for source, infos in model.tensors.sources.items() if source not in model.tensors.scaled)
    is_stored_so = {info.dtype for (info,) in plain} == {"BF16"}
    return "bfloat16" if is_stored_so and multiplies_bfloat16() else "float32"


def widens_prompts(model: Model, dtype: str) -> bool:
    """Whether prompts are multiplied by weights that are widened from codes for each chunk."""
    is_packed = bool(model.tensors.packed) and dtype == "bfloat16"
    return is_packed and multiplies_bfloat16() and not codes_product.is_available()


def has_vector_operators() -> bool:
    """Whether torch's int8 and int4 operators have vector code here. Elsewhere, as on ARM, they were not measured."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def multiplies_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself. Those with AMX have these instructions too."""
    return bool(torch.cpu.get_capabilities().get("avx512_bf16", False))
