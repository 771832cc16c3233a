"""The least time that a card allows: by the arithmetic of a 7B model's published sizes."""

from functools import partial

import pytest
from test_cuda_predict import RATES, shape_7b

from llmcli.kernels.launches import TYPICAL_CARD
from llmcli.runners.cuda.predict.predictor import CardPredictor, Rates

approximately = partial(pytest.approx, rel=5e-4)  # rows that are staged for products are scaled, too


def test_the_floor_is_the_longer_of_bytes_and_operations() -> None:
    plan = shape_7b(num_rows=256)
    predictor = CardPredictor(plan, RATES, TYPICAL_CARD)
    layers, head = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008), 32000 * 4096
    few, many = predictor.decode_floor_seconds(100), predictor.decode_floor_seconds(100, 256)
    assert few == predictor.decode_bytes(100) / 1e12
    assert many == approximately((2 * 256 * (layers + head) + 256 * 32 * 4 * 101 * 4096) / 1e14)
    h200 = CardPredictor(plan, Rates(4.5e12, {"float16": 8e14, "bfloat16": 8e14}), TYPICAL_CARD)
    for num_rows in (1, 64, 256):
        assert h200.decode_floor_seconds(100, num_rows) < h200.decode_seconds(100, num_rows)
    for num_tokens in (12, 2048):
        assert h200.prefill_floor_seconds(num_tokens) < h200.prefill_seconds(num_tokens)
    short, long = predictor.prefill_floor_seconds(9), predictor.prefill_floor_seconds(4096)
    assert short == predictor.decode_bytes(0) / 1e12
    num_seen = 4096 * 4097 // 2
    # In the last layer all tokens need keys and values, and the last token all else.
    left_out = 2 * 4095 * (4096 * 4096 + 3 * 4096 * 11008) + 4 * (num_seen - 4096) * 4096
    assert long == approximately((2 * 4096 * layers + 32 * 4 * num_seen * 4096 + 2 * head - left_out) / 1e14)
    without_products = CardPredictor(plan, Rates(1e12, {}), TYPICAL_CARD)
    assert without_products.prefill_floor_seconds(9) is None
    assert without_products.decode_floor_seconds(100, 256) == predictor.decode_bytes(100, 256) / 1e12
