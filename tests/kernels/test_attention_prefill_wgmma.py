"""attention_prefill_wgmma against float64, and equal bits for a token whatever runs with it; on cards with wgmma."""

from pathlib import Path

import numpy as np
import pytest
from emulated import EmulatedDevice, can_emulate
from emulated import solve as emulate
from fenced import assert_same_bits
from prefill_problem import Problem
from right import assert_right
from test_attention_prefill_wgmma_launch import LONG_FORMS

from llmcli.kernels import attention_prefill
from llmcli.kernels.attention_prefill import WGMMA_SPEC, WgmmaForm
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout
from llmcli.kernels.stage_wide import UNIT_INPUTS
from llmcli.lab.attention import page_table
from llmcli.lab.cases.attention_prefill import NUM_ROWS, ROW, Case, problem_of
from llmcli.lab.problem import find_mismatch

F16, BF16 = np.dtype(np.float16), np.dtype(np.uint16)
KINDS = pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])
EMULATED = pytest.mark.skipif(not can_emulate(), reason="no compiler that the emulator needs")
FORMS = pytest.mark.parametrize("form", LONG_FORMS, ids=["alone", "shared"])


def force(monkeypatch: pytest.MonkeyPatch, form: WgmmaForm) -> None:
    monkeypatch.setattr(attention_prefill, "choose_form", lambda *_: form)


@pytest.mark.cuda
@KINDS
@FORMS
@pytest.mark.parametrize("num_tokens", [1, 2, 31, 33, 64, 65, 128, 129, 200, 300])
@pytest.mark.parametrize("start", [0, 1, 127, 500])
def test_chunks(
    wgmma_card: Device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: np.dtype,
    form: WgmmaForm,
    start: int,
    num_tokens: int,
) -> None:
    force(monkeypatch, form)
    Problem(QkvLayout(2, 1, 128), dtype, start, num_tokens).verify(wgmma_card)


@pytest.mark.cuda
@KINDS
@FORMS
@pytest.mark.parametrize("window", [1, 2, 64, 65, 127, 128, 129, 200, 1000])
@pytest.mark.parametrize("start", [0, 400])
def test_windows(
    wgmma_card: Device, monkeypatch: pytest.MonkeyPatch, dtype: np.dtype, form: WgmmaForm, start: int, window: int
) -> None:
    force(monkeypatch, form)
    Problem(QkvLayout(2, 2, 128), dtype, start, 260, window=window).verify(wgmma_card)


@pytest.mark.cuda
@KINDS
@FORMS
@pytest.mark.parametrize(("num_heads", "num_key_value_heads"), [(1, 1), (3, 3), (6, 2), (7, 1), (8, 2), (80, 1)])
def test_groups(
    wgmma_card: Device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: np.dtype,
    form: WgmmaForm,
    num_heads: int,
    num_key_value_heads: int,
) -> None:
    force(monkeypatch, form)
    Problem(QkvLayout(num_heads, num_key_value_heads, 128), dtype, 90, 70).verify(wgmma_card)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("magnitude", [0.0, 0.01, 10.0])
def test_flat_and_steep_weights(wgmma_card: Device, dtype: np.dtype, magnitude: float) -> None:
    Problem(QkvLayout(4, 2, 128), dtype, 10, 300, magnitude=magnitude).verify(wgmma_card)


@pytest.mark.cuda
def test_fp16_queries_beyond_its_range_saturate(wgmma_card: Device) -> None:
    problem = Problem(QkvLayout(4, 2, 128), F16, 0, 40)
    problem.qkv[:, : problem.layout.q_size] *= 1e7
    problem.keys.elements[ROW, :, :, 0] = 0.0  # where infinity would become NaN
    assert np.isfinite(problem.run(wgmma_card)).all()


@pytest.mark.cuda
@KINDS
def test_a_nan_stays_in_its_query(wgmma_card: Device, dtype: np.dtype) -> None:
    problem = Problem(QkvLayout(4, 2, 128), dtype, 30, 100)
    clean = problem.run(wgmma_card)
    problem.qkv[41, 128] = np.nan  # of head 1
    found = problem.run(wgmma_card)
    assert np.isnan(found[41, 128:256]).all()
    found[41, 128:256] = clean[41, 128:256]
    assert found.tobytes() == clean.tobytes()


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("num_multiprocessors", [1, 5, 132])
def test_blocks_with_many_tiles(
    wgmma_card: Device, monkeypatch: pytest.MonkeyPatch, dtype: np.dtype, num_multiprocessors: int
) -> None:
    monkeypatch.setattr(wgmma_card, "num_multiprocessors", num_multiprocessors)
    Problem(QkvLayout(16, 4, 128), dtype, 70, 1300).verify(wgmma_card, [0, 1, 57, 58, 640, 1298, 1299])


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("window", [None, 40, 200])
def test_a_tokens_bits_do_not_depend_on_its_chunk(
    wgmma_card: Device, monkeypatch: pytest.MonkeyPatch, dtype: np.dtype, window: int | None
) -> None:
    """Nor on the groups of warps, the multiprocessors, or the places of pages."""
    problem = Problem(QkvLayout(6, 2, 128), dtype, 20, 500, window=window)
    whole = problem.run(wgmma_card)
    for form in LONG_FORMS:
        force(monkeypatch, form)
        for cuts in ([0, 500], [0, 250, 500], [0, 1, 14, 44, 45, 173, 500], list(range(0, 501, 100))):
            parts = [problem.part(begin, end).run(wgmma_card) for begin, end in zip(cuts, cuts[1:], strict=False)]
            assert np.concatenate(parts).tobytes() == whole.tobytes(), (form, cuts)
    monkeypatch.setattr(wgmma_card, "num_multiprocessors", 3)
    problem.table = page_table(NUM_ROWS, problem.keys.elements.shape[2], seed=99)
    assert problem.run(wgmma_card).tobytes() == whole.tobytes()


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize(
    ("start", "num_tokens", "window"),
    [(0, 1, None), (0, 12, None), (15, 1, None), (3, 13, 5), (0, 17, None), (0, 64, None), (40, 24, 9), (63, 1, None)],
)
def test_short_rows(
    wgmma_card: Device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: np.dtype,
    start: int,
    num_tokens: int,
    window: int | None,
) -> None:
    """They have their own forms, with the bits of the forms whose tiles of rows share blocks."""
    problem = Problem(QkvLayout(14, 2, 128), dtype, start, num_tokens, window=window)
    monkeypatch.setattr(wgmma_card, "num_multiprocessors", 3)
    problem.verify(wgmma_card)
    short = problem.run(wgmma_card)
    for form in LONG_FORMS:
        force(monkeypatch, form)
        assert problem.run(wgmma_card).tobytes() == short.tobytes()


@pytest.mark.cuda
@KINDS
def test_ten_runs_are_equal(wgmma_card: Device, dtype: np.dtype) -> None:
    problem = Problem(QkvLayout(32, 8, 128), dtype, 20, 400)
    for _ in range(5):
        assert_same_bits(lambda: problem.run(wgmma_card))


@pytest.mark.cuda
@FORMS
@pytest.mark.parametrize("unit_inputs", UNIT_INPUTS)
@pytest.mark.parametrize(
    ("num_heads", "num_key_value_heads", "start", "num_tokens", "first_token"),
    [(2, 1, 0, 1, 0), (6, 2, 37, 300, 0), (7, 1, 5, 70, 101), (32, 8, 0, 257, 128), (3, 3, 300, 129, 1)],
)
def test_images(
    wgmma_card: Device,
    monkeypatch: pytest.MonkeyPatch,
    form: WgmmaForm,
    unit_inputs: int,
    num_heads: int,
    num_key_value_heads: int,
    start: int,
    num_tokens: int,
    first_token: int,
) -> None:
    force(monkeypatch, form)
    case = Case(QkvLayout(num_heads, num_key_value_heads, 128), F16, start, num_tokens, rotates=True)
    assert_right(wgmma_card, problem_of(case, WGMMA_SPEC.stem, unit_inputs=unit_inputs, first_token=first_token))


@pytest.mark.cuda
@KINDS
@FORMS
@pytest.mark.parametrize(("num_heads", "num_key_value_heads"), [(1, 1), (7, 1), (32, 8)])
def test_queries_that_it_rotates(
    wgmma_card: Device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: np.dtype,
    form: WgmmaForm,
    num_heads: int,
    num_key_value_heads: int,
) -> None:
    force(monkeypatch, form)
    monkeypatch.setattr(wgmma_card, "num_multiprocessors", 7)  # blocks have many tiles
    case = Case(QkvLayout(num_heads, num_key_value_heads, 128), dtype, 61, 300, rotates=True)
    assert_right(wgmma_card, problem_of(case, WGMMA_SPEC.stem))


# Without a card


@EMULATED
def test_images_of_every_kind_of_matrix(tmp_path: Path) -> None:
    """The emulator's cases for all kernels cover only some of them."""
    problems = [
        problem_of(
            Case(QkvLayout(6, 2, 128), F16, 90, 70, rotates=True), WGMMA_SPEC.stem, unit_inputs=unit, first_token=99
        )
        for unit in UNIT_INPUTS
    ]
    emulated = EmulatedDevice(tmp_path)
    emulated.compile_for(problems)
    for problem in problems:
        assert find_mismatch(problem, emulate(emulated, problem)) is None, problem.label


@EMULATED
@pytest.mark.parametrize("unit_inputs", [0, 64])
def test_forms_of_short_rows_have_the_bits_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit_inputs: int
) -> None:
    problems = [
        problem_of(
            Case(QkvLayout(14, 2, 128), F16, start, num_tokens, rotates=True, window=window),
            WGMMA_SPEC.stem,
            unit_inputs=unit_inputs,
        )
        for start, num_tokens, window in ((0, 12, None), (5, 11, 4), (0, 17, None), (3, 61, None), (40, 24, 9))
    ]
    for name in ("short", "long"):
        (tmp_path / name).mkdir()
    short, long = EmulatedDevice(tmp_path / "short"), EmulatedDevice(tmp_path / "long")
    short.compile_for(problems)
    found = [emulate(short, problem)["out"].tobytes() for problem in problems]
    force(monkeypatch, LONG_FORMS[0])
    long.compile_for(problems)
    assert [emulate(long, problem)["out"].tobytes() for problem in problems] == found


@EMULATED
def test_images_of_the_largest_values_are_finite(tmp_path: Path) -> None:
    """Weights are rounded, their sum is not, so a mean may be larger than its values.

    Here all weights but the first are 0.50034 of it, which fp16 rounds up by a 3,400th.
    """
    case = Case(QkvLayout(2, 1, 128), F16, 0, 100)
    case.qkv[:, :256] = 0.0
    case.qkv[:, (0, 128)] = np.sqrt(128) / np.log2(np.e)
    case.keys.elements[ROW] = 0.0
    case.keys.elements[ROW, 0, 0, 0] = 2046 / 2048
    case.values.elements[ROW] = np.float16(65504)
    problem = problem_of(case, WGMMA_SPEC.stem, unit_inputs=64)
    emulated = EmulatedDevice(tmp_path)
    emulated.compile_for([problem])
    image = emulate(emulated, problem)["out"].astype(np.float64)
    written = image[image != 0]
    assert written.size == 100 * 256
    np.testing.assert_allclose(written, 65504, rtol=2**-9)
