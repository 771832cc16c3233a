"""What one arithmetic rests on: a chain of products has the same bits by mma and by wgmma, whatever its width.

No document says so: measured on an H200 (docs/log/2026-11-28-one-arithmetic.md).
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from emulated import EmulatedDevice, HostArray, can_emulate, translate
from fenced import to_host

from llmcli.kernels.compiler import compile_kernels
from llmcli.kernels.device import Device
from llmcli.kernels.sources import flatten_text

NUM_ROWS, MOST_COLUMNS, NUM_INPUTS = 64, 256, 4096
WIDTHS = (16, 32, 64, 128, 256)
NAMES = ["by_mma", *(f"by_wgmma<{width}>" for width in WIDTHS)]
TEXT = """
#include "common/mma.cuh"
#include "common/wgmma.cuh"

// out [64, num_columns] = a [64, num_inputs] * b [num_columns, num_inputs], in one chain each. A block has 8 columns.
__global__ void by_mma(const unsigned* a, const unsigned* b, float* out, int num_inputs) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, pitch = num_inputs / 2;
    const unsigned* row = a + (16 * warp + g) * pitch + t;
    const unsigned* column = b + (8 * blockIdx.x + g) * pitch + t;
    float d[4] = {};
    for (int k = 0; k < pitch; k += 8) {
        mma<__half>(d, row[k], row[k + 8 * pitch], row[k + 4], row[k + 8 * pitch + 4], column[k], column[k + 4]);
    }
    float* place = out + (16 * warp + g) * 8 * gridDim.x + 8 * blockIdx.x + 2 * t;
    place[0] = d[0], place[1] = d[1];
    place[64 * gridDim.x] = d[2], place[64 * gridDim.x + 1] = d[3];
}

// Where columns of 16-byte pieces lie: 8 columns of one piece are adjacent (128 bytes), `piece_bytes` from one piece of
// a column to its next one. No swizzle.
__device__ unsigned long long columns_at(unsigned address, unsigned piece_bytes) {
    return (address & 0x3ffff) >> 4 | static_cast<unsigned long long>(piece_bytes >> 4) << 16 | (128ull >> 4) << 32;
}

// The same of one block with COLUMNS columns.
template <int COLUMNS>
__global__ void by_wgmma(const unsigned* a, const unsigned* b, float* out, int num_inputs) {
    alignas(128) __shared__ unsigned columns[8 * COLUMNS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, pitch = num_inputs / 2;
    const unsigned* row = a + (16 * warp + g) * pitch + t;
    float d[COLUMNS / 2] = {};
    for (int k = 0; k < pitch; k += 8) {
        __syncthreads();
        for (int i = threadIdx.x; i < 8 * COLUMNS; i += 128) {
            const int column = i / 8, word = i % 8;
            columns[(word / 4 * COLUMNS + column) * 4 + word % 4] = b[column * pitch + k + word];
        }
        fence_async_side();
        __syncthreads();
        const unsigned words[4] = {row[k], row[k + 8 * pitch], row[k + 4], row[k + 8 * pitch + 4]};
        wgmma_begin();
        wgmma_halves<__half>(d, words, columns_at(shared_address(columns), 16 * COLUMNS), true);
        wgmma_commit();
        wgmma_wait<0>();
        hold(d);
    }
    for (int i = 0; i < COLUMNS / 2; ++i) {
        out[(16 * warp + g + i / 2 % 2 * 8) * COLUMNS + i / 4 * 8 + 2 * t + i % 2] = d[i];
    }
}
"""
Pair = tuple[np.ndarray, np.ndarray]


def normal(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    return rng.standard_normal((num_rows, NUM_INPUTS))


def spread(rng: np.random.Generator, num_rows: int, most: int) -> np.ndarray:
    return normal(rng, num_rows) * 2.0 ** rng.integers(-12, most, (num_rows, NUM_INPUTS))


def outliers(rng: np.random.Generator) -> Pair:
    b = normal(rng, MOST_COLUMNS)
    b[:, ::97] *= 300
    return 0.02 * normal(rng, NUM_ROWS), b


def cancelling(rng: np.random.Generator) -> Pair:
    signs = np.tile([1, -1], NUM_INPUTS // 2)
    return tuple(normal(rng, rows)[:, ::2].repeat(2, 1) * by for rows, by in ((NUM_ROWS, signs), (MOST_COLUMNS, 1)))


KINDS: dict[str, Callable[[np.random.Generator], Pair]] = {
    "normal": lambda rng: (normal(rng, NUM_ROWS), normal(rng, MOST_COLUMNS)),
    "codes": lambda rng: (0.0031 * rng.integers(-127, 128, (NUM_ROWS, NUM_INPUTS)), normal(rng, MOST_COLUMNS)),
    "outliers": outliers,
    "wide exponents": lambda rng: (spread(rng, NUM_ROWS, 8), spread(rng, MOST_COLUMNS, 6)),
    "cancelling": cancelling,
}


def factors(kind: str) -> Pair:
    a, b = KINDS[kind](np.random.default_rng(0))
    return a.astype(np.float16), b.astype(np.float16)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_chains_have_the_same_bits(kind: str, device: Device, tmp_path: Path) -> None:
    import cupy

    if not device.can_wgmma:
        pytest.skip("the card has no wgmma")
    compiled = compile_kernels(flatten_text(TEXT, "chains"), "chains", NAMES, "sm_90a")
    cubin = tmp_path / "chains.cubin"
    cubin.write_bytes(compiled.cubin)
    module, (a, b) = cupy.RawModule(path=str(cubin)), factors(kind)
    on_card = [cupy.asarray(one).view(np.uint32) for one in (a, b)]

    def multiply(name: str, width: int, num_blocks: int) -> np.ndarray:
        out = cupy.full((NUM_ROWS, width), np.nan, np.float32)
        kernel = module.get_function(compiled.lowered[name])
        kernel((num_blocks,), (128,), (*on_card, out, np.int32(NUM_INPUTS)))
        return to_host(out)

    expected = multiply("by_mma", MOST_COLUMNS, MOST_COLUMNS // 8)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    sizes = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64).T
    assert (np.abs(expected - exact) <= 2.0**-14 * sizes).all()  # a column in another's place is farther off
    for width in WIDTHS:
        found = multiply(f"by_wgmma<{width}>", width, 1)
        np.testing.assert_array_equal(found.view(np.uint32), expected[:, :width].view(np.uint32))


@pytest.mark.skipif(not can_emulate(), reason="no compiler that can emulate a card")
def test_these_kernels_multiply(tmp_path: Path) -> None:
    """In the emulator, whose sums are rounded in another way than a card's."""
    device, (a, b) = EmulatedDevice(tmp_path), factors("normal")
    a, b = (np.ascontiguousarray(one[:, :48]) for one in (a, b))
    device._compile("chains", NAMES, translate(flatten_text(TEXT, "chains")))
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    for name, width, num_blocks in [("by_mma", 256, 32), *((f"by_wgmma<{width}>", width, 1) for width in WIDTHS[:3])]:
        out = np.full((NUM_ROWS, width), np.nan, np.float32)
        arguments = (*(HostArray(one.view(np.uint32)) for one in (a, b)), HostArray(out), np.int32(48))
        device.launch("chains", name, grid=(num_blocks,), block=128, arguments=arguments)
        np.testing.assert_allclose(out, exact[:, :width], atol=1e-4)


def test_they_compile(nvrtc: None) -> None:
    resources = compile_kernels(flatten_text(TEXT, "chains"), "chains", NAMES, "sm_90a").resources
    assert not any(taken.waits_for_each_wgmma for taken in resources.values())
