"""Every study: it is read, its kernels compile for three architectures, its launches are bound, its rungs are right."""

from pathlib import Path

import numpy as np
import pytest

from llmcli.kernels.cache import KernelCache
from llmcli.kernels.compiler import KernelResources, compile_kernels
from llmcli.kernels.device import Device
from llmcli.kernels.launches import check_launch
from llmcli.kernels.sources import flatten_text
from llmcli.lab.catalogue import make_problem
from llmcli.lab.compare import check
from llmcli.lab.notes import Notes, phantoms_of
from llmcli.lab.problem import Problem, find_mismatch
from llmcli.lab.study import excerpt, kernel_names, kernel_parameters, load_study, parse_rung, solve, study_names

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("sm_80", "sm_90", "sm_120")  # the first, ours, the newest; the engine's kernels are compiled for all
MAX_LINES, MAX_COLUMNS = 300, 120
# Studies whose subject is registers: one of their kernels must spill.
SPILLING = frozenset({"launch_bounds"})


def problems(name: str) -> list[Problem]:
    study, _ = load_study(name)
    return [make_problem(study.problem, dict(sizes)) for sizes in study.check_sizes]


@pytest.mark.parametrize("name", study_names())
def test_a_study_keeps_to_the_rules(name: str) -> None:
    study, _ = load_study(name)
    text = (ROOT / "kernels" / "studies" / f"{name}.cu").read_text(encoding="ascii")
    assert study.name == name
    assert study.source, "say where the lesson is from"
    assert len(study.rungs) >= 2
    assert study.claims
    for claim in study.claims:
        assert any(claim.sizes.items() <= sizes.items() for sizes in study.sizes), claim
    assert len(text.splitlines()) <= MAX_LINES
    assert max(map(len, text.splitlines())) <= MAX_COLUMNS
    assert "printf" not in text


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", study_names())
def test_its_kernels_compile(name: str, arch: str, nvrtc: None) -> None:
    study, source = load_study(name)
    kernels = {(source.stem, kernel) for rung in study.rungs for kernel in kernel_names(rung)}
    found = KernelCache().get_all(kernels, arch)  # the user's: the tests of commands find them there
    taken: list[KernelResources] = [one for kernel in found.values() for one in kernel.resources.values()]
    spilled = sum(one.spill_store_bytes + one.spill_load_bytes for one in taken)
    assert (spilled > 0) == (name in SPILLING)


@pytest.mark.parametrize("name", study_names())
def test_its_launches_are_bound(name: str) -> None:
    study, source = load_study(name)
    for sizes in study.sizes:
        problem = make_problem(study.problem, dict(sizes))
        for rung in study.rungs:
            notes = Notes()
            solve(notes, rung, source, problem, phantoms_of(problem))
            for launch in notes.launches:
                check_launch(launch, notes.shared_bytes_per_block)


@pytest.mark.parametrize("name", study_names())
def test_its_reference_is_exact_and_tells_zeros(name: str) -> None:
    """The expected values, rounded to the outputs' types, pass; unwritten outputs do not."""
    for problem in problems(name):
        stored = {key: rounded(one.values, problem.outputs[key].dtype) for key, one in problem.expected.items()}
        assert set(stored) == set(problem.outputs)
        assert find_mismatch(problem, stored) is None
        nothing = {key: np.full_like(array, np.nan if array.dtype.kind == "f" else -1) for key, array in stored.items()}
        assert find_mismatch(problem, nothing) is not None


def rounded(values: np.ndarray, dtype: object) -> np.ndarray:
    if np.dtype(dtype) != np.uint16:  # type: ignore[arg-type]
        return values.astype(dtype)  # type: ignore[call-overload, no-any-return]
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("name", study_names())
def test_an_excerpt_is_a_whole_file(name: str, nvrtc: None) -> None:
    """What --show prints can be compiled, and tried again."""
    study, source = load_study(name)
    for rung in study.rungs:
        text = excerpt(rung, source)
        again = parse_rung(text, "again.cu")
        assert (again.name, again.text, again.calls) == (rung.name, rung.text, rung.calls)
        kernels = kernel_names(rung)
        assert set(kernel_parameters(text)) == {kernel.partition("<")[0] for kernel in kernels}
        if kernels:
            compile_kernels(flatten_text(text, "again.cu"), "again", kernels, "sm_90")


@pytest.mark.cuda
@pytest.mark.parametrize("name", study_names())
def test_its_rungs_are_right(device: Device, name: str) -> None:
    study, source = load_study(name)
    for problem in problems(name):
        for rung in study.rungs:
            check(device, rung, source, problem)
