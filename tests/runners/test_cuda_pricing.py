"""Prices of single launches against times that a card took."""

from functools import partial

import pytest

from llmcli.kernels.card_facts import TYPICAL_CARD
from llmcli.kernels.gemv import gemv_cost, plan_gemv
from llmcli.kernels.launches import Launch
from llmcli.kernels.tiles import tile_layout
from llmcli.runners.cuda.pricing import Pricing, Rates


@pytest.mark.parametrize(
    ("weight_type", "num_rows", "measured"), [("int8", 4, 59.0), ("int8", 8, 65.2), ("bfloat16", 8, 109.9)]
)
def test_products_of_several_rows_take_as_long_as_measured(weight_type: str, num_rows: int, measured: float) -> None:
    """us of the four products of a layer of Llama-3.1-8B on an H200: docs/performance/products.md."""
    total = 0.0
    for num_outputs, num_inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        scales = (128, "bfloat16") if weight_type == "int8" else (None, None)
        layout = tile_layout(weight_type, num_outputs, num_inputs, *scales)
        plan = plan_gemv(layout, num_rows, num_multiprocessors=132, shared_bytes_per_block=227 * 1024, can_cluster=True)
        launch = Launch("gemv", plan.name, (plan.num_blocks,), 512, (), cost=partial(gemv_cost, plan, layout))
        total += 1e6 * Pricing(Rates(4.573e12, {}), TYPICAL_CARD).seconds(launch)
    assert total == pytest.approx(measured, rel=0.05)
