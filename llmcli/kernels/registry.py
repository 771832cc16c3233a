"""Every kernel by its stem: what the tests compile and the documentation lists."""

from llmcli.kernels import (
    append_tokens,
    attention_decode,
    attention_prefill,
    dequantize,
    embedding,
    gemm_packed,
    gemv,
    head_norm,
    kv_append,
    quantize_rows,
    read_bandwidth,
    repack,
    residual_add,
    rms_norm,
    rotary,
    round_rows,
    row_reduce,
    sample_token,
    scale_bias,
    softmax,
    swiglu,
)
from llmcli.kernels.spec import KernelSpec

_SPECS = (
    append_tokens.SPEC,
    attention_decode.SPEC,
    attention_prefill.SPEC,
    dequantize.SPEC,
    embedding.SPEC,
    gemm_packed.SPEC,
    gemv.SPEC,
    head_norm.SPEC,
    kv_append.SPEC,
    quantize_rows.SPEC,
    read_bandwidth.SPEC,
    repack.SPEC,
    residual_add.SPEC,
    rms_norm.SPEC,
    rotary.SPEC,
    round_rows.SPEC,
    row_reduce.SPEC,
    sample_token.SPEC,
    scale_bias.SPEC,
    softmax.SPEC,
    swiglu.SPEC,
)

KERNELS: dict[str, KernelSpec] = {spec.stem: spec for spec in _SPECS}
