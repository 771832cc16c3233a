"""common/philox.cuh against the host's generator: the same words, the same noise, and an estimate within its bound."""

import numpy as np
import pytest
from fenced import to_host

from llmcli.kernels.compiler import compile_kernels
from llmcli.kernels.sources import kernels_folder
from llmcli.sampling.chain import gumbel_from_bits, random_bits, uniform

cupy = pytest.importorskip("cupy")

SOURCE = """
using Word = unsigned long long;

__global__ void words(const Word* seeds, const unsigned* numbers, unsigned purpose, Word* bits) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const philox::Stream stream{seeds[i], numbers[4 * i], numbers[4 * i + 1]};
  bits[i] = philox::random_bits(stream, numbers[4 * i + 2], purpose);
}

__global__ void noise(const Word* bits, double* exact, float* estimate, double* uniforms) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  exact[i] = philox::gumbel(bits[i]);
  estimate[i] = philox::gumbel_estimate(bits[i]);
  uniforms[i] = philox::uniform(bits[i]);
}
"""
BLOCK = 256


def run(device, folder, name, count, arguments):
    header = (kernels_folder() / "common" / "philox.cuh").read_text().replace("#pragma once", "")
    compiled = compile_kernels(header + SOURCE, "test_sample_philox", [name], device.arch)
    path = folder / f"{name}.cubin"
    path.write_bytes(compiled.cubin)
    module = cupy.RawModule(path=str(path))
    module.get_function(compiled.lowered[name])((count // BLOCK,), (BLOCK,), arguments, stream=device.stream)
    device.synchronize()


@pytest.mark.cuda
@pytest.mark.parametrize("purpose", [0, 1])
def test_words_are_the_hosts(device, tmp_path, purpose):
    rng = np.random.default_rng(1)
    count = 64 * BLOCK
    seeds = rng.integers(0, 2**64, count, np.uint64)
    numbers = rng.integers(0, 2**32, (count, 4), np.uint32)
    numbers[: count // 2] %= 1000
    bits = cupy.zeros(count, cupy.uint64)
    run(device, tmp_path, "words", count, (cupy.asarray(seeds), cupy.asarray(numbers), np.uint32(purpose), bits))
    found = to_host(bits)
    for i in range(0, count, 7):
        sample_index, position, token_id, _ = (int(number) for number in numbers[i])
        assert found[i] == random_bits(int(seeds[i]), sample_index, position, token_id, purpose)


@pytest.mark.cuda
def test_noise_is_the_hosts_and_the_estimate_near_it(device, tmp_path):
    rng = np.random.default_rng(2)
    count = 4096 * BLOCK
    bits = rng.integers(0, 2**64, count, np.uint64)
    # Where the winners are, and the other end: all magnitudes of u and of 1 - u.
    magnitudes = rng.integers(0, 64, count // 2).astype(np.uint64)
    bits[: count // 4] >>= magnitudes[: count // 4]
    bits[count // 4 : count // 2] = ~(bits[count // 4 : count // 2] >> magnitudes[count // 4 :])
    bits[:4] = [0, 1, 2**64 - 1, 2**63]
    exact, estimate, uniforms = (cupy.zeros(count, dtype) for dtype in (cupy.float64, cupy.float32, cupy.float64))
    run(device, tmp_path, "noise", count, (cupy.asarray(bits), exact, estimate, uniforms))
    expected = gumbel_from_bits(bits)
    np.testing.assert_allclose(to_host(exact), expected, rtol=1e-14, atol=1e-15)
    error = np.abs(to_host(estimate) - expected)
    assert error.max() < 0.5
    is_ordinary = bits < np.uint64(2**64 - 2**24)
    assert error[is_ordinary].max() < 1e-4
    np.testing.assert_array_equal(to_host(uniforms), (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


@pytest.mark.cuda
def test_the_coin_of_xtc_is_the_hosts(device, tmp_path):
    count = BLOCK
    numbers = np.zeros((count, 4), np.uint32)
    numbers[:, 0] = 3
    numbers[:, 1] = np.arange(count)
    seeds = np.full(count, 0x0123456789ABCDEF, np.uint64)
    bits, uniforms = cupy.zeros(count, cupy.uint64), cupy.zeros(count)
    run(device, tmp_path, "words", count, (cupy.asarray(seeds), cupy.asarray(numbers), np.uint32(1), bits))
    run(device, tmp_path, "noise", count, (bits, cupy.zeros(count), cupy.zeros(count, cupy.float32), uniforms))
    np.testing.assert_array_equal(to_host(uniforms), uniform(0x0123456789ABCDEF, 3, np.arange(count)))
