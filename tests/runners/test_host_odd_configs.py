"""Odd configurations of every family: logits equal transformers', or a refusal that says why, never anything else.

300 of them, or as many as `--odd-configs` says; the same number is always the same configuration.
"""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from odd_configs import PROMPT_LENGTH, odd_config, write_odd_model  # noqa: E402
from row_steps import logits_of  # noqa: E402

from llmcli.checkpoint.model import open_model  # noqa: E402
from llmcli.config.llama import LlamaConfig  # noqa: E402
from llmcli.errors import LLMCliError, UnsupportedModelError  # noqa: E402
from llmcli.runners.numpy.load import load as load_on_numpy  # noqa: E402
from llmcli.runners.torch.load import load as load_on_torch  # noqa: E402

# The fastest frequency may differ in a last bit, which is 2e-6 of an angle at the prompt's end; scores of several units
# and a few layers make it ten times that. Real errors are 1e-3 and more.
MAX_RELATIVE_ERROR = 3e-5

# Configurations that transformers computes and this program does not.
REFUSED_HERE = (
    "hidden_act 'gelu' is not supported",
    "is_causal other than true is not supported",
    "per_layer_config is not supported",
    "partial_rotary_factor other than 1 is not supported",
    r"rotary parameters by layer type \(full_attention\) are not supported",
    r"high_freq_factor \S+ must be above low_freq_factor",
    "layer type 'attention' is not supported",
    "layer type sliding_attention is not supported for (llama|seed_oss|internlm3)",
    "hidden_size .* is not a multiple of num_attention_heads",
)
# What this program computes though transformers stops, by family and what transformers says.
RUN_ONLY_HERE = (
    # With a head_dim of its own that makes no difference.
    *((family, r"The hidden size \(\d+\) is not a multiple") for family in ("llama", "cwm", "internlm3")),
    # Layer types, but no head_dim.
    *((family, "unsupported operand type.* 'NoneType' and 'float'") for family in ("mistral", "ministral")),
    # Layer types that ask for no window, and there is none.
    *((family, "Could not find a `sliding_window`") for family in ("mistral", "ministral", "cwm")),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(metafunc.config.getoption("--odd-configs")))


@pytest.fixture(scope="module")
def outcomes() -> Counter[str]:
    return Counter()


def reference_logits(folder: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].numpy()  # [num_tokens, vocab_size]


def test_logits_equal_transformers_or_the_refusal_is_known(number: int, tmp_path: Path, outcomes: Counter[str]) -> None:
    config, folder = odd_config(number), tmp_path / "model"
    generator = torch.Generator().manual_seed(number)
    try:
        write_odd_model(config, folder, number)
        token_ids = torch.randint(config.values["vocab_size"], (PROMPT_LENGTH,), generator=generator).tolist()
        expected = reference_logits(folder, token_ids)
    except Exception as error:  # transformers has no class for its refusals
        outcomes[_what_is_done_instead(folder, config.values["model_type"], str(error))] += 1
        return
    try:
        model = open_model(folder)
    except UnsupportedModelError as error:
        if not any(re.search(known, str(error)) for known in REFUSED_HERE):
            raise
        outcomes["refused here"] += 1
        return
    for load in (load_on_torch, load_on_numpy):
        runner = load(model, max_seq_len=PROMPT_LENGTH)
        for length in (1, PROMPT_LENGTH // 2, PROMPT_LENGTH):
            difference = np.abs(logits_of(runner, token_ids[:length]) - expected[length - 1]).max()
            if (
                difference / np.abs(expected[length - 1]).max() >= MAX_RELATIVE_ERROR
            ):  # some models magnify any rounding
                exact = reference_logits(folder, token_ids, torch.float64)[length - 1]
                assert difference < 2 * np.abs(expected[length - 1] - exact).max()
    outcomes["equal"] += 1


def _what_is_done_instead(folder: Path, family: str | None, reason: str) -> str:
    """If transformers stops, so does this program, except in a few cases."""
    try:
        LlamaConfig.from_dict(json.loads((folder / "config.json").read_text()), "config.json")
    except LLMCliError:
        return "refused by both"
    is_known = any(family == known and re.search(text, reason) for known, text in RUN_ONLY_HERE)
    assert is_known, f"transformers refuses this configuration: {reason}"
    return "run only here"


def test_most_configurations_were_compared(outcomes: Counter[str], request: pytest.FixtureRequest) -> None:
    total = outcomes.total()
    if total < request.config.getoption("--odd-configs") or total < 100:
        pytest.skip("counts the outcomes of the whole test, which did not run or did not pass")
    assert outcomes["equal"] > 0.55 * total, outcomes
    assert outcomes["refused here"] < 0.1 * total, outcomes
    assert outcomes["run only here"] < 0.05 * total, outcomes
