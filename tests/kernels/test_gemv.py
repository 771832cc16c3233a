"""gemv against float64: formats, tails, norm, bias, epilogues; and a row's bits among others."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from emulated import EmulatedDevice, HostArray, aligned, can_emulate, solve
from fenced import assert_launches_agree
from right import assert_right
from uploaded import upload

from llmcli.errors import KernelCompileError
from llmcli.kernels.chunks import num_chunks, num_spans
from llmcli.kernels.compiler import compile_kernels
from llmcli.kernels.device import Device
from llmcli.kernels.gemv import STATIC_SHARED_BYTES, NextRows, RowNorm, gemv, gemv_cost, norm_sums, plan_gemv
from llmcli.kernels.phantom import Phantom
from llmcli.kernels.sources import flatten
from llmcli.kernels.stage_wide import stage_wide
from llmcli.kernels.tiles import TileLayout, fastest_widening, tile_layout
from llmcli.lab.cases.gemv import IN_HALVES, Case, make_case, problem_of
from llmcli.lab.matrices import arrays_of, matrix_of, random_matrix, tiles_of
from llmcli.lab.notes import Notes, phantoms_of
from llmcli.lab.problem import ENGINE, Problem
from llmcli.lab.trial import run_once

IDS = ["-".join(map(str, form.values())) for form in IN_HALVES]
# Each widening of each type, and each kind of scales.
SOME = [IN_HALVES[number] for number in (1, 4, 7, 11, 14, 16, 18)]


def case_of(form: dict[str, Any], num_outputs: int, num_inputs: int, num_rows: int, **options: bool) -> Case:
    return make_case(
        random_matrix(num_inputs, num_rows=num_outputs, num_inputs=num_inputs, **form), num_rows, **options
    )


def rows_of(case: Case, rows: slice) -> Case:
    some = {name: getattr(case, name) for name in ("x", "row_scales", "hidden", "before")}
    return replace(case, **{name: None if array is None else array[rows] for name, array in some.items()})


class OtherCard:
    """A device as a card with other facts: then plans have other warps, slots, clusters and blocks."""

    def __init__(self, device: Any, **facts: Any):
        self.__dict__.update(facts, _device=device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


# Tiles in turn, no clusters, few slots and rows at a time.
OTHER_CARDS: list[dict[str, Any]] = [
    {},
    {"num_multiprocessors": 3},
    {"num_multiprocessors": 2, "can_cluster": False, "shared_bytes_per_block": 130 * 1024},
]
Solve = Callable[[Problem, dict[str, Any]], np.ndarray]  # the outputs of a problem, with such facts


def check_bits(case: Case, solve_on: Solve) -> None:
    """A row has the bits that it has alone, among any others, and with any plan."""
    expected = solve_on(problem_of(case), {}).view(np.uint32)
    for rows in (slice(None), slice(0, 1), slice(1, 4)):
        for facts in OTHER_CARDS:
            found = solve_on(problem_of(rows_of(case, rows)), facts)
            np.testing.assert_array_equal(found.view(np.uint32), expected[rows])


# On a card


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(16, 40), (35, 72), (48, 176), (100, 1001), (40, 2304), (1040, 1024), (64, 11008)]
)
@pytest.mark.parametrize("form", IN_HALVES, ids=IDS)
def test_formats_and_tails(device: Device, form: dict[str, Any], num_outputs: int, num_inputs: int) -> None:
    """One row and nine, with scales and, where rows are whole vectors, with a norm."""
    for num_rows in (1, 9):
        assert_right(device, problem_of(case_of(form, num_outputs, num_inputs, num_rows, has_scales=True)))
        if num_inputs % 8 == 0:
            assert_right(device, problem_of(case_of(form, num_outputs, num_inputs, num_rows, has_norm=True)))


@pytest.mark.cuda
@pytest.mark.parametrize("num_rows", [1, 4, 8, 11])
@pytest.mark.parametrize("form", SOME, ids=str)
def test_every_epilogue(device: Device, form: dict[str, Any], num_rows: int) -> None:
    """44 columns of SwiGLU leave the last tile half used."""
    before = np.random.default_rng(3).standard_normal((num_rows, 96)).astype(np.float32)
    case = replace(case_of(form, 96, 320, num_rows, has_norm=True, has_bias=True), before=before)
    for epilogue, num_outputs in (("store", 96), ("add", 96), ("swiglu", 44)):
        assert_right(device, problem_of(case, epilogue, num_outputs))  # type: ignore[arg-type]
    assert_right(device, problem_of(case, "add", leads=True))


@pytest.mark.cuda
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(9, 704), (890, 600), (64, 9000)])
@pytest.mark.parametrize("form", IN_HALVES, ids=IDS)
def test_bits_depend_on_the_matrix_and_the_row_alone(
    device: Device, form: dict[str, Any], num_outputs: int, num_inputs: int, has_norm: bool
) -> None:
    def solve_on(problem: Problem, facts: dict[str, Any]) -> np.ndarray:
        return run_once(device, problem, partial(problem.solvers[ENGINE], OtherCard(device, **facts)))["out"]

    check_bits(case_of(form, num_outputs, num_inputs, 11, has_scales=not has_norm, has_norm=has_norm), solve_on)


@pytest.mark.cuda
@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("form", SOME, ids=str)
def test_every_launch_of_a_whole_product_has_the_same_bits(device: Device, form: dict[str, Any], num_rows: int) -> None:
    """A slot that is filled again too early shows in one launch of many; launches overlap."""
    import cupy

    case = case_of(form, 4096, 4096, num_rows, has_scales=True)
    given = {"matrix": upload(tiles_of(case.stored)), "x": cupy.asarray(case.x)}
    device.synchronize()  # gemv reads weights before earlier kernels end
    expected = run_once(device, problem_of(case), partial(problem_of(case).solvers[ENGINE], device))["out"]
    scales = cupy.asarray(case.row_scales)
    assert_launches_agree(lambda out: gemv(device, **given, row_scales=scales, out=out), expected, 200)


@pytest.mark.cuda
@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("num_inputs", [384, 14336])
def test_scales_of_blocks_give_the_bits_of_a_scale_for_each_row(device: Device, num_rows: int, num_inputs: int) -> None:
    blocks = random_matrix(7, "fp8", 296, num_inputs, 128, "block")
    assert blocks.scales is not None
    rows = replace(blocks, scale_type="float32", scales=blocks.scales.repeat(8, axis=0))
    problems = [problem_of(make_case(stored, num_rows)) for stored in (blocks, rows)]
    first, second = (run_once(device, one, partial(one.solvers[ENGINE], device))["out"] for one in problems)
    assert np.array_equal(first.view(np.int32), second.view(np.int32))


@pytest.mark.cuda
def test_what_is_no_number_shows_in_its_row_alone(device: Device) -> None:
    case = case_of(SOME[0], 32, 256, 4)
    case.x[:2, 5] = np.nan, np.inf
    problem = problem_of(case)
    found = run_once(device, problem, partial(problem.solvers[ENGINE], device))["out"]
    assert not np.isfinite(found[:2]).any()
    assert np.isfinite(found[2:]).all()


def lead_and_stage(device: Any, upload: Callable[[np.ndarray], Any]) -> tuple[Any, Any]:
    """A product of what the product before has left for it, and of the same rows as stage_wide rounds them.

    Some rows need a power of two: small ones, and one with an outlier.
    """
    first, second = (case_of(SOME[0], 600, num_inputs, 8) for num_inputs in (256, 600))
    before = np.random.default_rng(5).standard_normal((8, 600)).astype(np.float32)
    before[1:3] *= np.float32(2.0**-30)
    before[3, 77] = 1e7
    first.x[1:3] = 0
    weight = upload(np.random.default_rng(6).uniform(0.5, 2, 600).astype(np.float32))
    matrices = [matrix_of(one.stored.layout, given(one, upload), one.stored) for one in (first, second)]
    hidden, x = upload(before), upload(first.x)
    rows, sums = upload(np.full((8, 640), np.nan, np.float16)), upload(np.zeros((8, norm_sums(600)), np.float32))
    led, staged = (upload(np.zeros((8, 600), np.float32)) for _ in range(2))
    scales = upload(np.zeros(8, np.float32))
    gemv(device, matrix=matrices[0], x=x, out=hidden, epilogue="add", next_rows=NextRows(weight, rows[:, :600], sums))
    gemv(device, matrix=matrices[1], x=rows[:, :600], out=led, norm=RowNorm(sums, hidden, weight, 1e-5))
    stage_wide(device, x=hidden, unit_inputs=0, out=rows, row_scales=scales, norm_weight=weight, eps=1e-5)
    gemv(device, matrix=matrices[1], x=rows[:, :600], out=staged, row_scales=scales)
    return led, staged


def given(case: Case, upload: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    return {name: upload(array) for name, array in arrays_of(tiles_of(case.stored)).items()}


@pytest.mark.cuda
def test_a_product_leads_as_rows_are_staged(device: Device) -> None:
    import cupy

    led, staged = lead_and_stage(device, cupy.asarray)
    device.synchronize()
    assert np.isfinite(cupy.asnumpy(staged)).all()
    np.testing.assert_array_equal(cupy.asnumpy(led).view(np.uint32), cupy.asnumpy(staged).view(np.uint32))


# Without a card


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDevice:
    if not can_emulate():
        pytest.skip("no compiler that can emulate a card")
    return EmulatedDevice(tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("form", [SOME[0], SOME[3]], ids=str)
def test_emulated_bits_depend_on_the_matrix_and_the_row_alone(emulated: EmulatedDevice, form: dict[str, Any]) -> None:
    cases = [case_of(form, 72, 600, 5, has_scales=True), case_of(form, 72, 600, 5, has_norm=True)]
    launched: set[str] = set()

    def note(notes: Any) -> None:
        def solve_on(problem: Problem, facts: dict[str, Any]) -> np.ndarray:
            problem.solvers[ENGINE](OtherCard(notes, **facts), phantoms_of(problem))  # type: ignore[arg-type]
            return np.zeros((problem.sizes["num_rows"], 72), np.float32)

        for case in cases:
            check_bits(case, solve_on)
        launched.update(launch.name for launch in notes.launches)

    emulated.compile(note)
    assert len(launched) >= 6
    for case in cases:
        check_bits(case, lambda problem, facts: solve(OtherCard(emulated, **facts), problem)["out"])  # type: ignore[arg-type]


def test_an_emulated_product_leads_as_rows_are_staged(emulated: EmulatedDevice) -> None:
    emulated.compile(lambda notes: lead_and_stage(notes, lambda array: Phantom(array.shape, array.dtype, 1 << 20)))
    led, staged = lead_and_stage(emulated, lambda array: HostArray(aligned(array)))
    assert np.isfinite(staged.values).all()
    np.testing.assert_array_equal(led.values.view(np.uint32), staged.values.view(np.uint32))


def norm_of(**shapes: tuple[int, ...]) -> RowNorm:
    shapes = {"sums": (3, 16), "hidden": (3, 128), "weight": (128,), **shapes}
    return RowNorm(**{name: Phantom(shape, np.float32, 1 << 30) for name, shape in shapes.items()}, eps=1e-5)


NEXT = NextRows(
    Phantom((40,), np.float32, 1 << 30), Phantom((3, 40), np.float16, 1 << 30), Phantom((3, 8), np.float32, 1 << 30)
)


def arguments(**changes: Any) -> dict[str, Any]:
    layout = tile_layout("int8", 40, 128, None, "float32")
    given = {
        "matrix": layout.place(Phantom((layout.arena_bytes,), np.uint8, 1 << 20)),
        "x": Phantom((3, 128), np.float16, 2 << 20),
        "out": Phantom((3, 40), np.float32, 3 << 20),
    }
    return {**given, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": Phantom((3, 64), np.float16, 1 << 30)}, r"x is \[3, 64\], expected"),
        ({"x": Phantom((3, 128), np.float32, 1 << 30)}, "x is float32, expected float16"),
        ({"out": Phantom((3, 16), np.float32, 1 << 30)}, "out has 16 columns, expected 3 tiles of 16"),
        ({"epilogue": "swiglu"}, "out is float32, expected float16"),
        ({"epilogue": "swiglu", "out": Phantom((3, 40), np.float16, 1 << 30)}, "out has 40 columns"),
        ({"bias": Phantom((40,), np.float32, 1 << 30)}, r"bias is \[40\], expected \[48\]"),
        ({"norm": norm_of(sums=(3, 8))}, r"norm.sums is \[3, 8\], expected \[3, 16\]"),
        ({"norm": norm_of(hidden=(2, 128))}, r"norm.hidden is \[2, 128\]"),
        ({"norm": norm_of(weight=(64,))}, r"norm.weight is \[64\]"),
        ({"next_rows": NEXT}, "the epilogue is store, expected add where next_rows are written"),
        (
            {"next_rows": replace(NEXT, weight=Phantom((39,), np.float32, 1 << 30)), "epilogue": "add"},
            "next_rows.weight",
        ),
        ({"next_rows": replace(NEXT, x=Phantom((3, 39), np.float16, 1 << 30)), "epilogue": "add"}, "next_rows.x is"),
        ({"row_scales": Phantom((2,), np.float32, 1 << 30)}, r"row_scales is \[2\]"),
    ],
)
def test_wrong_arrays_are_refused(changes: dict[str, Any], message: str) -> None:
    notes: Any = Notes()
    gemv(notes, **arguments())
    assert [launch.stem for launch in notes.launches] == ["gemv"]
    with pytest.raises(ValueError, match=f"gemv: {message}"):
        gemv(notes, **arguments(**changes))


def test_rows_that_are_no_whole_vectors_are_refused() -> None:
    notes: Any = Notes()
    layout = tile_layout("int8", 40, 100, None, "float32")
    given = arguments(matrix=layout.place(Phantom((layout.arena_bytes,), np.uint8, 1 << 20)))
    x = Phantom((3, 104), np.float16, 1 << 30)[:, :100]
    with pytest.raises(ValueError, match="a norm of 100 inputs, expected a multiple of 8"):
        gemv(notes, **{**given, "x": x, "norm": norm_of(hidden=(3, 100), weight=(100,))})
    with pytest.raises(ValueError, match="rows of x lie 200 bytes apart, expected a multiple of 16"):
        gemv(notes, **{**given, "x": Phantom((3, 100), np.float16, 1 << 30)})


# Multiprocessors, shared memory a block, clusters; half an H100 looks like a partitioned card.
CARDS = {
    "H200": (132, 232448, True),
    "half an H100": (61, 232448, True),
    "A100": (108, 166912, False),
    "RTX 4090": (128, 101376, False),
    "RTX 5090": (170, 101376, True),
    "RTX 3050": (20, 101376, False),
}
LAYOUTS = [
    tile_layout("int8", 12288, 4096, 128, "bfloat16"),
    tile_layout("int8", 4096, 14336, None, "float32"),
    tile_layout("int4", 28672, 8192, 32, "float32", is_symmetric=False),
    tile_layout("bfloat16", 128256, 4096),
    tile_layout("fp8", 4096, 28672, 128, "block"),
    *(tile_layout("int8", 16 * num_tiles, 512, 64, "float16") for num_tiles in (1, 9, 131)),
]


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: f"{layout.weight_type}-{layout.num_tiles}-{layout.num_inputs}"
)
def test_plans_fit_their_card(layout: TileLayout, card: str) -> None:
    """With any number of chunks; and one row at least is multiplied."""
    multiprocessors, shared_bytes, can_cluster = CARDS[card]
    for num_rows in range(1, 9):
        plan = plan_gemv(
            layout,
            num_rows,
            num_chunks(layout),
            widening=fastest_widening(layout),
            num_multiprocessors=multiprocessors,
            shared_bytes_per_block=shared_bytes,
            can_cluster=can_cluster,
        )
        assert 1 <= plan.num_rows <= num_rows
        assert plan.shared_bytes + STATIC_SHARED_BYTES <= shared_bytes
        assert plan.cluster == 1 or can_cluster
        assert plan.num_blocks % plan.cluster == 0
        assert 1 <= plan.num_blocks <= min(multiprocessors, layout.num_tiles * plan.cluster)
        assert plan.warps >= num_chunks(layout) // plan.cluster
        assert num_spans(layout) % (plan.spans * num_chunks(layout)) == 0 or plan.spans == 1


def test_cost_counts_the_matrix_once_for_eight_rows() -> None:
    layout = tile_layout("int8", 4096, 4096, 128, "float16")
    one, eight = (gemv_cost(layout, num_rows) for num_rows in (1, 8))
    assert one.read_bytes == layout.num_bytes + 2 * 4096
    assert eight.read_bytes == layout.num_bytes + 8 * 2 * 4096
    assert (one.stored_bytes, one.written_bytes, one.flops) == (layout.num_bytes, 4 * 4096, 2 * 4096 * 4096)
    bias = gemv_cost(layout, 1, epilogue="add", has_norm=True, has_bias=True)
    assert bias.stored_bytes == layout.num_bytes + 4 * 4096
    assert bias.read_bytes == bias.stored_bytes + (2 + 4) * 4096 + 4096 // 2  # x, out; 8 bytes for 16 inputs
    led = gemv_cost(layout, 1, epilogue="add", has_next=True)
    assert led.written_bytes == (4 + 2) * 4096 + 4096 // 2
    assert gemv_cost(layout, 8, epilogue="swiglu").written_bytes == 8 * 2048 * 2


def test_the_compiler_refuses_other_sizes_than_the_kernels(nvrtc: None) -> None:
    notes: Any = Notes()
    gemv(notes, **arguments())
    name = notes.launches[0].name
    start, _, slot_bytes = name.rstrip(">").rpartition(", ")
    with pytest.raises(KernelCompileError, match=r"gemv\.py plans another size"):
        compile_kernels(flatten("gemv"), "gemv", [f"{start}, {2 * int(slot_bytes)}>"], "sm_90")
