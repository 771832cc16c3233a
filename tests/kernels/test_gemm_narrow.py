"""How gemm_narrow is cut and launched, and its rings. Its results on a card: test_gemm_wide, whose launcher it has."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulated import EmulatedDevice, can_emulate, solve
from fenced import assert_launches_agree, fenced, to_host
from uploaded import upload

from llmcli.kernels import gemm_wide as launcher
from llmcli.kernels.compiler import compile_kernels
from llmcli.kernels.device import Device
from llmcli.kernels.gemm_wide import (
    NARROW_SPEC,
    NARROW_STATIC_SHARED_BYTES,
    gemm_wide,
    gemm_wide_swiglu,
    narrow_block_size,
    narrow_name,
    narrow_shared_bytes,
)
from llmcli.kernels.phantom import Phantom
from llmcli.kernels.sources import flatten
from llmcli.kernels.stage_wide import image_bytes
from llmcli.kernels.tiles import TileLayout, fastest_widening, tile_layout
from llmcli.kernels.wide_plan import (
    NARROW_FORMS,
    NarrowForm,
    NarrowPlan,
    all_forms,
    narrow_forms,
    plan_form,
    plan_narrow,
)
from llmcli.lab.cases.gemm import (
    FORMATS,
    GEMM_NARROW,
    HALF_FORMATS,
    activations,
    swiglu_case,
    wide_case,
    with_model_scales,
    with_small_scales,
)
from llmcli.lab.matrices import DTYPES, StoredMatrix, random_matrix, tiles_of, to_storage
from llmcli.lab.notes import Notes
from llmcli.lab.problem import Problem, find_mismatch
from llmcli.lab.rows import image_of

REGISTERS, SHARED_BYTES, RESERVED_BYTES = 65536, 228 * 1024, 1024  # of a multiprocessor; and of each of its blocks


@pytest.fixture(params=NARROW_FORMS, ids="{0.tokens} tokens, {0.tiles} tiles".format)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NarrowForm:
    """Blocks of a form, even if another is faster. For tests that multiply as many tokens as the form takes."""
    form: NarrowForm = request.param

    def plan(layout: TileLayout, num_tokens: int, num_multiprocessors: int, num_parts: int) -> NarrowPlan:
        assert form in narrow_forms(num_tokens)
        return plan_form(layout, form, num_multiprocessors, num_parts)

    monkeypatch.setattr(launcher, "plan_narrow", plan)
    return form


@pytest.mark.cuda
@pytest.mark.parametrize("form", [FORMATS[0], FORMATS[3], FORMATS[6], HALF_FORMATS[1]], ids=str)
def test_every_launch_of_a_whole_product_has_the_same_bits(
    wgmma_card: Device, form: dict[str, Any], blocks: NarrowForm
) -> None:
    """A buffer that is filled again too early shows in one launch of many; launches overlap."""
    import cupy

    num_tokens = 12 if blocks.tokens == 16 else blocks.tokens
    stored = random_matrix(4, num_rows=8192, num_inputs=4096, **form)
    image = cupy.asarray(image_of(activations(num_tokens, 4096), stored.layout.unit_inputs)).view(np.uint8)
    arrays = {"matrix": upload(tiles_of(stored)), "image": image, "row_scales": cupy.ones(num_tokens, np.float32)}
    first = fenced((num_tokens, 8192), np.float32)
    gemm_wide(wgmma_card, **arrays, out=first.array)
    wgmma_card.synchronize()
    first.check()
    assert_launches_agree(lambda out: gemm_wide(wgmma_card, **arrays, out=out), to_host(first.array), 200)


# Without a card


def arguments(layout: TileLayout, num_tokens: int) -> dict[str, Any]:
    matrix = layout.place(Phantom((layout.arena_bytes,), np.uint8, 1 << 20))
    return {
        "matrix": replace(matrix, widening=fastest_widening(layout)),
        "image": Phantom((image_bytes(layout.num_inputs, num_tokens),), np.uint8, 2 << 30),
        "row_scales": Phantom((num_tokens,), np.float32, 3 << 30),
    }


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 33, 64])
def test_up_to_64_tokens_are_launched_so(num_tokens: int) -> None:
    layout, notes = tile_layout("int8", 28672, 4096, 128, "float16"), Notes()
    device: Any = notes
    out = Phantom((num_tokens, 28672), np.float32, 4 << 30)
    gemm_wide(device, **arguments(layout, num_tokens), out=out)
    image = Phantom((image_bytes(14336, num_tokens),), np.uint8, 5 << 30)
    down = tile_layout("int8", 4096, 14336, 128, "float16")
    gemm_wide_swiglu(device, **arguments(layout, num_tokens), down=down, out=image)
    assert [one.stem for one in notes.launches] == ["gemm_narrow"] * 2
    for launch in notes.launches:
        assert launch.name in NARROW_SPEC.variants
        # 28,672 outputs are 448 blocks of 4 tiles, or 224 of 8, which all run at once on 132 multiprocessors. Of those
        # of 4 tiles with 64 tokens only 396 would.
        assert (launch.grid, launch.block) == (((448,), 256) if num_tokens <= 16 else ((224,), 384))
    # 22,016 outputs are 344 blocks of 4 tiles. They have room, and share the multiprocessors more evenly.
    narrower = tile_layout("int8", 22016, 4096, 128, "float16")
    gemm_wide(device, **arguments(narrower, num_tokens), out=Phantom((num_tokens, 22016), np.float32, 4 << 30))
    launch = notes.launches[-1]
    assert launch.name in NARROW_SPEC.variants
    assert (launch.grid, launch.block) == (((172,), 384) if 16 < num_tokens <= 32 else ((344,), 256))
    # With 128,256 outputs as many blocks run as fit, four or two a multiprocessor. They take pieces in turn.
    head = tile_layout("int8", 128256, 128, 128, "float16")
    gemm_wide(device, **arguments(head, num_tokens), out=Phantom((num_tokens, 128256), np.float32, 4 << 30))
    assert notes.launches[-1].grid == (528 if num_tokens <= 16 else 264,)
    gemm_wide(device, **arguments(layout, 65), out=Phantom((65, 28672), np.float32, 5 << 30))
    assert notes.launches[-1].stem == "gemm_wide"


def test_as_many_blocks_share_a_multiprocessor_as_the_plan_says(pytestconfig: pytest.Config) -> None:
    """In registers and in shared memory. Each matrix in one form of blocks; in all of them with --all."""
    names = {
        narrow_name(*one, form): (*one, form)
        for place, one in enumerate(all_forms())
        for form in (NARROW_FORMS if pytestconfig.getoption("--all") else NARROW_FORMS[place % len(NARROW_FORMS) :][:1])
    }
    compiled = compile_kernels(flatten("gemm_narrow"), "gemm_narrow", list(names), "sm_90a")
    for name, (layout, widening, form) in names.items():
        resources, warps = compiled.resources[name], narrow_block_size(form) // 32
        # As the kernel counts them: with fewer a warp would wait for ever for missing ones.
        assert resources.registers == REGISTERS // (form.blocks * 32 * warps) // 8 * 8, name
        assert resources.shared_bytes <= NARROW_STATIC_SHARED_BYTES, name
        shared_bytes = narrow_shared_bytes(layout, widening, form) + NARROW_STATIC_SHARED_BYTES + RESERVED_BYTES
        assert form.blocks * shared_bytes <= SHARED_BYTES, name
        assert resources.spill_store_bytes == 0, name


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "parts", "tiles", "spans"),
    [(12288, 4096, 2, 4, 16), (4096, 4096, 4, 4, 8), (4096, 11008, 8, 8, 11), (64, 128, 1, 4, 1)],
)
def test_blocks_that_take_the_least_time(num_outputs: int, num_inputs: int, parts: int, tiles: int, spans: int) -> None:
    """A span takes 0.85 of the time in small blocks, of which more run at once."""
    plan = plan_narrow(tile_layout("int8", num_outputs, num_inputs, 128, "float16"), 64, 132, parts)
    assert (plan.form.tiles, plan.spans) == (tiles, spans)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDevice:
    if not can_emulate():
        pytest.skip("no compiler that can emulate a card")
    return EmulatedDevice(tmp_path_factory.mktemp("emulated"))


def emulated_problems(has_all: bool = False) -> list[Problem]:
    """Products in parts, two forms of weights for each number of tokens or all; blocks take several pieces each."""
    problems = []
    for place, form in enumerate((*(FORMATS[i] for i in (0, 3, 4, 2, 6, 5)), HALF_FORMATS[1])):
        stored = random_matrix(1000, num_rows=300, num_inputs=640, **form)
        few = wide_case(stored, 12, "add", has_bias=True, num_parts=3)
        of_form = [few, wide_case(stored, 40), wide_case(stored, 20, num_parts=2)]
        problems += of_form if has_all else [of_form[place % 3]]
    gated = [(FORMATS[0], 30, 300, 136, "int4"), (FORMATS[3], 9, 130, 136, "int8")]
    return [*problems, *(swiglu_case(*one) for one in gated)]


def mismatches(emulated: EmulatedDevice, problems: list[Problem]) -> list[str]:
    found: list[Any] = []
    for problem in problems:
        for emulated.is_late in (False, True):
            try:
                found.append(find_mismatch(problem, solve(emulated, problem)))
            except RuntimeError as error:  # a deadlock, or more arrivals than a barrier waits for
                found.append(error)
    return [str(one) for one in found if one is not None]


def test_emulated_products_are_right(emulated: EmulatedDevice, blocks: NarrowForm, pytestconfig: pytest.Config) -> None:
    problems = emulated_problems(pytestconfig.getoption("--all"))
    problems = [one for one in problems if blocks in narrow_forms(one.sizes["num_tokens"])]
    assert problems
    emulated.num_multiprocessors = 2
    emulated.compile_for(problems)
    assert not mismatches(emulated, problems)


def with_edge_scales(stored: StoredMatrix) -> StoredMatrix:
    """The same with scales of both signs, tile by tile the smallest and the largest with which codes are multiplied
    as they lie, and the next ones beyond these."""
    assert stored.scales is not None
    least, most = (-20, -4) if stored.layout.weight_type == "int4" else (-24, -8)
    sizes = np.array([2.0**least, 2.0**most * (1 - 2.0**-8), 2.0**least * (1 - 2.0**-8), 2.0**most, 2.0**-9])
    sizes = sizes[np.arange(stored.layout.num_rows) // 16 % len(sizes)] * (-1.0) ** np.arange(stored.layout.num_rows)
    scales = to_storage(sizes[:, None] * np.ones(stored.scales.shape), DTYPES[str(stored.scale_type)])
    return replace(stored, scales=scales)


@pytest.mark.parametrize("blocks", narrow_forms(64), indirect=True, ids="{0.tiles} tiles".format)
def test_emulated_weights_are_exact(emulated: EmulatedDevice, blocks: NarrowForm) -> None:
    """As they are rounded to fp16, bit for bit. A token's results are the weights of one input."""
    half_int4 = {"weight_type": "int4", "scale_type": "float16", "group_size": 128}
    cases = []
    for form in (FORMATS[0], FORMATS[3], FORMATS[4], FORMATS[8], half_int4):
        for with_scales in (with_model_scales, with_small_scales, with_edge_scales):
            stored = with_scales(random_matrix(7, num_rows=80, num_inputs=64, **form))
            problem = wide_case(stored, 64)
            image = image_of(np.eye(64, dtype=np.float16), stored.layout.unit_inputs)
            inputs = {**problem.inputs, "image": image, "row_scales": np.ones(64, np.float32)}
            cases.append((stored, replace(problem, inputs=inputs)))
    emulated.num_multiprocessors, emulated.is_late = 2, False
    emulated.compile_for([problem for _, problem in cases])
    for stored, problem in cases:
        np.testing.assert_array_equal(solve(emulated, problem)["out"], stored.halves.T)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("copy_async_wait<SLOTS - 2>();", ""),  # words that have not come
        ("copy_next(slot == 0 ? SLOTS - 1 : slot - 1);", "copy_next(slot);"),  # over words that are still to be fetched
        ("num_left >= STAGES", "num_left > STAGES + 1"),  # a stage that is never released
        ("if (piece < work.num_pieces) seek(work, shape, warp);", ""),  # weights of the tile before
    ],
)
def test_planted_faults_are_found(emulated: EmulatedDevice, right: str, wrong: str) -> None:
    problems = emulated_problems()[:2]

    def change(text: str) -> str:
        assert right in text
        return text.replace(right, wrong)

    emulated.num_multiprocessors = 2
    emulated.compile_for(problems, change)
    assert mismatches(emulated, problems)


def test_cases_are_of_few_tokens() -> None:
    assert {problem.name for problem in GEMM_NARROW.checks()} == {"gemm_narrow"}
