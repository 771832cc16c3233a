"""How attention_prefill_wgmma is launched, and its refusals."""

from typing import Any

import numpy as np
import pytest
from test_attention_decode_launch import Recorder as AnyRecorder
from test_attention_decode_launch import host

from llmcli.kernels.attention_prefill import (
    WGMMA_SPEC,
    PromptInputs,
    WgmmaForm,
    attention_prefill,
    choose_form,
    rotates_queries,
)
from llmcli.kernels.qkv import LayerCache, QkvLayout
from llmcli.kernels.stage_wide import ImageRows, image_bytes

F16, BF16 = np.dtype(np.float16), np.dtype(np.uint16)
LONG_FORMS = WgmmaForm(1, 3, 128), WgmmaForm(2, 3, 128)


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


class Recorder(AnyRecorder):
    """The same for a card that may have wgmma."""

    def __init__(self, can_wgmma: bool = True) -> None:
        super().__init__()
        self.can_wgmma = can_wgmma


def launch_of(
    device: Any, layout: QkvLayout, dtype: Any, num_tokens: int, start: int = 0, **options: Any
) -> dict[str, Any]:
    num_pages = -(-(start + num_tokens) // 16)
    cache = host((num_pages, layout.num_key_value_heads, 16, layout.head_dim), dtype)
    scales = host(cache.shape[:3], np.float32) if np.dtype(dtype).itemsize == 1 else None
    out = options.pop("out", host((num_tokens, layout.q_size), np.float32))
    inputs = PromptInputs(
        qkv=host((num_tokens, layout.width), np.float32),
        layout=layout,
        cache=LayerCache(cache, cache, scales, scales),
        pages=host((num_pages,), np.int32),
        start=start,
        window=None,
        **options,
    )
    attention_prefill(device, inputs, out)
    (launch,) = device.launches
    return launch


LLAMA = QkvLayout(32, 8, 128)


@pytest.mark.parametrize(
    ("num_tokens", "form", "num_blocks"),
    [
        (1, WgmmaForm(1, 1, 16), 8),
        (16, WgmmaForm(1, 1, 16), 8),
        (17, WgmmaForm(1, 1, 64), 16),
        (64, WgmmaForm(1, 1, 64), 32),
        (65, LONG_FORMS[0], 40),
        (256, LONG_FORMS[0], 128),
        (257, LONG_FORMS[1], 72),
        (512, LONG_FORMS[1], 128),
        (2048, LONG_FORMS[1], 132),
    ],
)
def test_blocks_fill_the_card(num_tokens: int, form: WgmmaForm, num_blocks: int) -> None:
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
    barriers = 1024  # with the gap before tiles that begin at multiples of 1024
    assert launch_of(Recorder(), LLAMA, F16, 600)["shared_bytes"] + barriers <= 227 * 1024


def test_what_it_takes() -> None:
    device: Any = Recorder()
    assert rotates_queries(device, LLAMA, F16)
    assert rotates_queries(device, LLAMA, BF16)
    assert [arch for arch in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120") if WGMMA_SPEC.runs_on(arch)] == ["sm_90"]
