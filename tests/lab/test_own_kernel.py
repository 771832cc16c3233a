"""A user's kernel: refusals without a card; on a card, right ones pass and planted faults are found."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from own_kernel_example import FAULTS, NAME, example, write_example
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.checkpoint.random_weights import shape_model
from llmcli.errors import DeviceError, KernelCompileError, UsageError
from llmcli.kernels.cache import KernelCache
from llmcli.kernels.device import Device
from llmcli.kernels.launches import TYPICAL_CARD
from llmcli.kernels.sources import kernels_folder
from llmcli.lab import own_kernel, verify
from llmcli.lab.engine import CASES, KERNELS
from llmcli.lab.notes import phantoms_of
from llmcli.lab.own_kernel import OwnKernel, read_own_kernels
from llmcli.lab.study import kernel_parameters
from llmcli.lab.trial import Times
from llmcli.lab.verify import KernelVerdict, check_own_kernel, launched_names, prepare_own_kernels, time_own_kernel
from llmcli.runners.cuda.step.arena import free_bytes

LAUNCHED = {"dtype": "auto", "kv_cache": "auto", "context": 128, "num_rows": 1}


def read(stem: str, path: Path) -> OwnKernel:
    (found,) = read_own_kernels([f"{stem}={path}"])
    return found


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.cu"
    path.write_text(text, encoding="utf-8")
    return path


def own_parameters(text: str) -> str:
    return ", ".join(parameter.declared for parameter in kernel_parameters(text)[NAME])


@pytest.mark.parametrize("stem", CASES)
def test_every_kernel_with_checks_is_its_own_replacement(stem: str) -> None:
    """So all of their parameters are parsed."""
    assert read(stem, kernels_folder() / f"{stem}.cu").stem == stem


def test_a_file_that_wraps_ours(tmp_path: Path) -> None:
    found = read("embedding", write(tmp_path, '#include "embedding.cu"\n'))
    assert '#line 1 "kernels/embedding.cu"' in found.text
    assert str(found) == f"embedding from {tmp_path / 'mine.cu'}"
    assert found.num_cases == len(list(CASES["embedding"].checks())) > 20


def test_a_folder_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_example(tmp_path)
    assert read(NAME, Path("~/mine.cu")).path == tmp_path / "mine.cu"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("embedding", "--kernel is 'embedding', expected NAME=FILE, such as embedding=mine.cu"),
        ("embedding=", "expected NAME=FILE"),
        ("=mine.cu", "there is no kernel ''"),
        ("embeding=mine.cu", "there is no kernel 'embeding'; did you mean embedding?"),
        ("zzz=mine.cu", "there is no kernel 'zzz'; there are add_parts, append_tokens, "),
        ("embedding=none.cu", "none.cu cannot be read: No such file"),
        ("embedding=.", "is not a regular file"),
    ],
)
def test_names_and_files_that_cannot_be(value: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        read_own_kernels([value])
    assert told in str(caught.value)


def test_a_kernel_without_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(own_kernel, "CASES", {"embedding": CASES["embedding"]})
    with pytest.raises(
        UsageError, match="--kernel add_parts: llmcli has no reference checks of this kernel, .* of embedding"
    ):
        read(NAME, write_example(tmp_path))


def test_a_kernel_twice(tmp_path: Path) -> None:
    path = write_example(tmp_path)
    with pytest.raises(UsageError, match=rf"names add_parts twice: {path} and {path}"):
        read_own_kernels([f"{NAME}={path}", f"{NAME}={path}"])


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("VECTOR, size);\n", "VECTOR, size);  // 2 \u00b5s\n", "mine.cu:8: '\u00b5' is not an ASCII character"),
        ("VECTOR, size);\n", "VECTOR, size);\0\n", r"mine.cu:8: '\x00' is not"),
        ("common/launch.cuh", "common/none.cuh", "common/none.cuh does not exist, included from mine.cu:2"),
        ("add_parts(", "add(", "mine.cu does not define __global__ void add_parts(float* parts, float* out,"),
        ("const float* parts, float* out", "float* out, const float* parts", "takes (float* out,"),
        (", int size", "", "int num_parts), expected (float* parts, float* out, int num_parts, int size"),
        ("int size)", "long long size)", "long long size), expected ("),
        ("int size)", "int* size)", "int* size), expected ("),
    ],
)
def test_sources_that_cannot_be(before: str, after: str, told: str, tmp_path: Path) -> None:
    text = example()
    assert text.count(before) == 1
    with pytest.raises(UsageError) as caught:
        read(NAME, write(tmp_path, text.replace(before, after)))
    assert told in str(caught.value)


def test_pointers_and_numbers_may_be_written_otherwise(tmp_path: Path) -> None:
    text = (
        example()
        .replace("const float* parts", "float const * __restrict__ parts")
        .replace("int size)", "int32_t size)")
    )
    assert own_parameters(text).endswith("int32_t size")
    read(NAME, write(tmp_path, text))


def opened(folder: Path, kernels: list[OwnKernel], loaded: list[Path]) -> Any:
    """A device without a card, whose modules record the files that they load."""
    device = object.__new__(Device)
    cache = KernelCache(folder / "cache", own={one.stem: one.text for one in kernels})
    device.arch, device._kernels, device.own_sources, device.uses_own = "sm_90", {}, cache.own, True
    device._caches = {True: cache, False: cache.without_own()}
    module = SimpleNamespace(get_function=lambda lowered: None)
    device._cupy = SimpleNamespace(RawModule=lambda path: loaded.append(Path(path)) or module)
    return device


class NoCard(Device):
    """Facts of a card on machines without one."""

    facts = TYPICAL_CARD  # type: ignore[assignment]


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_example_of_the_docs_compiles(arch: str, tmp_path: Path) -> None:
    kernel = read(NAME, write_example(tmp_path))
    names = launched_names(TYPICAL_CARD, CASES[NAME]).union(KERNELS[NAME].variants)
    cache = KernelCache(tmp_path / "cache", own={NAME: kernel.text})
    found = cache.get_all([(NAME, name) for name in names], arch)
    ours = cache.without_own().get_all([(NAME, name) for name in names], arch)
    assert len(found) == 2
    assert not {one.cubin for one in found.values()} & {one.cubin for one in ours.values()}
    assert all(one.resources[name].spill_store_bytes == 0 for (_, name), one in found.items())


@pytest.mark.usefixtures("nvrtc")
def test_own_and_engine_kernels_are_loaded_once_each(tmp_path: Path) -> None:
    loaded: list[Path] = []
    device = opened(tmp_path, [read(NAME, write_example(tmp_path))], loaded)
    wanted = {NAME: KERNELS[NAME].variants, "embedding": KERNELS["embedding"].variants}
    device.prepare_all(wanted)
    own = set(loaded)
    with device.engine_kernels():
        device.prepare_all(wanted)
        assert device.uses_own is False
    device.prepare_all(wanted)
    assert device.uses_own is True
    assert len(loaded) == len(set(loaded)) == 10  # embedding has only one source
    assert {path.name.partition("-")[0] for path in set(loaded) - own} == {NAME}


@pytest.mark.usefixtures("nvrtc")
def test_what_checks_and_model_launch_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = read(NAME, write_example(tmp_path))
    device = opened(tmp_path, [kernel], [])
    device.__class__ = NoCard
    sizes = {"hidden_size": 256, "dtype": torch.bfloat16}  # whose products have parts
    model = open_model(write_tiny_llama(tmp_path / "model", with_tokenizer=False, **sizes))
    assert prepare_own_kernels(device, [kernel], model, **LAUNCHED) == []
    ready = {(is_own, stem) for is_own, stem, _ in device._kernels}
    assert {(True, NAME), (False, NAME), (False, "gemv"), (False, "sample_token")} <= ready
    assert [stem for is_own, stem in ready if is_own] == [NAME]
    monkeypatch.setattr(verify, "launched_names", lambda card, cases: {"add_parts<1>"})
    assert prepare_own_kernels(device, [kernel], model, **LAUNCHED) == ["add_parts<4>"]


def test_a_kernel_that_the_model_does_not_launch(tmp_path: Path) -> None:
    kernel = read("quantize_rows", kernels_folder() / "quantize_rows.cu")
    model = shape_model("Llama-3.2-1B", "int8")
    device: Any = SimpleNamespace(facts=TYPICAL_CARD)
    with pytest.raises(
        UsageError,
        match="--kernel quantize_rows: the model does not launch it; it launches add_parts, append_tokens, att",
    ):
        prepare_own_kernels(device, [kernel], model, **LAUNCHED)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            "grid_dependency_wait",
            "grid_wait",
            r"kernel add_parts does not compile for sm_90: mine\.cu\(9\): error: identifier \"grid_wait",
        ),
        ("template <int VECTOR>", "constexpr int VECTOR = 1;", r"sm_90: .*; what is launched is add_parts<\d>$"),
    ],
)
def test_what_does_not_compile(before: str, after: str, told: str, tmp_path: Path) -> None:
    kernel = read(NAME, write(tmp_path, example().replace(before, after)))
    with pytest.raises(KernelCompileError, match=told):
        opened(tmp_path, [kernel], []).prepare_all({NAME: KERNELS[NAME].variants})


def test_a_failed_check_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel = read(NAME, write_example(tmp_path))
    verdict = KernelVerdict(NAME, 54, 3, np.inf, "num_rows 6: out[1, 3] is 2, expected 1 within 0.1")
    monkeypatch.setattr(verify, "verify_kernel", lambda device, cases: verdict)
    device: Any = None
    with pytest.raises(DeviceError, match=r"mine\.cu is wrong in 3 of 54 cases: num_rows 6: out\[1, 3\] is 2, exp"):
        check_own_kernel(device, kernel)
    monkeypatch.setattr(verify, "verify_kernel", lambda device, cases: KernelVerdict(NAME, 54, 0, 0.5, ""))
    check_own_kernel(device, kernel)


def test_a_kernel_that_crashes_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(device: Device, cases: object) -> None:
        raise DeviceError("the card failed: cudaErrorIllegalAddress")

    monkeypatch.setattr(verify, "verify_kernel", fail)
    device: Any = None
    with pytest.raises(DeviceError, match=r"^add_parts from .*mine\.cu did not come to its end: the card failed: cuda"):
        check_own_kernel(device, read(NAME, write_example(tmp_path)))


def test_alone_both_solve_the_same_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launches: list[tuple[str, bool]] = []
    loaded: list[Path] = []
    device = opened(tmp_path, [read(NAME, write_example(tmp_path))], loaded)
    monkeypatch.setattr(Device, "launch", lambda self, stem, name, **rest: launches.append((stem, self.uses_own)))

    def measure(card: Device, problem: Any, starts: Any) -> dict[str, Times]:
        for start in starts.values():
            start(phantoms_of(problem))
        return {"own": Times(2e-6, 1e-6), "engine": Times(3e-6, 2e-6)}

    monkeypatch.setattr(verify, "measure", measure)
    monkeypatch.setattr(verify, "release_memory", lambda: launches.append(("released", False)))
    times = time_own_kernel(device, read(NAME, tmp_path / "mine.cu"))
    assert launches == [(NAME, True), (NAME, False), ("released", False)]
    assert (times.own.median, times.engine.median) == (2e-6, 3e-6)
    assert times.problem == "num_parts 3, num_rows 256, num_columns 4,096"


def own_device(kernel: OwnKernel) -> Device:
    device = Device.open(0, {kernel.stem: kernel.text})
    device.activate()
    return device


@pytest.mark.cuda
@pytest.mark.whole_card
def test_the_example_is_right(tmp_path: Path) -> None:
    kernel = read(NAME, write_example(tmp_path))
    device = own_device(kernel)
    model = open_model(write_tiny_llama(tmp_path / "model", with_tokenizer=False, dtype=torch.bfloat16))
    prepare_own_kernels(device, [kernel], model, **LAUNCHED)
    before = free_bytes()
    check_own_kernel(device, kernel)
    times = time_own_kernel(device, kernel)
    assert free_bytes() >= before - 64 * 2**20  # a plan counts it
    assert 0 < times.own.fastest <= times.own.median < 1e-3
    assert 0 < times.engine.fastest <= times.engine.median < 1e-3


@pytest.mark.cuda
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_told_with_its_element(fault: str, tmp_path: Path) -> None:
    kernel = read(NAME, write_example(tmp_path, fault))
    with pytest.raises(
        DeviceError, match=r"mine\.cu is wrong in \d+ of \d+ cases: .*num_rows \d.* out\[\d+, \d+\] is "
    ):
        check_own_kernel(own_device(kernel), kernel)


@pytest.mark.cuda
def test_a_write_beside_the_output_is_told(tmp_path: Path) -> None:
    text = example().replace("    const int begin", "    if (blockIdx.x == 0) out[size] = 0;\n    const int begin")
    kernel = read(NAME, write(tmp_path, text))
    with pytest.raises(DeviceError, match="bytes beside out were overwritten"):
        check_own_kernel(own_device(kernel), kernel)


@pytest.mark.cuda
@pytest.mark.whole_card
@pytest.mark.parametrize("stem", ["embedding", "gemv", "stage_wide"])
def test_ours_passes_as_a_users(stem: str) -> None:
    """And may be timed alone, on its typical problem."""
    kernel = read(stem, kernels_folder() / f"{stem}.cu")
    device = own_device(kernel)
    device.prepare_all({stem: launched_names(device.facts, CASES[stem])})
    check_own_kernel(device, kernel)
    times = time_own_kernel(device, kernel)
    assert times.own.median == pytest.approx(times.engine.median, rel=0.2)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("right", "fault"),
    [
        ("static_cast<int>(token_id) == draft_id", "true"),  # keeps every draft
        ("!(moves && static_cast<int>(token_id) == draft_id)", "true"),  # keeps none
        ("if (next_row != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *next_row = -1;", ""),
    ],
)
def test_a_sampler_that_takes_drafts_wrong_is_told(right: str, fault: str, tmp_path: Path) -> None:
    text = (kernels_folder() / "sample_token.cu").read_text(encoding="utf-8")
    assert text.count(right) == 1
    kernel = read("sample_token", write(tmp_path, text.replace(right, fault)))
    with pytest.raises(DeviceError, match=r"wrong in [1-4] of \d+ cases: .*drafts"):
        check_own_kernel(own_device(kernel), kernel)
