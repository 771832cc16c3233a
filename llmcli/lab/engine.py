"""The cases of every kernel of the engine, by its stem: what tests and `llmcli verify` run."""

from llmcli.lab.cases import (
    attention,
    attention_prefill,
    elementwise,
    gemm,
    gemm_codes,
    gemm_halves,
    gemv,
    reductions,
    sample_token,
    stage_digits,
    stage_halves,
    weights,
)
from llmcli.lab.problem import KernelCases

CASES: dict[str, KernelCases] = {
    cases.stem: cases
    for cases in (
        elementwise.ADD_PARTS,
        attention.APPEND_TOKENS,
        attention.ATTENTION_DECODE,
        attention_prefill.ATTENTION_PREFILL,
        attention_prefill.ATTENTION_PREFILL_WGMMA,
        attention.ATTENTION_ROWS,
        attention.ATTENTION_SPAN,
        weights.DEQUANTIZE,
        elementwise.EMBEDDING,
        elementwise.GATHER_COLUMNS,
        gemm_codes.CASES,
        gemm_halves.CASES,
        gemm.GEMM_PACKED,
        gemm.GEMM_NARROW,
        gemm.GEMM_WIDE,
        gemv.GEMV,
        reductions.HEAD_NORM,
        weights.QUANTIZE_ROWS,
        reductions.READ_BANDWIDTH,
        weights.REPACK,
        elementwise.RESIDUAL_ADD,
        reductions.RMS_NORM,
        attention.ROTARY,
        elementwise.ROUND_ROWS,
        reductions.ROW_REDUCE,
        sample_token.SAMPLE_TOKEN,
        elementwise.SCALE_BIAS,
        reductions.SOFTMAX,
        stage_digits.CASES,
        stage_halves.CASES,
        gemm.STAGE_WIDE,
        elementwise.SWIGLU,
    )
}
