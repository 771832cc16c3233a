"""Studies: the format of a file; every one is read, compiled, bound and right; how its launches are made and timed."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcli.errors import UsageError
from llmcli.kernels.compiler import compile_kernels
from llmcli.kernels.device import Device
from llmcli.kernels.launches import TYPICAL_CARD, check_launch
from llmcli.kernels.phantom import Phantom
from llmcli.kernels.sources import flatten, flatten_text
from llmcli.lab import compare
from llmcli.lab.catalogue import make_problem
from llmcli.lab.compare import check
from llmcli.lab.matrices import to_storage
from llmcli.lab.notes import Notes, phantoms_of
from llmcli.lab.problem import Problem, find_mismatch
from llmcli.lab.study import (
    KernelCall,
    evaluate,
    excerpt,
    kernel_names,
    kernel_parameters,
    load_study,
    parse_rung,
    parse_sizes,
    parse_study,
    solve,
    study_names,
)
from llmcli.lab.trial import Times, measure

STUDY = """\
// add: c[i] = a[i] + b[i], for a start  Source: a book, chapter 2
// Shapes:  a, b, c [n] f32
//          and nothing else
// Problem: add
// Sizes:   n 1000, 2_000
// Check:   n 1, 33
// Claim:   packed < plain: four at once
// Claim:   plain < packed at n 1000: there is less to decide
// Note:    One line
//          and another.

// A helper.
__device__ float sum(float a, float b) { return a + b; }

// rung plain: one thread a number,
//   nothing else.
// launch: add<<<(n + 255) / 256, 256>>>
__global__ void __launch_bounds__(256) add(const float* __restrict__ a, const float *b, float* c, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;  // rung of nothing
    if (i < n) c[i] = sum(a[i], b[i]);
}

// rung packed: four numbers a thread.
// launch: zero<4, float><<<dim3(n / 4, 2), dim3(16, 8), 4 * n>>>
// launch: llmcli
"""


def test_a_study_is_read() -> None:
    study = parse_study(STUDY, "add.cu")
    assert (study.name, study.title) == ("add", "c[i] = a[i] + b[i], for a start")
    assert (study.source, study.problem) == ("a book, chapter 2", "add")
    assert study.sizes == ({"n": 1000}, {"n": 2000})
    assert study.check_sizes == ({"n": 1}, {"n": 33})
    assert study.note == "One line and another."
    plain, packed = study.rungs
    assert (plain.name, plain.text, plain.line) == ("plain", "one thread a number, nothing else.", 15)
    assert plain.calls == (KernelCall("add", ("(n + 255) / 256",), ("256",)),)
    assert packed.calls == (KernelCall("zero<4, float>", ("n / 4", "2"), ("16", "8"), "4 * n"), "llmcli")
    first, second = study.claims
    assert (first.faster, first.slower, first.sizes, first.reason) == ("packed", "plain", {}, "four at once")
    assert (second.faster, second.sizes) == ("plain", {"n": 1000})


def test_launches_are_repeated_and_overlap() -> None:
    text = "// rung mine: many\n// launch: f<<<n, 32>>> 3 times\n// launch: f<<<1, 32, 8>>> 2 times overlapping\n"
    plain, late = KernelCall("f", ("n",), ("32",)), KernelCall("f", ("1",), ("32",), "8", overlaps=True)
    rung = parse_rung(text, "mine.cu")
    assert (rung.calls, rung.by_stream, rung.text) == ((plain, plain, plain, late, late), False, "many")
    assert parse_rung(f"{text}// start: stream\n", "mine.cu").by_stream


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("// add: c", "// c", "NAME: what it computes"),
        ("// Problem: add\n", "", "Problem:"),
        ("n 1000, 2_000", "n many", "many"),
        ("n 1000, 2_000", "1000", "1000"),
        ("packed < plain: four", "packed < fast: four", "claim"),
        ("packed < plain: four", "packed plain", "claim"),
        ("rung packed", "rung plain", "own name"),
        ("// launch: add<<<(n + 255) / 256, 256>>>\n", "", "rung plain"),
        ("add<<<(n + 255) / 256, 256>>>", "add(n)", "kernel<<<grid, block>>>"),
        ("add<<<(n + 255) / 256, 256>>>", "add<<<256>>>", "kernel<<<grid, block>>>"),
        ("256>>>", "256>>> often", "kernel<<<grid, block>>>"),
    ],
)
def test_a_study_that_is_not_one_is_refused(old: str, new: str, named: str) -> None:
    assert old in STUDY
    with pytest.raises(UsageError, match="add.cu") as refusal:
        parse_study(STUDY.replace(old, new), "add.cu")
    assert named in str(refusal.value)


def test_a_file_of_one_rung() -> None:
    assert parse_rung("// rung mine: as it is\n// launch: f<<<1, 32>>>\n", "mine.cu").name == "mine"
    for text in ("", "__global__ void f() {}\n", STUDY):
        with pytest.raises(UsageError, match=r"mine\.cu has \d rungs"):
            parse_rung(text, "mine.cu")


def test_sizes_are_all_combinations() -> None:
    assert parse_sizes("a 1, 2; b 3", "x.cu") == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("n", 10), ("(n + 3) / 4", 3), ("n / 4 * 4", 8), ("n % 4 - 1", 1), ("  2*(n-1) ", 18)],
)
def test_expressions_are_those_of_c(text: str, value: int) -> None:
    assert evaluate(text, {"n": 10}) == value


@pytest.mark.parametrize(
    "text", ["", "m", "n / 0", "n ** 9", "n.real", "f(n)", "1.5", "'a'", "n if n else 1", "(n", "1" * 201]
)
def test_other_expressions_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="sizes here are n"):
        evaluate(text, {"n": 10})


def test_parameters_are_read() -> None:
    parameters = kernel_parameters(STUDY)
    assert list(parameters) == ["add"]
    assert [(one.name, one.type, one.is_pointer) for one in parameters["add"]] == [
        ("a", "float", True),
        ("b", "float", True),
        ("c", "float", True),
        ("n", "int", False),
    ]


def test_arguments_have_the_kernel_s_types() -> None:
    source = "__global__ void f(const float4* x, __half* y, size_t n, float eps, unsigned int m, T* z) {"
    x, y, n, eps, m, z = kernel_parameters(source)["f"]
    values = {
        "x": Phantom((8,), np.float32, 4096),
        "y": Phantom((8,), np.float32, 8192),
        "z": Phantom((8,), np.uint8, 8192),
        "n": 5,
        "m": 6,
        "eps": np.float32(0.5),
    }
    assert x.argument(values, "f") is values["x"]
    assert z.argument(values, "f") is values["z"]
    for parameter, expected in ((n, np.uint64(5)), (m, np.uint32(6)), (eps, np.float32(0.5))):
        argument = parameter.argument(values, "f")
        assert (argument, argument.dtype) == (expected, expected.dtype)
    with pytest.raises(UsageError, match=r"y is float32, the parameter is `__half\* y`"):
        y.argument(values, "f")
    with pytest.raises(UsageError, match="asks for 'x'; here are n"):
        x.argument({"n": 1}, "f")
    with pytest.raises(UsageError, match="x is a number"):
        x.argument({"x": 1}, "f")
    with pytest.raises(UsageError, match="n is an array"):
        n.argument({"n": values["x"]}, "f")


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


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=pytest.mark.long) if arch != "sm_90" else arch for arch in ARCHS]
)
@pytest.mark.parametrize("name", study_names())
def test_its_kernels_compile(name: str, arch: str, nvrtc: None) -> None:
    study, source = load_study(name)
    kernels = {kernel for rung in study.rungs for kernel in kernel_names(rung)}
    taken = compile_kernels(flatten(source.stem), source.stem, sorted(kernels), arch).resources
    spilled = sum(one.spill_store_bytes + one.spill_load_bytes for one in taken.values())
    assert (spilled > 0) == (name in SPILLING)


@pytest.mark.parametrize("name", study_names())
def test_its_launches_are_bound(name: str, pytestconfig: pytest.Config) -> None:
    """At the sizes that are measured last; at all with --all."""
    study, source = load_study(name)
    for sizes in study.sizes if pytestconfig.getoption("--all") else study.sizes[-1:]:
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
        stored = {key: to_storage(one.values, problem.outputs[key].dtype) for key, one in problem.expected.items()}
        assert set(stored) == set(problem.outputs)
        assert find_mismatch(problem, stored) is None
        nothing = {key: np.full_like(array, np.nan if array.dtype.kind == "f" else -1) for key, array in stored.items()}
        assert find_mismatch(problem, nothing) is not None


@pytest.mark.parametrize("name", study_names())
def test_an_excerpt_is_a_whole_file(name: str) -> None:
    """What --show prints can be tried again."""
    study, source = load_study(name)
    for rung in study.rungs:
        text = excerpt(rung, source)
        again = parse_rung(text, "again.cu")
        assert (again.name, again.text, again.calls) == (rung.name, rung.text, rung.calls)
        assert set(kernel_parameters(text)) == {kernel.partition("<")[0] for kernel in kernel_names(rung)}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if place % 8 else name for place, name in enumerate(study_names())],
)
def test_an_excerpt_can_be_compiled(name: str, nvrtc: None) -> None:
    study, source = load_study(name)
    for rung in study.rungs:
        if kernels := kernel_names(rung):
            compile_kernels(flatten_text(excerpt(rung, source), "again.cu"), "again", kernels, "sm_90")


@pytest.mark.cuda
@pytest.mark.parametrize("name", study_names())
def test_its_rungs_are_right(device: Device, name: str) -> None:
    study, source = load_study(name)
    for problem in problems(name):
        for rung in study.rungs:
            check(device, rung, source, problem)


def test_overlapping_launches_are_bound_as_such() -> None:
    study, source = load_study("launch")
    problem = make_problem("launches", {"num_blocks": 3})
    for rung in study.rungs:
        notes = Notes()
        solve(notes, rung, source, problem, phantoms_of(problem))
        assert {launch.overlaps for launch in notes.launches} == {rung.name == "overlapping"}
        assert {launch.grid for launch in notes.launches} == {(3,)}


def test_rungs_by_stream_are_measured_by_stream(monkeypatch: pytest.MonkeyPatch, nvrtc: None) -> None:
    asked = []

    def note(device: Any, problem: Any, starts: Any, by_stream: Any) -> dict[str, Times]:
        asked.append(set(by_stream))
        return dict.fromkeys(starts, Times(1e-6, 1e-6))

    class Card(Notes):
        arch, facts = "sm_90", TYPICAL_CARD

    monkeypatch.setattr(compare, "measure", note)
    monkeypatch.setattr(compare, "check", lambda *arguments: None)
    study, source = load_study("launch")
    sources = dict.fromkeys((rung.name for rung in study.rungs), source)
    compare.compare_rungs(Card(), study, sources, study.rungs)  # type: ignore[arg-type]
    assert asked == [{"eight_by_stream", "sixty_four_by_stream"}] * len(study.sizes)


@pytest.mark.cuda
@pytest.mark.whole_card
def test_sixty_four_launches_take_longer_than_one(device: Device) -> None:
    study, source = load_study("launch")
    problem = make_problem("launches", {"num_blocks": 1})
    starts = {rung.name: partial(solve, device, rung, source, problem) for rung in study.rungs}
    times = measure(device, problem, starts, by_stream={rung.name for rung in study.rungs if rung.by_stream})
    assert set(times) == set(starts)
    for name in ("sixty_four", "sixty_four_by_stream"):
        assert times[name].median > 10 * times["one"].median
