"""Commands that compare: `diff`, `eval --against` and `verify`."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from docs_schemas import check_docs_schema
from results import Llmcli
from tiny_models import write_tiny_llama

from llmcli.cli import doctor
from llmcli.cli.evaluate import describe_change, marked
from llmcli.cli.terminal import visible
from llmcli.cli.units import divergence
from llmcli.lab.verify import KernelVerdict
from llmcli.measure.evaluate import Comparison, Evaluation
from llmcli.measure.verify import LayerVerdict, LogitsVerdict

NO_DIFFERENCE = "no difference that this text shows"
TEXT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(scope="module")
def coarse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in bf16 numbers."""
    return write_tiny_llama(tmp_path_factory.mktemp("coarse") / "coarse", dtype=torch.bfloat16)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_eval_of_one_model(llmcli: Llmcli, tiny_llama: Path, text_file: Path) -> None:
    result = llmcli("eval", tiny_llama, "--file", text_file, "--context", 64)
    first, second = result.stdout.splitlines()
    assert first.startswith("tiny-llama: perplexity ")
    assert second == f"{len(TEXT)} tokens scored, windows of 64, stride 32; in parentheses 95% intervals"
    answer = json.loads(llmcli("eval", tiny_llama, "--file", text_file, "--context", 64, "--json").stdout)
    (model,) = answer["models"]
    low, high = model["perplexity_interval"]
    assert first == f"tiny-llama: perplexity {model['perplexity']:.4f} ({low:.4f} to {high:.4f})"
    assert low < model["perplexity"] < high
    assert "mean_kl" not in answer


def test_eval_of_a_text_too_short_for_intervals(
    llmcli: Llmcli, tiny_llama: Path, coarse: Path, text_file: Path
) -> None:
    text_file.write_text("A short one.")
    arguments = ("eval", tiny_llama, "--against", coarse, "--file", text_file, "--context", 64)
    lines = llmcli(*arguments).stdout.splitlines()
    assert not any("(" in line.replace("(worse)", "").replace("(better)", "") for line in lines)
    assert lines[-1].endswith("; too few for 95% intervals")
    answer = json.loads(llmcli(*arguments, "--json").stdout)
    assert [answer[key] for key in answer if key.endswith("_interval")] == [None] * 3
    assert answer["perplexity_differs"] is None
    check_docs_schema("eval", answer)


@pytest.mark.parametrize(
    ("change", "ends", "told"),
    [
        (0.01, (0.005, 0.015), "1.005% higher (worse) (+0.501% to +1.511%)"),
        (-0.01, (-0.015, -0.005), "0.995% lower (better) (-1.489% to -0.499%)"),
        (0.01, (-0.001, 0.021), "no difference that this text shows (-0.100% to +2.122%)"),
        (0.0, (0.0, 0.0), "the same"),
        (1e-9, (1e-10, 2e-9), "the same"),
        (0.01, None, "1.005% higher (worse)"),
    ],
)
def test_a_difference_within_its_interval_is_none(change: float, ends: Any, told: str) -> None:
    first, second = (Evaluation(100, 64, 32, nll, None) for nll in (2.0, 2.0 + change))
    assert describe_change(Comparison(first, second, ends, 0.1, None, 0.9, None)) == told


def test_eval_against_another(llmcli: Llmcli, tiny_llama: Path, coarse: Path, text_file: Path) -> None:
    arguments = ("eval", tiny_llama, "--against", coarse, "-f", text_file, "--stride", 20, "--context", 64)
    answer = json.loads(llmcli(*arguments, "--json").stdout)
    assert [model["model"] for model in answer["models"]] == ["tiny-llama", "coarse"]
    assert 0 < answer["mean_kl"] < 0.01
    assert 0.9 < answer["top1_agreement"] <= 1
    text = llmcli(*arguments).stdout
    kl = " to ".join(map(divergence, answer["mean_kl_interval"]))
    assert f"mean KL divergence {divergence(answer['mean_kl'])} ({kl}) nats per token" in text
    before, after = (model["perplexity"] for model in answer["models"])
    low, high = answer["perplexity_change_interval"]
    assert low < answer["perplexity_change"] < high
    assert after / before - 1 == pytest.approx(answer["perplexity_change"])
    assert answer["perplexity_differs"] == (not low <= 0 <= high)
    direction = "higher (worse)" if after > before else "lower (better)"
    size = f"{abs(after / before - 1):.3%} {direction}" if answer["perplexity_differs"] else NO_DIFFERENCE
    ends = " to ".join(f"{end:.4f}" for end in answer["models"][1]["perplexity_interval"])
    assert f"coarse: perplexity {after:.4f} ({ends}), {size} ({low:+.3%} to {high:+.3%})\n" in text
    opposite = json.loads(llmcli("eval", coarse, "--against", tiny_llama, *arguments[4:], "--json").stdout)
    assert (1 + opposite["perplexity_change"]) * (1 + answer["perplexity_change"]) == pytest.approx(1)
    same = llmcli("eval", coarse, "--against", coarse, *arguments[4:]).stdout
    assert f"coarse: perplexity {after:.4f} ({ends}), the same\n" in same
    assert f"top-1 agreement {answer['top1_agreement']:.2%}" in text


def test_eval_of_an_int8_cache(llmcli: Llmcli, tiny_llama: Path, coarse: Path, text_file: Path) -> None:
    """One model is compared with itself; with two, the second has the requested cache."""
    common = ("-f", text_file, "--context", 64)
    usual = json.loads(llmcli("eval", tiny_llama, *common, "--json").stdout)["models"][0]
    arguments = ("eval", tiny_llama, "--kv-cache", "int8", *common)
    answer = json.loads(llmcli(*arguments, "--json").stdout)
    assert [(model["model"], model["kv_cache"]) for model in answer["models"]] == [
        ("tiny-llama", "auto"),
        ("tiny-llama", "int8"),
    ]
    assert answer["models"][0] == usual
    assert answer["models"][1]["perplexity"] != usual["perplexity"]
    assert 0 < answer["mean_kl"] < 1e-3
    lines = llmcli(*arguments).stdout.splitlines()
    assert lines[1].startswith(f"tiny-llama, KV cache int8: perplexity {answer['models'][1]['perplexity']:.4f} (")
    pair = json.loads(llmcli(*arguments, "--against", coarse, "--json").stdout)
    assert [(model["model"], model["kv_cache"]) for model in pair["models"]] == [
        ("tiny-llama", "auto"),
        ("coarse", "int8"),
    ]
    assert pair["mean_kl"] > answer["mean_kl"]


def test_diff_marks_divergences(
    llmcli: Llmcli, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_tiny_llama(tmp_path / "other", seed=5)
    arguments = ("diff", tiny_llama, other, "Hi", "--max-new-tokens", 12)
    answer = json.loads(llmcli(*arguments, "--json").stdout)
    greedy = ("generate", "Hi", "-m", tiny_llama, "--temperature", 0, "--max-new-tokens", 12, "--json")
    assert [token["token_id"] for token in answer["tokens"]] == json.loads(llmcli(*greedy).stdout)["token_ids"]
    assert answer["num_divergences"] > 0
    result = llmcli(*arguments)
    assert result.stdout.count(">") >= answer["num_divergences"]
    same = answer["num_agreeing"]
    begins = f"the first {same} tokens are the same" if same > 1 else "they differ from the first token on"
    assert same != 1
    assert f"{begins}; B would choose another token" in result.stdout
    monkeypatch.setattr("llmcli.cli.evaluate.has_color", lambda stream: True)
    tinted = llmcli(*arguments).stdout
    assert tinted != result.stdout
    assert re.sub(r"\x1b\[[\d;]*m", "", tinted) == visible(result.stdout)


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [(" cub", "·called", " [cub>called]"), (" M", "B", "[·M>B]"), ("ar", "et", "[ar>et]"), (",", "·is", "[,>·is]")],
)
def test_a_space_that_both_choices_begin_with_stands_before_them(first: str, second: str, shown: str) -> None:
    assert marked(first, second) == shown


def test_other_vocabularies_are_refused(llmcli: Llmcli, tiny_llama: Path, tmp_path: Path, text_file: Path) -> None:
    other = write_tiny_llama(tmp_path / "other", vocab_size=300)
    llmcli("diff", tiny_llama, other, "Hi").expect_error(2, "different vocabularies")
    llmcli("eval", tiny_llama, "--against", other, "-f", text_file).expect_error(2, "different vocabularies")


def test_eval_refuses_what_leaves_no_context(llmcli: Llmcli, tiny_llama: Path, text_file: Path) -> None:
    arguments = ("eval", tiny_llama, "-f", text_file, "--context", 64)
    llmcli(*arguments, "--stride", 63).expect_error(2, "leaves no context in a window of 64; use at most 62")
    llmcli("eval", tiny_llama, "-f", text_file, "--context", 513).expect_error(
        2, "over the context limit of tiny-llama, 512 tokens"
    )
    result = llmcli("diff", tiny_llama, tiny_llama, "Hi", "--max-new-tokens", 600)
    result.expect_error(2, "the context holds 512; use --max-new-tokens 509 or a shorter prompt")


# `llmcli verify`: its message without a card; and with the card's parts replaced, its lines, JSON and exit codes.


KERNELS = [KernelVerdict("rms_norm", 5, 0, 0.25, ""), KernelVerdict("embedding", 3, 0, 0.0, "")]
WRONG = KernelVerdict("swiglu", 4, 2, math.inf, "num_rows 6: out[1, 3] is 2, expected 1 within 0.1; 1 of 9 are wrong")
LOGITS = LogitsVerdict(32, 16, 0.01, 2.0, 0.05, 17, 99, 32)
LAYERS = [
    LayerVerdict("embed_tokens", 0.0, 0.0005, 0, 0, 0.25, 0.25),
    LayerVerdict("layers.0", 0.0012, 0.0155, 3, 40, 1.001, 1.0),
    LayerVerdict("layers.1", 0.0031, 0.0219, 31, 7, -2.0, -2.003),
]
WRONG_LAYERS = [
    LAYERS[0],
    LayerVerdict("layers.0", 0.75, 0.0155, 21, 40, 1.75, 1.0),
    LayerVerdict("layers.1", math.nan, 0.0219, 21, 7, math.nan, -2.003),
]


def test_without_a_card_it_says_so(llmcli: Llmcli) -> None:
    llmcli("verify").expect_error(4, "no card can be used")
    llmcli("verify", "--device", "cpu").expect_error(4, "--device cpu was given")
    llmcli("verify", "--device", "cuda:1").expect_error(4, "--device cuda:1")


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[KernelVerdict], LogitsVerdict], None]:
    def replace(
        kernels: list[KernelVerdict], logits: LogitsVerdict, layers: Sequence[LayerVerdict] = tuple(LAYERS)
    ) -> None:
        def compare(session: Any, card: int, token_ids: tuple[int, ...]) -> tuple[list[LayerVerdict], LogitsVerdict]:
            seen.append(token_ids)
            return list(layers), logits

        device: Any = SimpleNamespace(name="A card", arch="sm_90", activate=lambda: None)
        monkeypatch.setattr(doctor.RunnerOptions, "require_card", lambda self, why: 0)
        monkeypatch.setattr(doctor, "_compare", compare)
        monkeypatch.setattr("llmcli.kernels.device.Device.open", lambda card: device)
        monkeypatch.setattr("llmcli.lab.verify.verify_kernels", lambda opened, on_compile: iter(kernels))

    seen: list[tuple[int, ...]] = []
    replace.seen = seen  # type: ignore[attr-defined]
    return replace


def test_all_is_right(llmcli: Llmcli, on_card: Any) -> None:
    on_card(KERNELS, LOGITS)
    result = llmcli("verify", "--tokens", 300)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "A card, sm_90"
    assert lines[1].split() == ["rms_norm", "5", "cases", "0.25", "of", "its", "bound", "ok"]
    assert lines[2].split() == ["embedding", "3", "cases", "exact", "ok"]
    text = " ".join(" ".join(lines[3:]).split())
    assert "what each layer of storyteller adds (16 tokens together, 16 one by one): the largest error of" in text
    assert [line for line in lines if line.startswith(("embed_tokens", "layers."))] == [
        "embed_tokens                0  exact             ok",
        "layers.0               0.0012  0.08 of its bound  ok",
        "layers.1               0.0031  0.14 of its bound  ok",
    ]
    assert "is the first" not in text
    assert "(16 tokens together, 16 one by one): the largest difference is 0.01 at position 17, token 99" in text
    assert "0.10 of its bound ok" in text
    assert "the same at 32 of 32 positions" in text
    assert [len(token_ids) for token_ids in on_card.seen] == [300]  # the text is repeated as often as needed


def test_a_wrong_kernel_is_named(llmcli: Llmcli, on_card: Any) -> None:
    on_card([*KERNELS, WRONG], LOGITS)
    result = llmcli("verify")
    assert result.exit_code == 4
    assert "WRONG in 2: num_rows 6: out[1, 3] is 2, expected 1 within 0.1" in result.stdout
    shown = json.loads(llmcli("verify", "--json").stdout)
    check_docs_schema("verify", shown)
    assert (shown["is_right"], shown["logits"]["is_right"]) == (False, True)
    assert [one["is_right"] for one in shown["kernels"]] == [True, True, False]
    assert shown["kernels"][2]["largest"] is None


@pytest.mark.parametrize("largest", [0.2, math.nan])
def test_wrong_logits_are_told(llmcli: Llmcli, on_card: Any, largest: float) -> None:
    on_card(KERNELS, dataclasses.replace(LOGITS, largest=largest))
    result = llmcli("verify")
    assert result.exit_code == 4
    assert "WRONG" in result.stdout
    result = llmcli("verify", "--json")
    assert result.exit_code == 4
    check_docs_schema("verify", json.loads(result.stdout))
    assert json.loads(result.stdout)["logits"]["is_right"] is False


def test_the_first_wrong_layer_is_named_once(llmcli: Llmcli, on_card: Any) -> None:
    on_card(KERNELS, LOGITS, WRONG_LAYERS)
    result = llmcli("verify")
    assert result.exit_code == 4
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("layers.") and "bound" in line] == [
        "layers.0                 0.75  48.39 of its bound  WRONG",
        "layers.1                  nan   nan of its bound  WRONG",
    ]
    said = " ".join(result.stdout.split())
    assert "layers.0 is the first that is wrong: behind it element 40 at position 21 is 1.75, expected 1 logits" in said
    assert said.count("is the first") == 1
    result = llmcli("verify", "--json")
    assert result.exit_code == 4
    shown = json.loads(result.stdout)
    check_docs_schema("verify", shown)
    assert (shown["is_right"], shown["first_wrong_layer"], shown["logits"]["is_right"]) == (False, "layers.0", True)
    assert [one["module"] for one in shown["layers"]] == ["embed_tokens", "layers.0", "layers.1"]
    assert [one["is_right"] for one in shown["layers"]] == [True, False, False]
    assert (shown["layers"][1]["largest"], shown["layers"][1]["bound"]) == (0.75, 0.0155)
    assert (shown["layers"][2]["largest"], shown["layers"][2]["actual"]) == (None, None)


def test_more_tokens_than_the_model_takes_are_refused(llmcli: Llmcli, on_card: Any) -> None:
    on_card(KERNELS, LOGITS)
    llmcli("verify", "-q", "--tokens", 10**6).expect_error(2, "--tokens is 1000000")
