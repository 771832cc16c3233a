"""The cases of every kernel of the engine, by its stem: what tests and `llmcli verify` run."""

from llmcli.lab.cases import (
    append_tokens,
    attention_decode,
    attention_prefill,
    attention_rows,
    dequantize,
    embedding,
    gemm_codes,
    gemm_packed,
    gemv,
    head_norm,
    kv_append,
    quantize_rows,
    read_bandwidth,
    repack,
    residual_add,
    rotary,
    round_rows,
    row_reduce,
    sample_token,
    scale_bias,
    softmax,
    stage_digits,
    swiglu,
)
from llmcli.lab.problem import KernelCases
from llmcli.lab.problems import rms_norm

CASES: dict[str, KernelCases] = {
    cases.stem: cases
    for cases in (
        append_tokens.CASES,
        attention_decode.CASES,
        attention_prefill.CASES,
        attention_rows.CASES,
        dequantize.CASES,
        embedding.CASES,
        gemm_codes.CASES,
        gemm_packed.CASES,
        gemv.CASES,
        head_norm.CASES,
        kv_append.CASES,
        quantize_rows.CASES,
        read_bandwidth.CASES,
        repack.CASES,
        residual_add.CASES,
        rms_norm.CASES,
        rotary.CASES,
        round_rows.CASES,
        row_reduce.CASES,
        sample_token.CASES,
        scale_bias.CASES,
        softmax.CASES,
        stage_digits.CASES,
        swiglu.CASES,
    )
}
