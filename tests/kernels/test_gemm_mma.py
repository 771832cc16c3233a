"""gemm_mma: its plan, and gemm_wide's results and bits on cards without wgmma, and with scales of blocks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from emulated import AMPERE, HOPPER, EmulatedDevice, can_emulate, solve
from right import assert_right

from llmcli.kernels.device import Device
from llmcli.kernels.gemm_mma import SPEC, mma_name, plan_mma
from llmcli.kernels.tiles import BLOCK_SCALE, TileLayout, fastest_widening, tile_layout
from llmcli.lab.cases.gemm import FORMATS, GEMM_MMA, HALF_FORMATS, swiglu_case, wide_case
from llmcli.lab.matrices import random_matrix
from llmcli.lab.problem import Problem, find_mismatch

CARD: dict[str, int] = {"num_multiprocessors": 132, "shared_bytes_per_block": 227 * 1024}
SMALLEST_SHARED = 99 * 1024  # of cards of compute capability 8.0 and more


@pytest.mark.parametrize(
    ("num_tokens", "num_parts", "tokens", "blocks"),
    [(9, 1, 64, 32), (64, 4, 64, 128), (65, 1, 128, 32), (256, 1, 128, 64), (2048, 1, 128, 132)],
)
def test_blocks(num_tokens: int, num_parts: int, tokens: int, blocks: int) -> None:
    layout = tile_layout("int8", 4096, 4096, 128, "bfloat16")
    plan = plan_mma(layout, "lifted", num_tokens, num_parts=num_parts, **CARD)
    assert (plan.tokens, plan.num_blocks, plan.stages) == (tokens, blocks, 4)
    assert plan.shared_bytes < CARD["shared_bytes_per_block"]


@pytest.mark.parametrize(
    "form", [*FORMATS, *HALF_FORMATS, {"weight_type": "fp8", "scale_type": BLOCK_SCALE, "group_size": 128}], ids=str
)
def test_small_cards_have_room(form: dict[str, Any]) -> None:
    layout = TileLayout(form["weight_type"], 4096, 4096, form.get("group_size"), form.get("scale_type"))
    for num_tokens in (20, 500):
        small = {**CARD, "shared_bytes_per_block": SMALLEST_SHARED}
        assert plan_mma(layout, fastest_widening(layout), num_tokens, **small).stages >= 2
    with pytest.raises(ValueError, match="gemm_mma: 40000 bytes of shared memory a block are too few"):
        plan_mma(layout, fastest_widening(layout), 20, **{**CARD, "shared_bytes_per_block": 40000})


def test_names_are_of_the_spec() -> None:
    layout = tile_layout("int8", 4096, 4096, 128, "bfloat16")
    assert mma_name(layout, "lifted", 64, 2) in SPEC.variants


def cases() -> Iterator[Problem]:
    for form in (FORMATS[0], FORMATS[3], HALF_FORMATS[1]):
        stored = random_matrix(1, num_rows=40, num_inputs=300, **form)
        for num_tokens, num_parts in ((9, 1), (70, 2)):
            yield wide_case(stored, num_tokens, "add", has_bias=True, num_parts=num_parts)
        yield swiglu_case(form, 20, 100, 136, "int8")


@pytest.mark.skipif(not can_emulate(), reason="no compiler that can emulate a card")
def test_bits_are_those_of_gemm_narrow_and_gemm_wide(tmp_path: Path) -> None:
    problems = list(cases())
    hopper, other = (EmulatedDevice(tmp_path, arch) for arch in (HOPPER, AMPERE))
    for device in (hopper, other):
        device.compile_for(problems)
    for problem in problems:
        expected, found = solve(hopper, problem), solve(other, problem)
        assert find_mismatch(problem, found) is None
        for name, values in expected.items():
            assert values.tobytes() == found[name].tobytes(), (problem.label, name)


@pytest.mark.cuda
def test_scales_of_blocks(device: Device) -> None:
    for problem in GEMM_MMA.checks():
        assert_right(device, problem)


class WithoutWgmma:
    """A card that is asked to do without."""

    can_wgmma = False

    def __init__(self, device: Device):
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


@pytest.mark.cuda
@pytest.mark.parametrize("form", [*FORMATS, *HALF_FORMATS], ids=str)
def test_results_on_a_card(form: dict[str, Any], device: Device) -> None:
    other: Any = WithoutWgmma(device)
    for num_outputs, num_inputs, num_tokens in ((35, 72, 9), (300, 1000, 64), (528, 264, 65), (4096, 512, 700)):
        stored = random_matrix(num_inputs, num_rows=num_outputs, num_inputs=num_inputs, **form)
        for problem in (wide_case(stored, num_tokens), wide_case(stored, num_tokens, "add", num_parts=2)):
            if num_inputs > 128 or "parts" not in problem.label:
                assert_right(other, problem)
    assert_right(other, swiglu_case(form, 130, 300, 136, "int4"))
