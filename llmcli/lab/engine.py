"""The cases of every kernel of the engine, by its stem: what tests and `llmcli verify` run."""

from llmcli.lab.cases import (
    attention_prefill,
    dequantize,
    embedding,
    gemm_codes,
    gemm_packed,
    gemv,
    head_norm,
    kv_append,
    quantize_rows,
    repack,
    residual_add,
    rotary,
    round_rows,
    row_reduce,
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
        attention_prefill.CASES,
        dequantize.CASES,
        embedding.CASES,
        gemm_codes.CASES,
        gemm_packed.CASES,
        gemv.CASES,
        head_norm.CASES,
        kv_append.CASES,
        quantize_rows.CASES,
        repack.CASES,
        residual_add.CASES,
        rms_norm.CASES,
        rotary.CASES,
        round_rows.CASES,
        row_reduce.CASES,
        scale_bias.CASES,
        softmax.CASES,
        stage_digits.CASES,
        swiglu.CASES,
    )
}
