"""The occupancy calculator against CUDA's own, which its headers hold as C++, and against published cases."""

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from llmcli.kernels import environment
from llmcli.lab.occupancy import MULTIPROCESSORS, occupancy

REFERENCE = Path(__file__).parent / "occupancy_reference.cpp"
BLOCKS = (1, 31, 32, 33, 64, 96, 128, 192, 224, 256, 384, 416, 512, 640, 768, 1000, 1024)
REGISTERS = (8, 16, 31, 32, 33, 40, 48, 56, 63, 64, 65, 72, 80, 96, 104, 128, 129, 168, 200, 255)
SHARED = (0, 1, 128, 1000, 1024, 4096, 8191, 12000, 16384, 20000, 32768, 49152, 50000, 65536, 99 * 1024, 100 * 1024,
          163 * 1024, 227 * 1024, 228 * 1024)  # fmt: skip


def test_equals_cudas_calculator(tmp_path: Path) -> None:
    headers, compiler = environment.header_folder(), shutil.which("g++")
    if headers is None or not (headers / "cuda_occupancy.h").exists() or compiler is None:
        pytest.skip("no cuda_occupancy.h, or no g++")
    program = tmp_path / "reference"
    subprocess.run([compiler, "-w", f"-I{headers}", str(REFERENCE), "-o", str(program)], check=True)
    cases = list(itertools.product(MULTIPROCESSORS, BLOCKS, REGISTERS, SHARED))
    lines = []
    for arch, block, registers, shared_bytes in cases:
        number, limits = int(arch.removeprefix("sm_")), MULTIPROCESSORS[arch]
        static = min(shared_bytes, 48 * 1024) // 2
        lines.append(
            f"{number // 10} {number % 10} {limits.max_threads} {limits.shared_bytes} {limits.shared_bytes_per_block} "
            f"{block} {registers} {static} {shared_bytes - static}"
        )
    told = subprocess.run([str(program)], input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    expected = [tuple(map(int, line.split())) for line in told.splitlines()]
    assert len(expected) == len(cases)
    for (arch, block, registers, shared_bytes), (error, blocks) in zip(cases, expected, strict=True):
        found = occupancy(arch, block=block, registers=registers, shared_bytes=shared_bytes)
        assert error == 0
        assert found.blocks == blocks, (arch, block, registers, shared_bytes, found)


@pytest.mark.parametrize(
    ("arch", "block", "registers", "shared_bytes", "blocks", "share", "limits"),
    [
        ("sm_80", 256, 32, 0, 8, 1.0, ("warps", "registers")),
        ("sm_86", 256, 32, 0, 6, 1.0, ("warps",)),
        ("sm_90", 32, 32, 0, 32, 0.5, ("blocks",)),
        ("sm_90", 512, 128, 0, 1, 0.25, ("registers",)),
        ("sm_90", 128, 32, 113 * 1024, 2, 0.125, ("shared memory",)),
        ("sm_89", 1024, 64, 0, 1, 2 / 3, ("warps", "registers")),
        ("sm_86", 128, 32, 100 * 1024, 0, 0.0, ("shared memory",)),
        ("sm_80", 1024, 65, 0, 0, 0.0, ("registers",)),
        ("sm_80", 1056, 16, 0, 0, 0.0, ("warps",)),
    ],
)
def test_what_limits(
    arch: str, block: int, registers: int, shared_bytes: int, blocks: int, share: float, limits: tuple[str, ...]
) -> None:
    found = occupancy(arch, block=block, registers=registers, shared_bytes=shared_bytes)
    assert (found.blocks, found.limits) == (blocks, limits)
    assert found.share == pytest.approx(share)


def test_an_architecture_without_limits_is_refused() -> None:
    with pytest.raises(ValueError, match="sm_75"):
        occupancy("sm_75", block=32, registers=32, shared_bytes=0)
    with pytest.raises(ValueError, match="at least 1"):
        occupancy("sm_90", block=0, registers=32, shared_bytes=0)
