"""A receipt's facts about program and machine, tested on any machine."""

import platform
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from llmcli import __version__
from llmcli.kernels import environment
from llmcli.kernels.environment import Card, Driver
from llmcli.kernels.sources import kernels_folder, sources_digest
from llmcli.receipt import describe
from llmcli.runners.base import Arithmetic

X86 = "processor\t: 0\nmodel name\t: AMD EPYC 9654\nflags\t\t: fpu sse2 avx2 fma avx512f vmx\n\nprocessor\t: 1\n"
ON_CARD = Arithmetic("float16", "auto", None, ("cupy",))
ARM = "processor\t: 0\nFeatures\t: fp asimd i8mm crc32\n"


def test_versions_are_those_of_what_computes() -> None:
    arithmetic = Arithmetic("bfloat16", "auto", 1, ("torch",), cpu_sources={"codes_product": "12ab"})
    described = describe.describe_program(arithmetic, ["tokenizers"])
    assert list(described) == ["llmcli", "Python", "numpy", "tokenizers", "torch", "kernels/cpu/codes_product.cpp"]
    assert described["kernels/cpu/codes_product.cpp"] == "sha256 12ab"
    assert described["llmcli"] == __version__
    assert described["Python"].endswith(".".join(map(str, sys.version_info[:3])))
    assert described["numpy"] == np.__version__
    assert described["torch"] == metadata.version("torch")
    assert describe.describe_program(arithmetic, ["no-such-package"])["no-such-package"] == "unknown"


@pytest.mark.parametrize(
    ("text", "expected"),
    [(X86, ("AMD EPYC 9654", "avx2 avx512f fma")), (ARM, (platform.processor() or "unknown", "asimd i8mm"))],
)
def test_the_processor(text: str, expected: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(describe, "_CPU_INFO", tmp_path / "cpuinfo")
    described = describe.describe_machine(None)
    assert (described["processor"], described["instructions"]) == expected
    assert described["system"] == f"{platform.system()} {platform.machine()}"


def test_a_system_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "_CPU_INFO", tmp_path / "none")
    monkeypatch.setattr(describe.platform, "processor", str)
    described = describe.describe_machine(None)
    assert (described["processor"], described["instructions"]) == ("unknown", "")


def test_variables_that_change_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    assert "variable ATEN_CPU_CAPABILITY" not in describe.describe_machine(None)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    described = describe.describe_machine(None)
    assert described["variable ATEN_CPU_CAPABILITY"] == "default"
    assert "hf_secret" not in str(described)


def test_a_card_and_its_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text("580.159.03\n")
    cards = (Card(0, "NVIDIA One", (8, 0), 1), Card(1, "NVIDIA Two", (9, 0), 1))
    monkeypatch.setattr(describe, "find_driver", lambda: Driver((13, 0), cards))
    monkeypatch.setattr(environment, "_DRIVER_VERSION", tmp_path / "version")
    described = describe.describe_machine(1)
    names = ("card", "compute capability", "driver", "driver's CUDA")
    assert [described[name] for name in names] == ["NVIDIA Two", "9.0", "580.159.03", "13.0"]
    assert "card" not in describe.describe_machine(None)

    versions = {"cupy-cuda13x": "14.2.0", "nvidia-cuda-nvrtc": "13.0.88", "nvidia-cublas": "13.1.0", "numpy": "2.0.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    program = describe.describe_program(ON_CARD, [])
    assert program["kernels"] == f"sha256 {sources_digest()}"
    found = {name: value for name, value in program.items() if name not in ("llmcli", "Python", "kernels")}
    assert found == {"numpy": "2.0.0", "cupy-cuda13x": "14.2.0", "NVRTC": "13.0.88", "cuBLAS": "13.1.0"}
    del versions["nvidia-cublas"]
    assert describe.describe_program(ON_CARD, [])["cuBLAS"] == "the system's"


def test_every_kernel_source_counts(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    (folder / "common").mkdir(parents=True)
    (folder / "a.cu").write_text("one")
    (folder / "common" / "b.cuh").write_text("two")
    (folder / "README.md").write_text("three")
    digests = {sources_digest(folder)}
    (folder / "README.md").write_text("four")
    (folder / "studies").mkdir()
    (folder / "studies" / "d.cu").write_text("no part of the engine")
    assert sources_digest(folder) in digests
    for name, text in (("a.cu", "onE"), ("common/b.cuh", "twO"), ("c.cu", "")):
        (folder / name).write_text(text)
        digests.add(sources_digest(folder))
    (folder / "c.cu").rename(folder / "d.cu")
    digests.add(sources_digest(folder))
    assert len(digests) == 5
    assert sources_digest() == sources_digest(kernels_folder())
