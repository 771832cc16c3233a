"""attention_prefill_wgmma against float64, and equal bits whatever runs beside a token; on cards with wgmma."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulated import EmulatedDevice, can_emulate
from emulated import solve as emulate
from fenced import assert_same_bits
from prefill_problem import Problem
from right import assert_right

from llmcli.kernels import attention_prefill_wgmma
from llmcli.kernels.attention_prefill import attention_prefill
from llmcli.kernels.attention_prefill_wgmma import SPEC, Form, choose_form, takes
from llmcli.kernels.device import Device
from llmcli.kernels.qkv import QkvLayout
from llmcli.kernels.stage_wide import UNIT_INPUTS, ImageRows, image_bytes
from llmcli.lab.cases.attention_prefill import NUM_ROWS, ROW, Case, problem_of
from llmcli.lab.kv_cache import page_table
from llmcli.lab.problem import find_mismatch

F16, BF16 = np.dtype(np.float16), np.dtype(np.uint16)
KINDS = pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])
EMULATED = pytest.mark.skipif(not can_emulate(), reason="no compiler that the emulator needs")
LONG_FORMS = Form(1, 3, 128), Form(2, 3, 128)
FORMS = pytest.mark.parametrize("form", LONG_FORMS, ids=["alone", "shared"])


@pytest.fixture
def wgmma_card(device: Device) -> Device:
    if not device.can_wgmma:
        pytest.skip("the card has no wgmma")
    return device


def force(monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    monkeypatch.setattr(attention_prefill_wgmma, "choose_form", lambda *_: form)


@pytest.mark.cuda
@KINDS
@FORMS
@pytest.mark.parametrize("num_tokens", [1, 2, 31, 33, 64, 65, 128, 129, 200, 300])
@pytest.mark.parametrize("start", [0, 1, 127, 500])
def test_chunks(
    wgmma_card: Device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: np.dtype,
    form: Form,
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
    wgmma_card: Device, monkeypatch: pytest.MonkeyPatch, dtype: np.dtype, form: Form, start: int, window: int
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
    form: Form,
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
    """Nor on the groups of warps, on the multiprocessors, or on where pages lie."""
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
    """They have forms of their own, with the bits of the others, whose tiles of rows share blocks."""
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
    form: Form,
    unit_inputs: int,
    num_heads: int,
    num_key_value_heads: int,
    start: int,
    num_tokens: int,
    first_token: int,
) -> None:
    force(monkeypatch, form)
    case = Case(QkvLayout(num_heads, num_key_value_heads, 128), F16, start, num_tokens, rotates=True)
    assert_right(wgmma_card, problem_of(case, SPEC.stem, unit_inputs=unit_inputs, first_token=first_token))


@pytest.mark.cuda
@KINDS
@FORMS
@pytest.mark.parametrize(("num_heads", "num_key_value_heads"), [(1, 1), (7, 1), (32, 8)])
def test_queries_that_it_rotates(
    wgmma_card: Device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: np.dtype,
    form: Form,
    num_heads: int,
    num_key_value_heads: int,
) -> None:
    force(monkeypatch, form)
    monkeypatch.setattr(wgmma_card, "num_multiprocessors", 7)  # blocks have many tiles
    case = Case(QkvLayout(num_heads, num_key_value_heads, 128), dtype, 61, 300, rotates=True)
    assert_right(wgmma_card, problem_of(case, SPEC.stem))


# Without a card


@EMULATED
def test_images_of_every_kind_of_matrix(tmp_path: Path) -> None:
    """The emulator's cases of all kernels take only some of them."""
    problems = [
        problem_of(Case(QkvLayout(6, 2, 128), F16, 90, 70, rotates=True), SPEC.stem, unit_inputs=unit, first_token=99)
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
            SPEC.stem,
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
    problem = problem_of(case, SPEC.stem, unit_inputs=64)
    emulated = EmulatedDevice(tmp_path)
    emulated.compile_for([problem])
    image = emulate(emulated, problem)["out"].astype(np.float64)
    written = image[image != 0]
    assert written.size == 100 * 256
    np.testing.assert_allclose(written, 65504, rtol=2**-9)


@pytest.mark.parametrize(
    ("dtype", "rows", "message"),
    [
        (BF16, {"unit_inputs": 64}, "writes no images from a cache of uint16"),
        (F16, {"unit_inputs": 16}, r"units have 16 inputs, expected one of \(64, 128, 32\)"),
        (F16, {"first_token": -1}, "the first token of the image is -1"),
        (F16, {"first_token": 57}, "out has 1048576 bytes, expected 2097152"),
    ],
)
def test_refused_images(dtype: np.dtype, rows: dict[str, int], message: str) -> None:
    image = host((image_bytes(4096, 128),), np.uint8)
    with pytest.raises(ValueError, match=f"attention_prefill: {message}"):
        launch_of(Recorder(), LLAMA, dtype, 72, out=ImageRows(image, **{"first_token": 0, "unit_inputs": 64, **rows}))


def test_refused_rotary() -> None:
    table = host((700, 64, 2), np.float32)
    assert launch_of(Recorder(), LLAMA, F16, 600, 100, cos_sin=table)["arguments"][1] is table
    with pytest.raises(ValueError, match="position 700 is beyond the 700 of cos_sin"):
        launch_of(Recorder(), LLAMA, F16, 601, 100, cos_sin=table)
    with pytest.raises(ValueError, match="rotates no queries for a cache of float16"):
        launch_of(Recorder(can_wgmma=False), LLAMA, F16, 600, cos_sin=table)


class Recorder:
    """Stands in for a card: remembers launches."""

    num_multiprocessors = 132

    def __init__(self, can_wgmma: bool = True) -> None:
        self.can_wgmma = can_wgmma
        self.launches: list[dict[str, Any]] = []

    def launch(self, stem: str, name: str, **details: Any) -> None:
        self.launches.append({"stem": stem, "name": name, **details})


def host(shape: tuple[int, ...], kind: Any) -> Any:
    array = np.empty(shape, kind)
    return SimpleNamespace(
        dtype=array.dtype, shape=shape, strides=array.strides, nbytes=array.nbytes, data=SimpleNamespace(ptr=4096)
    )


def launch_of(
    device: Any, layout: QkvLayout, dtype: Any, num_tokens: int, start: int = 0, **options: Any
) -> dict[str, Any]:
    num_pages = -(-(start + num_tokens) // 16)
    cache = host((num_pages, layout.num_key_value_heads, 16, layout.head_dim), dtype)
    scales = host(cache.shape[:3], np.float32) if np.dtype(dtype).itemsize == 1 else None
    attention_prefill(
        device,
        qkv=host((num_tokens, layout.width), np.float32),
        layout=layout,
        keys=cache,
        values=cache,
        key_scales=scales,
        value_scales=scales,
        pages=host((num_pages,), np.int32),
        start=start,
        window=None,
        **{"out": host((num_tokens, layout.q_size), np.float32), **options},
    )
    (launch,) = device.launches
    return launch


LLAMA = QkvLayout(32, 8, 128)


@pytest.mark.parametrize(
    ("num_tokens", "form", "num_blocks"),
    [
        (1, Form(1, 1, 16), 8),
        (16, Form(1, 1, 16), 8),
        (17, Form(1, 1, 64), 16),
        (64, Form(1, 1, 64), 32),
        (65, LONG_FORMS[0], 40),
        (256, LONG_FORMS[0], 128),
        (257, LONG_FORMS[1], 72),
        (512, LONG_FORMS[1], 128),
        (2048, LONG_FORMS[1], 132),
    ],
)
def test_blocks_fill_the_card(num_tokens: int, form: Form, num_blocks: int) -> None:
    launch = launch_of(Recorder(), LLAMA, F16, num_tokens)
    assert launch["stem"] == "attention_prefill_wgmma"
    assert launch["name"] == f"attention_prefill_wgmma<__half, {form.consumers}, {form.stages}, 0, {form.tokens}>"
    assert launch["grid"] == (num_blocks,)
    assert launch["block"] == 128 * (form.consumers + 1)
    shape, rows = launch["arguments"][-1], 64 * form.consumers
    assert shape.num_tiles * rows >= num_tokens * 4 > (shape.num_tiles - 1) * rows
    assert choose_form(4 * num_tokens, num_tokens, 8, 132) == form


def test_short_rows_have_a_block_for_each_tile_on_any_card() -> None:
    """Their blocks take no second tile."""
    for start, num_tokens, num_blocks in ((60, 4, 8), (0, 64, 32), (61, 4, 3)):
        recorder = Recorder()
        recorder.num_multiprocessors = 3
        assert launch_of(recorder, LLAMA, F16, num_tokens, start)["grid"] == (num_blocks,)


def test_all_other_caches_and_cards_keep_attention_prefill() -> None:
    others = [
        (Recorder(), LLAMA, np.float32),
        (Recorder(), LLAMA, np.uint8),
        (Recorder(), QkvLayout(32, 8, 64), np.float16),
        (Recorder(), QkvLayout(32, 8, 256), np.uint16),
        (Recorder(can_wgmma=False), LLAMA, np.float16),
    ]
    for device, layout, dtype in others:
        assert launch_of(device, layout, dtype, 600)["stem"] == "attention_prefill"


def test_the_choice_does_not_ask_for_the_number_of_tokens() -> None:
    """Both kernels sum in another order, and a token's bits must not depend on its chunk."""
    stems = {launch_of(Recorder(), LLAMA, BF16, num_tokens, 900)["stem"] for num_tokens in (1, 2, 63, 128, 2048)}
    assert stems == {"attention_prefill_wgmma"}


def test_shared_memory_fits_a_block() -> None:
    barriers = 1024  # with what lies between them and tiles that begin at multiples of 1024
    assert launch_of(Recorder(), LLAMA, F16, 600)["shared_bytes"] + barriers <= 227 * 1024


def test_what_it_takes() -> None:
    device: Any = Recorder()
    assert takes(device, LLAMA, F16)
    assert takes(device, LLAMA, BF16)
    assert [arch for arch in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120") if SPEC.runs_on(arch)] == ["sm_90"]
