"""Compilation without a card: resources as the assembler reports them, and errors in one line that say where."""

from pathlib import Path

import pytest

from llmcli.errors import KernelCompileError
from llmcli.kernels import compiler, environment
from llmcli.kernels.compiler import KernelResources, compile_kernels, nearest_architecture, parse_resources
from llmcli.kernels.sources import flatten

SOURCE = """
template <typename T, int SIZE>
__global__ void copy(const T* __restrict__ from, T* __restrict__ to) {
  __shared__ T buffer[SIZE];
  buffer[threadIdx.x] = from[threadIdx.x];
  __syncthreads();
  to[threadIdx.x] = buffer[SIZE - 1 - threadIdx.x];
}

// An array indexed by what only the card knows has to lie on the stack.
template <int SIZE>
__global__ void on_stack(const int* __restrict__ order, int* __restrict__ to) {
  int values[SIZE];
  for (int i = 0; i < SIZE; ++i) values[order[i]] = i;
  for (int i = 0; i < SIZE; ++i) to[i] = values[order[SIZE + i]];
}
"""

# The report of NVRTC 13.0 on three kernels held to 24 registers; `slow` is a function that `light` calls.
LOG = """ptxas info    : Overriding maximum register limit 256 for 'heavy' with  24 of maxrregcount option
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'trig' for 'sm_80'
ptxas info    : Function properties for trig
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Compile time = 1.837 ms
ptxas info    : Compiling entry function 'light' for 'sm_80'
ptxas info    : Function properties for light
ptxas         .     40 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 17 registers, used 0 barriers, 40 bytes cumulative stack size, 360 bytes cmem[0]
ptxas info    : Compile time = 3.444 ms
ptxas info    : Function properties for _Z4slowf
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'heavy' for 'sm_80'
ptxas info    : Function properties for heavy
ptxas         .     816 bytes stack frame, 2020 bytes spill stores, 2100 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 816 bytes cumulative stack size, 4096 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 93.365 ms
"""


def test_resources_are_read_per_kernel() -> None:
    assert parse_resources(LOG) == {
        "trig": KernelResources(registers=8, shared_bytes=0, stack_bytes=0, spill_store_bytes=0, spill_load_bytes=0),
        "light": KernelResources(registers=17, shared_bytes=0, stack_bytes=40, spill_store_bytes=0, spill_load_bytes=0),
        "heavy": KernelResources(24, shared_bytes=4096, stack_bytes=816, spill_store_bytes=2020, spill_load_bytes=2100),
    }


def test_products_that_wait_for_each_other_are_told() -> None:
    """ptxas names the function on the line itself, not the one that follows."""
    notice = (
        "ptxas info    : (C7520) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "program dependence on compiler-inserted WG.AR in divergent path in the function 'light'\n"
    )
    waits = {name: one.waits_for_each_wgmma for name, one in parse_resources(notice + LOG).items()}
    assert waits == {"trig": False, "light": True, "heavy": False}


@pytest.mark.usefixtures("nvrtc")
def test_each_name_expression_gets_its_symbol_and_resources() -> None:
    names = ("copy<float, 64>", "copy<short, 32>", "on_stack<100>")
    compiled = compile_kernels(SOURCE, "copy", names, "sm_80")
    assert compiled.cubin[:4] == b"\x7fELF"
    assert sorted(compiled.lowered) == sorted(names)
    assert len(set(compiled.lowered.values())) == 3
    for name in names:
        assert compiled.lowered[name].encode() in compiled.cubin
        assert 0 < compiled.resources[name].registers < 128
    assert compiled.resources["copy<float, 64>"].shared_bytes == 256
    assert compiled.resources["copy<short, 32>"].shared_bytes == 64
    assert compiled.resources["copy<float, 64>"].stack_bytes == 0
    assert compiled.resources["on_stack<100>"].stack_bytes == 400


@pytest.mark.usefixtures("nvrtc")
def test_an_error_is_one_line_with_the_original_place(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "wrong.cuh").write_text("#pragma once\n\n__device__ int f() { return undeclared; }\n")
    (tmp_path / "kernel.cu").write_text('// kernel\n#include "common/wrong.cuh"\n__global__ void kernel() {}\n')
    with pytest.raises(KernelCompileError) as caught:
        compile_kernels(flatten("kernel", tmp_path), "kernel", ["kernel"], "sm_90")
    message = str(caught.value)
    assert message.startswith("kernel kernel does not compile for sm_90: kernels/common/wrong.cuh(3): error: ")
    assert '"undeclared" is undefined' in message
    assert "\n" not in message


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("names", "arch", "text"),
    [
        (["none<float>"], "sm_80", 'identifier "none" is undefined'),
        (["copy<float, 64>"], "sm_33", "sm_33"),
    ],
)
def test_what_the_compiler_refuses_is_said(names: list[str], arch: str, text: str) -> None:
    with pytest.raises(KernelCompileError, match="kernel copy does not compile") as caught:
        compile_kernels(SOURCE, "copy", names, arch)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


class FakeNvrtc:
    @staticmethod
    def getSupportedArchs() -> tuple[int, ...]:  # noqa: N802
        return (75, 80, 86, 87, 90, 100, 120)

    @staticmethod
    def getVersion() -> tuple[int, int]:  # noqa: N802
        return (12, 8)


@pytest.mark.parametrize(
    ("card", "built"), [("sm_80", "sm_80"), ("sm_89", "sm_87"), ("sm_103", "sm_100"), ("sm_121", "sm_120")]
)
def test_a_card_newer_than_the_compiler_gets_the_nearest_of_its_generation(
    card: str, built: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "load_nvrtc", FakeNvrtc)
    assert nearest_architecture(card) == built


@pytest.mark.parametrize(
    ("card", "message"),
    [
        (
            "sm_130",
            r"NVRTC 12\.8 compiles for compute capability 7\.5 to 12\.0, and the card has 13\.0; install a newer",
        ),
        ("sm_61", r"and the card has 6\.1; `.* install \".*\[cuda12\]\"` brings"),
    ],
)
def test_a_generation_the_compiler_does_not_know_is_refused(
    card: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "load_nvrtc", FakeNvrtc)
    with pytest.raises(KernelCompileError, match=message):
        nearest_architecture(card)


def test_a_missing_compiler_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "nvrtc_version", lambda: "ImportError: no library")
    with pytest.raises(KernelCompileError, match=r"NVRTC is missing \(ImportError: no library\); `.* install"):
        compile_kernels(SOURCE, "copy", ["copy<float, 64>"], "sm_80")


@pytest.mark.usefixtures("nvrtc")
def test_missing_headers_are_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "header_folder", lambda: None)
    with pytest.raises(KernelCompileError, match=r"CUDA headers \(cuda_fp16\.h\) are missing; `.* install"):
        compile_kernels(SOURCE, "copy", ["copy<float, 64>"], "sm_80")
