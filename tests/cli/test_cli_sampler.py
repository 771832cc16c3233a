"""The sampler's settings as a user gives them: flags, and a model's generation_config.json as transformers has it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from results import Llmcli, Result
from transformers import GenerationConfig, LlamaForCausalLM

from llmcli.sampling.params import DEFAULT_ORDER, SPECS


@pytest.fixture
def generate(llmcli: Llmcli, tiny_llama: Path) -> Llmcli:
    return lambda *arguments: llmcli("generate", "Hi there", "-m", tiny_llama, "--max-new-tokens", 12, *arguments)


def token_ids(result: Result) -> list[int]:
    assert result.exit_code == 0, result.stderr
    return list(json.loads(result.stdout)["token_ids"])


def transformers_text(model_copy: Path, prompt: list[int], **settings: Any) -> list[int]:
    """The greedy text of the model by transformers."""
    llama = LlamaForCausalLM.from_pretrained(model_copy, dtype=torch.float32)
    config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=[257], **settings)
    with torch.inference_mode():
        return llama.generate(torch.tensor([prompt]), config)[0, len(prompt) :].tolist()


def test_a_generation_config_gives_the_text_that_it_gives_with_transformers(llmcli: Llmcli, model_copy: Path) -> None:
    arguments = ("generate", "Hi there", "-m", model_copy, "--temperature", 0, "--max-new-tokens", 14, "--json")
    prompt = [256, *b"Hi there"]
    plain = token_ids(llmcli(*arguments))
    assert plain == transformers_text(model_copy, prompt, max_new_tokens=14)
    settings: dict[str, Any] = {}

    def text_with(**more: Any) -> list[int]:
        """Each setting comes on top of the last, and changes the text where it should."""
        settings.update(more)
        (model_copy / "generation_config.json").write_text(json.dumps(settings))
        expected = transformers_text(model_copy, prompt, max_new_tokens=14, **settings)
        assert token_ids(llmcli(*arguments)) == expected
        return expected

    text = text_with(begin_suppress_tokens=[plain[0]])
    assert text[0] != plain[0]
    text = text_with(suppress_tokens=[text[1]])
    changed = text_with(bad_words_ids=[[text[2], text[3]], [257]])
    assert (text[2], text[3]) not in zip(changed, changed[1:], strict=False)
    text = text_with(sequence_bias=[[[changed[4], 99], 50.0], [[changed[0], changed[1], 98], -5.0]])
    assert 99 in text
    text_with(encoder_repetition_penalty=3.0)
    text_with(repetition_penalty=1.3)
    assert text_with(forced_eos_token_id=120)[-1] == 120


def test_forced_end_and_suppressed_tokens_give_way_to_flags(llmcli: Llmcli, model_copy: Path) -> None:
    arguments = ("generate", "Hi there", "-m", model_copy, "--temperature", 0, "--max-new-tokens", 5, "--json")
    plain = token_ids(llmcli(*arguments, "--ignore-eos"))
    settings = {"forced_eos_token_id": 257, "suppress_tokens": [plain[0]]}
    (model_copy / "generation_config.json").write_text(json.dumps(settings))
    assert token_ids(llmcli(*arguments))[-1] == 257
    # A bias replaces the ban, and a text that ignores the end gets none.
    assert token_ids(llmcli(*arguments, "--ignore-eos", f"--logit-bias={plain[0]}=0")) == plain


def test_stop_strings_of_the_model_stop_unless_others_are_given(llmcli: Llmcli, model_copy: Path) -> None:
    arguments = ("generate", "Hi there", "-m", model_copy, "--temperature", 0, "--max-new-tokens", 12)
    plain = llmcli(*arguments).stdout
    (model_copy / "generation_config.json").write_text(json.dumps({"stop_strings": [plain[4:6]]}))
    assert llmcli(*arguments).stdout == plain[: plain.index(plain[4:6])] + "\n"
    result = llmcli(*arguments, "--stop", plain[6:8], "--stats")
    assert result.stdout == plain[: plain.index(plain[6:8])] + "\n"
    assert f"{plain[6:8]!r} (flag)" in result.stderr


def test_settings_that_are_not_numbers_are_shown_with_their_source(llmcli: Llmcli, model_copy: Path) -> None:
    (model_copy / "generation_config.json").write_text(
        json.dumps({"suppress_tokens": [65, 66], "bad_words_ids": [[67]]})
    )
    arguments = ("--dry-breaker", "a", "--sampler-order", "top_p,temperature")
    stderr = llmcli("generate", "Hi", "-m", model_copy, "--max-new-tokens", 2, *arguments, "--stats").stderr
    rows = dict(line.split("  ", 1) for line in stderr.splitlines() if "  " in line)
    assert {name: text.strip() for name, text in rows.items() if name in ("suppress_tokens", "bad_words_ids",
            "dry_breakers", "sampler_order")} == {
        "suppress_tokens": "65, 66 (generation_config.json)",
        "bad_words_ids": "(67,) (generation_config.json)",
        "dry_breakers": "'a' (flag)",
        "sampler_order": "top_p, temperature (flag)",
    }  # fmt: skip
    assert "65, 66 (generation_config.json)" in llmcli("info", model_copy).stdout


def test_keys_that_are_not_applied_are_named_on_one_line(llmcli: Llmcli, model_copy: Path) -> None:
    (model_copy / "generation_config.json").write_text(json.dumps({"num_beams": 4, "max_time": 2.5, "top_h": None}))
    stderr = llmcli("generate", "Hi", "-m", model_copy, "--max-new-tokens", 2).stderr
    assert stderr.splitlines()[0] == "warning: model: generation_config.json sets num_beams, max_time; not applied here"
    (model_copy / "generation_config.json").write_text(json.dumps({"num_beams": 1, "guidance_scale": 1.0}))
    assert "not applied" not in llmcli("generate", "Hi", "-m", model_copy, "--max-new-tokens", 2).stderr


def test_a_malformed_value_of_the_model_is_an_error_of_the_checkpoint(llmcli: Llmcli, model_copy: Path) -> None:
    (model_copy / "generation_config.json").write_text('{"sequence_bias": [[[5], NaN]]}')
    result = llmcli("generate", "Hi", "-m", model_copy, "--max-new-tokens", 2)
    result.expect_error(3, f"{model_copy}/generation_config.json: sequence_bias is [[[5], nan]], expected pairs of")


def test_looking_inside_shows_the_new_steps_and_the_same_text(generate: Llmcli, tmp_path: Path) -> None:
    flags = ("--seed", 2, "--mirostat-tau", 2, "--top-n-sigma", 2, "--dynatemp-range", 0.3, "--top-p", 1)
    page = tmp_path / "page.html"
    result = generate(*flags, "--why", "--html", page)
    assert result.stdout == generate(*flags).stdout
    for step in ("mirostat", "top_n_sigma 2", "temperature 0.8"):
        assert step in result.stderr
    assert all(f'"name":"{step}"' in page.read_text() for step in ("mirostat", "top_n_sigma"))
    settings = page.read_text()
    assert "mirostat_tau" in settings
    assert "dynatemp_range" in settings


def test_an_order_leaves_out_our_defaults_but_nothing_that_was_set(generate: Llmcli) -> None:
    result = generate("--sampler-order", "temperature", "--stats")
    assert "top_p                       1.0 (not in the sampler order)" in result.stderr
    result = generate("--sampler-order", "top-k,temperature", "--top-p", 0.9)
    result.expect_error(2, "the sampler order leaves out top_p, but top_p is 0.9; name it too, or set top_p to 1.0")
    assert generate("--sampler-order", ",".join(DEFAULT_ORDER), "--seed", 5).stdout == generate("--seed", 5).stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--sampler-order", "topk"), "the sampler order names 'topk', expected some of temperature, top_n_sigma"),
        (("--sampler-order", "top_k,,min_p"), "--sampler-order is 'top_k,,min_p', expected names of steps with commas"),
        (("--sampler-order", ""), "--sampler-order is ''"),
        (("--sampler-order", "mirostat,temperature"), "mirostat before temperature, expected it at the end"),
        (("--sampler-order", "top_k,top_k"), "names top_k 2 times"),
        (("--dry-breaker", ""), "--dry-breaker is empty; give it a text, or none for no breaker at all"),
        (("--dry-breaker", "caf\udce9"), "--dry-breaker is not UTF-8 text"),
        (
            ("--dry-multiplier", 1, "--dry-breaker", "User:"),
            "--dry-breaker is 'User:', which no single token of tiny-llama contains; shorten it",
        ),
        (("--mirostat-tau", "-1"), "mirostat_tau is -1.0 (flag), expected a number >= 0"),
    ],
)
def test_bad_flags(generate: Llmcli, arguments: tuple[object, ...], part: str) -> None:
    generate(*arguments).expect_error(2, part)


HUGE = ("9" * 5000, "1" + "0" * 400, "-" + "9" * 5000, "1e-320", "1e400", "nan", "inf", "-inf")


@pytest.mark.parametrize(
    "flag",
    [f"--{name.replace('_', '-')}" for name in SPECS]
    + ["--seed", "--max-new-tokens", "--num-samples", "--only", "--context", "--threads", "--logprobs"],
)
def test_absurd_numbers_never_look_like_a_bug_of_ours(generate: Llmcli, flag: str) -> None:
    for value in HUGE:
        others = ("--dry-multiplier", 1) if flag.startswith("--dry") else ("--repetition-penalty", 1.1)
        result = generate(*others, f"{flag}={value}", "--logprobs=1", "--json", f"{flag}={value}")
        assert result.exit_code in (0, 2), (value, result.stderr[:300])
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "value", [f"{HUGE[0]}=1", f"{HUGE[1]}=1", f"1={HUGE[0]}", "1=nan", "1=inf", "nan=1", "1=1e400"]
)
def test_absurd_biases_neither(generate: Llmcli, value: str) -> None:
    generate(f"--logit-bias={value}").expect_error(2, "")


def test_help_lists_every_step(llmcli: Llmcli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # in 80 the longest name is cut
    text = llmcli("generate", "--help-all").stdout
    assert "Sampling:" in text
    assert all(f"--{name.replace('_', '-')}" in text for name in (*SPECS, "sampler_order", "dry_breaker"))
