"""`plan`'s predictions for decoding steps, prompts and their attention, against measurements on cards."""

from dataclasses import replace

import pytest

from llmcli.checkpoint.random_weights import shape_model
from llmcli.kernels.attention_prefill import attention_prefill_cost
from llmcli.kernels.launches import TYPICAL_CARD, CardFacts, Launch
from llmcli.kernels.qkv import QkvLayout
from llmcli.runners.cuda.plan.memory import plan_memory
from llmcli.runners.cuda.plan.stored import StoredModel
from llmcli.runners.cuda.predict.predictor import CardPredictor, Pricing, Rates

H100 = replace(TYPICAL_CARD, l2_bytes=50 * 2**20)
H200 = replace(TYPICAL_CARD, l2_bytes=60 * 2**20)

# Card, shape, format, rows, tokens in the cache, GB/s measured by the process, milliseconds of a step.
MEASURED = [
    (H200, "Llama-3.1-8B", "int8", 1, 2064, 4529, 2.37),
    (H200, "Llama-3.1-8B", "int8", 1, 8016, 4529, 2.57),
    (H200, "Llama-3.1-8B", "int8", 1, 32128, 4530, 3.374),
    (H200, "Llama-3.1-8B", "int8", 4, 2064, 4545, 2.82),
    (H200, "Llama-3.1-8B", "int8", 8, 160, 4500, 2.642),
    (H200, "Llama-3.1-8B", "int8", 1, 160, 4487, 2.135),
    (H200, "Llama-3.1-8B", "int8", 2, 160, 4448, 2.381),
    (H200, "Llama-3.1-8B", "int8", 4, 160, 4448, 2.398),
    (H200, "Llama-3.1-8B", "int8", 8, 160, 4448, 2.664),
    (H200, "Llama-3.1-8B", "int4", 1, 160, 4486, 1.486),
    (H200, "Llama-3.1-8B", "bf16", 1, 160, 4530, 3.626),
    (H200, "Llama-3.1-8B", "fp8", 1, 160, 4465, 2.170),
    (H200, "Llama-3.2-1B", "int8", 1, 160, 4438, 0.530),
    (H200, "Llama-3.2-1B", "int8", 1, 160, 4384, 0.538),
    (H200, "Llama-3.2-1B", "int8", 1, 2032, 4387, 0.567),
    (H200, "Llama-3.1-8B", "int8", 2, 160, 4439, 2.424),
    (H200, "Llama-3.1-8B", "int8", 4, 160, 4519, 2.441),
    (H200, "Llama-3.2-1B", "bf16", 1, 144, 4437, 0.76),
    (H200, "Llama-2-7B", "int8", 1, 256, 4474, 2.007),
    (H200, "Llama-3.1-8B", "int8", 1, 240, 4626, 2.151),
    (H200, "Llama-3.1-8B", "int8", 1, 256, 4483, 2.165),
    (H200, "Llama-3.1-8B", "int8", 1, 664, 4467, 2.174),
    (H200, "Llama-3.1-8B", "int8", 1, 1564, 4467, 2.208),
    (H200, "Llama-3.1-8B", "int8", 1, 32032, 4610, 3.209),
    (H200, "Llama-3.1-8B", "int8", 8, 256, 4511, 2.705),
    (H200, "Llama-3.1-8B", "int4", 1, 256, 4539, 1.509),
    (H200, "Llama-3.2-1B", "int8", 1, 256, 4531, 0.549),
    (H200, "Llama-2-7B", "int8", 1, 160, 4632, 1.855),
    (H200, "Llama-2-7B", "int8", 8, 256, 4540, 2.837),
    (H100, "Llama-2-7B", "int8", 1, 256, 3137, 2.564),
    (H100, "Llama-2-7B", "int8", 1, 144, 3111, 1e3 / 390),
    (H100, "Llama-2-13B", "int8", 1, 144, 3120, 1e3 / 205),
    (H100, "Llama-3.1-8B", "int4", 1, 144, 3061, 1e3 / 514),
    (H100, "Qwen3-4B", "bf16", 1, 144, 2970, 1e3 / 327),
    (H100, "Llama-3.2-1B", "int8", 1, 144, 3097, 1e3 / 1460),
]


@pytest.mark.parametrize(("card", "shape", "form", "num_rows", "depth", "gbps", "milliseconds"), MEASURED)
def test_steps_as_measured(
    card: CardFacts,
    shape: str,
    form: str,
    num_rows: int,
    depth: int,
    gbps: float,
    milliseconds: float,
) -> None:
    plan = plan_memory(
        StoredModel.of_model(shape_model(shape, form)), max_seq_len=depth + 16, num_rows=num_rows, card=card
    )
    predicted = CardPredictor(plan, Rates(1e9 * gbps, {}), card).decode_seconds(depth, num_rows)
    assert 1e3 * predicted == pytest.approx(milliseconds, rel=0.12)


# Format, rows, tokens in the cache and milliseconds of a step of Llama-3.1-8B on H200s that
# read 4,500 to 4,600 GB/s and whose large fp16 products reach 720 TFLOP/s. Those after 87 tokens are short bursts.
MANY_ROWS = [
    ("int8", 16, 160, 3.03),
    ("int8", 16, 160, 3.13),
    ("int8", 32, 160, 3.47),
    ("int8", 32, 160, 3.61),
    ("int8", 64, 160, 4.14),
    ("int8", 128, 160, 5.97),
    ("int8", 128, 160, 6.43),
    ("int8", 256, 160, 10.44),
    ("int4", 32, 87, 3.11),
    ("int4", 64, 87, 4.06),
    ("bf16", 16, 87, 4.67),
    ("bf16", 32, 87, 4.96),
    ("bf16", 64, 87, 5.41),
]
H200_RATES = Rates(4.6e12, {"float16": 7.2e14}, 5.5e-6)


@pytest.mark.parametrize(("form", "num_rows", "depth", "milliseconds"), MANY_ROWS)
def test_steps_of_many_rows_as_measured(form: str, num_rows: int, depth: int, milliseconds: float) -> None:
    stored = StoredModel.of_model(shape_model("Llama-3.1-8B", form))
    plan = plan_memory(stored, max_seq_len=512, num_rows=256, card=H200)
    predicted = CardPredictor(plan, H200_RATES, H200).decode_seconds(depth, num_rows)
    assert 1e3 * predicted == pytest.approx(milliseconds, rel=0.12)


# Shape, format, tokens of a prompt, and milliseconds on that card. Shorter prompts of small models wait for the host.
PROMPTS = [
    ("Llama-3.1-8B", "int8", 8, 2.62),
    ("Llama-3.1-8B", "int8", 8, 2.83),
    ("Llama-3.1-8B", "int8", 12, 2.86),
    ("Llama-3.1-8B", "int8", 12, 3.04),
    ("Llama-3.1-8B", "int8", 64, 3.39),
    ("Llama-3.1-8B", "int8", 64, 3.57),
    ("Llama-3.1-8B", "int8", 128, 7.57),
    ("Llama-3.1-8B", "int8", 128, 7.70),
    ("Llama-3.1-8B", "int8", 256, 9.16),
    ("Llama-3.1-8B", "int8", 512, 13.39),
    ("Llama-3.1-8B", "int8", 1024, 23.08),
    ("Llama-3.1-8B", "int8", 2048, 46.2),
    ("Llama-3.1-8B", "int8", 2048, 47.4),
    ("Llama-3.1-8B", "int8", 4000, 95.4),
    ("Llama-3.1-8B", "int8", 8000, 210.2),
    ("Llama-3.1-8B", "int8", 8000, 215.0),
    ("Llama-3.1-8B", "int8", 16000, 478.8),
    ("Llama-2-7B", "int8", 12, 2.84),
    ("Llama-2-7B", "int8", 17, 3.14),
    ("Llama-2-7B", "int8", 64, 3.63),
    ("Llama-2-7B", "int8", 128, 6.93),
    ("Llama-2-7B", "int8", 128, 7.21),
]


@pytest.mark.parametrize(("shape", "form", "num_tokens", "milliseconds"), PROMPTS)
def test_prompts_as_measured(shape: str, form: str, num_tokens: int, milliseconds: float) -> None:
    stored = StoredModel.of_model(shape_model(shape, form))
    plan = plan_memory(stored, max_seq_len=min(16384, stored.config.max_position_embeddings), num_rows=1, card=H200)
    predicted = CardPredictor(plan, H200_RATES, H200).prefill_seconds(num_tokens)
    assert predicted is not None
    assert 1e3 * predicted == pytest.approx(milliseconds, rel=0.12)


# Tokens of a span, those before it, microseconds of a layer's attention: 32 query heads and 8 key-value heads of 128,
# fp16 cache, on an H200 whose large fp16 products reach 720 TFLOP/s.
ATTENTION = [
    (512, 0, 16.2),
    (1024, 0, 29.5),
    (2048, 0, 82.7),
    (2048, 2048, 196.2),
    (2048, 4096, 307.4),
    (2048, 6144, 424.9),
    (8192, 0, 974.2),
    (512, 30000, 431.2),
]


@pytest.mark.parametrize(("num_tokens", "start", "microseconds"), ATTENTION)
def test_a_prompts_attention_as_measured(num_tokens: int, start: int, microseconds: float) -> None:
    cost = attention_prefill_cost(num_tokens, start, QkvLayout(32, 8, 128), 2, None)
    launch = Launch("attention_prefill_wgmma", "", (132,), 384, (), cost=lambda: cost)
    predicted = Pricing(Rates(4.5e12, {"float16": 7.2e14}), H200).seconds(launch)
    assert 1e6 * predicted == pytest.approx(microseconds, rel=0.18)
