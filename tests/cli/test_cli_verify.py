"""`llmcli verify`: its message without a card; and with the card's parts replaced, its lines, JSON and exit codes."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from docs_schemas import check_docs_schema
from results import Result

from llmcli.cli import doctor, lazy
from llmcli.lab.verify import KernelVerdict
from llmcli.measure.verify import LayerVerdict, LogitsVerdict

Llmcli = Callable[..., Result]

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
        monkeypatch.setattr(doctor, "_card", lambda named: 0)
        monkeypatch.setattr(doctor, "_compare", compare)
        monkeypatch.setattr(lazy, "Device", SimpleNamespace(open=lambda card: device), raising=False)
        monkeypatch.setattr(lazy, "verify_kernels", lambda opened, on_compile: iter(kernels), raising=False)

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


def test_json_of_what_is_right(llmcli: Llmcli, on_card: Any) -> None:
    on_card(KERNELS, LOGITS)
    shown = json.loads(llmcli("verify", "--json").stdout)
    check_docs_schema("verify", shown)
    assert (shown["is_right"], shown["first_wrong_layer"]) == (True, None)
    assert len(shown["layers"]) == 3


def test_more_tokens_than_the_model_takes_are_refused(llmcli: Llmcli, on_card: Any) -> None:
    on_card(KERNELS, LOGITS)
    llmcli("verify", "-q", "--tokens", 10**6).expect_error(2, "--tokens is 1000000")
