"""Logits on two runners: equal ones are right, small errors are within the bound, wrong ones are found and named."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmcli.checkpoint.model import open_model
from llmcli.measure.verify import compare_layers, compare_logits
from llmcli.resources import STORYTELLER, resource_folder
from llmcli.runners.base import Runner
from llmcli.runners.numpy.load import load

TOKENS = tuple(range(20, 51))


@pytest.fixture(scope="module")
def runner() -> Runner:
    return load(open_model(resource_folder(STORYTELLER)), max_seq_len=64)


class Changed:
    """A runner whose logits are changed by a function of the number of tokens that ran before, and of the logits."""

    def __init__(self, runner: Runner, change: Any):
        self._runner, self._change, self.spans = runner, change, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def queue(self, spans: Any) -> Any:
        self.spans.append(len(spans[0].token_ids))
        begin, step = self._runner.num_tokens(spans[0].row), self._runner.queue(spans)
        change = self._change

        class Step:
            def logits(self, span: int, first: int = 0) -> Any:
                return change(begin, step.logits(span, first).copy())

        return Step()


def test_equal_logits_are_right(runner: Runner) -> None:
    watched = Changed(runner, lambda begin, logits: logits)
    verdict = compare_logits(watched, runner, TOKENS)  # type: ignore[arg-type]
    assert (verdict.num_tokens, verdict.num_prompt_tokens, verdict.largest) == (31, 15, 0.0)
    assert verdict.is_right
    assert verdict.num_same_choices == 31
    assert watched.spans == [15] + [1] * 16


def test_roundings_to_sixteen_bits_are_right(runner: Runner) -> None:
    halved = Changed(runner, lambda begin, logits: logits.astype(np.float16).astype(np.float32))
    verdict = compare_logits(halved, runner, TOKENS)  # type: ignore[arg-type]
    assert 0 < verdict.part_of_bound < 0.5


@pytest.mark.parametrize(("place", "wrong"), [(3, 1.0), (14, 1.0), (15, 1.0), (30, 1.0), (20, math.nan)])
def test_one_wrong_logit_is_found(runner: Runner, place: int, wrong: float) -> None:
    def change(begin: int, logits: np.ndarray) -> np.ndarray:
        if begin <= place < begin + len(logits):
            logits[place - begin, 7] += wrong * logits[place - begin].std()
        return logits

    verdict = compare_logits(Changed(runner, change), runner, TOKENS)  # type: ignore[arg-type]
    assert not verdict.is_right
    assert (verdict.position, verdict.token_id) == (place, 7)
    if not math.isnan(wrong):
        assert verdict.largest == pytest.approx(verdict.spread, rel=1e-3)


def test_one_token_is_too_few(runner: Runner) -> None:
    for compare in (compare_logits, compare_layers):
        with pytest.raises(ValueError, match="needed are 2"):
            compare(runner, runner, TOKENS[:1])


class ChangedLayers:
    """A runner whose hidden states are changed by a function."""

    def __init__(self, runner: Runner, change: Any):
        self._runner, self._change = runner, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def hidden_states(self, span: Any, inputs: Any = None) -> Any:
        states = self._runner.hidden_states(span, inputs)
        self._change(states)
        return states


def test_equal_layers_are_right(runner: Runner) -> None:
    free_pages = runner.free_pages
    verdicts = compare_layers(runner, runner, TOKENS)
    assert [verdict.module for verdict in verdicts] == ["embed_tokens", *(f"layers.{index}" for index in range(6))]
    assert all(verdict.is_right and verdict.largest == 0 for verdict in verdicts)
    assert [verdict.bound for verdict in verdicts] == pytest.approx([2**-11] + [12 * 2**-11 * math.sqrt(7)] * 6)
    assert runner.free_pages == free_pages


@pytest.mark.parametrize(("layer", "part"), [(0, "down_proj"), (2, "down_proj"), (3, "o_proj"), (5, "o_proj")])
def test_only_a_wrong_layer_is_wrong(runner: Runner, layer: int, part: str) -> None:
    """One row of one matrix is three times as large; later layers are right for their inputs."""
    wrong = load(open_model(resource_folder(STORYTELLER)), max_seq_len=64)
    model: Any = wrong._device
    weight = getattr(model._model.layers[layer], part).weight
    weight[7] *= 3
    verdicts = compare_layers(wrong, runner, TOKENS)
    assert [verdict.module for verdict in verdicts if not verdict.is_right] == [f"layers.{layer}"]
    found = verdicts[layer + 1]
    assert found.element == 7 or part == "o_proj"  # what attention adds passes through the MLP, too
    assert found.actual != found.expected
    assert all(verdict.largest < 1e-4 for verdict in verdicts if verdict is not found)


def test_a_wrong_embedding_is_the_first_that_is_named(runner: Runner) -> None:
    def change(states: np.ndarray) -> None:
        states[0, -1, 9] *= 1.01

    embedding, *_ = compare_layers(ChangedLayers(runner, change), runner, TOKENS)  # type: ignore[arg-type]
    assert not embedding.is_right
    assert embedding.element == 9


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("is_reference", [False, True])
def test_layers_without_numbers_are_wrong(runner: Runner, wrong: float, is_reference: bool) -> None:
    def change(states: np.ndarray) -> None:
        states[2, -1, 9] = wrong

    changed: Any = ChangedLayers(runner, change)
    verdicts = compare_layers(*((runner, changed) if is_reference else (changed, runner)), TOKENS)
    assert [verdict.is_right for verdict in verdicts[:3]] == [True, True, False]
    assert verdicts[2].element == 9


def test_a_token_of_zeros_is_right_only_as_zeros(runner: Runner) -> None:
    zeros: Any = ChangedLayers(runner, lambda states: states.fill(0))
    assert all(verdict.is_right for verdict in compare_layers(zeros, zeros, TOKENS))
    embedding, *_ = compare_layers(runner, zeros, TOKENS)
    assert embedding.largest == math.inf


def test_a_large_hidden_state_hides_its_own_rounding() -> None:
    """Float32 keeps the hundredths of 100,000 plus a layer's output; an error in the last one is right."""

    def lose(states: np.ndarray) -> None:
        states[2:, :, 3] = np.nextafter(states[2:, :, 3], np.float32(1e6))

    runner = load(open_model(resource_folder(STORYTELLER)), max_seq_len=64)
    runner._device._model.embed_tokens[:, 3] = 1e5  # type: ignore[attr-defined]
    found = compare_layers(ChangedLayers(runner, lose), runner, TOKENS)[2]  # type: ignore[arg-type]
    assert found.element == 3
    assert abs(found.actual - found.expected) == 2.0**-7
    assert 0 < found.largest < found.bound


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("cupy")
    from simulated_card import simulate

    from llmcli.runners.cuda.load.model import load as load_on_card

    device: Any = simulate(monkeypatch)
    return load_on_card(
        open_model(resource_folder(STORYTELLER)), device=device, max_seq_len=200, uses_graphs=False, prefill_chunk=128
    )


def on_torch(max_seq_len: int) -> Runner:
    from llmcli.runners.torch.load import load as load_on_torch

    return load_on_torch(open_model(resource_folder(STORYTELLER)), max_seq_len=max_seq_len, dtype="float32")


@pytest.mark.parametrize("count", [31, 150])
def test_layers_of_a_simulated_card_are_right(simulated: Runner, count: int) -> None:
    """The card's roundings, by numpy, against torch in float32: a part of the bound, and not a small one."""
    token_ids = [20 + place * 7 % 200 for place in range(count)]
    embedding, *layers = compare_layers(simulated, on_torch(200), token_ids)
    assert embedding.largest == 0
    assert all(0.01 < verdict.largest / verdict.bound < 1 for verdict in layers)


@pytest.mark.parametrize("fault", ["scale", "window", "sign"])
def test_a_wrong_layer_of_a_simulated_card_is_named(
    simulated: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The fourth layer is wrong in one kernel only, of single tokens or (the sign) of a prompt."""
    from simulated_kernels import on_host

    from llmcli.runners.cuda.step import attention
    from llmcli.runners.cuda.step import products as row_products

    layer = simulated._device._forward._layers[3]

    def gemv(device: Any, **arguments: Any) -> None:
        if arguments["matrix"] is layer.weights.o.matrix:
            on_host(arguments["x"])[:] *= np.float32(1.3)
        right(device, **arguments)

    def attention_decode(device: Any, lanes: Any, **memory: Any) -> None:
        right(device, replace(lanes, window=1) if lanes.cache is layer.cache else lanes, **memory)

    def attention_prefill(device: Any, inputs: Any, out: Any) -> None:
        right(device, inputs, out)
        if inputs.cache is layer.cache:
            on_host(out)[-1] *= -1

    wrong = {"scale": gemv, "window": attention_decode, "sign": attention_prefill}[fault]
    caller = row_products if wrong is gemv else attention
    right = getattr(caller, wrong.__name__)
    monkeypatch.setattr(caller, wrong.__name__, wrong)
    token_ids = [20 + place * 7 % 200 for place in range(31)]  # tokens that attend to each other
    verdicts = compare_layers(simulated, on_torch(64), token_ids)
    assert [verdict.is_right for verdict in verdicts[:4]] == [True] * 4
    first = next(verdict for verdict in verdicts if not verdict.is_right)
    assert first.module == "layers.3"
    assert (first.position < 15) == (wrong is attention_prefill)


@pytest.mark.cuda
@pytest.mark.parametrize("count", [2, 32, 300])
def test_the_storyteller_on_the_card(count: int) -> None:
    from llmcli.kernels.device import Device
    from llmcli.runners.cuda.load.model import load as load_on_card
    from llmcli.runners.torch.load import load as load_on_torch

    model = open_model(resource_folder(STORYTELLER))
    token_ids = [20 + place * 7 % 200 for place in range(count)]
    on_card = load_on_card(model, device=Device.open(0), max_seq_len=count)
    reference = load_on_torch(model, max_seq_len=count, dtype="float32")
    layers = compare_layers(on_card, reference, token_ids)
    print(", ".join(f"{layer.module} {layer.largest / layer.bound:.3f}" for layer in layers))
    assert all(layer.is_right for layer in layers)
    assert layers[0].largest == 0, "codes and 16-bit numbers are widened exactly"
    assert all(layer.largest > 0 for layer in layers[1:]), "the two are not the same program"
    verdict = compare_logits(on_card, reference, token_ids)
    print(f"{count} tokens: {verdict.part_of_bound:.3f} of the bound")
    assert verdict.is_right
    assert verdict.largest > 0, "the two are not the same program"
