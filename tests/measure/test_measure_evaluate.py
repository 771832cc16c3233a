"""Perplexity, divergence and lockstep against sums by hand over transformers' logits."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import BOS_ID, write_tiny_llama

transformers = pytest.importorskip("transformers")

from llmcli.checkpoint.model import open_model  # noqa: E402
from llmcli.errors import UsageError  # noqa: E402
from llmcli.measure.evaluate import DiffToken, compare, diff, evaluate, verdict, windows  # noqa: E402
from llmcli.measure.intervals import mean_interval, share_interval  # noqa: E402
from llmcli.runners.base import Runner  # noqa: E402
from llmcli.runners.torch.load import load  # noqa: E402
from llmcli.tokenizer.load import load_tokenizer  # noqa: E402

TEXT = [BOS_ID, *np.random.default_rng(1).integers(0, 256, 149).tolist()]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and the same model in coarser numbers."""
    folder = tmp_path_factory.mktemp("models")
    return write_tiny_llama(folder / "a"), write_tiny_llama(folder / "b", dtype=torch.bfloat16)


def runner(folder: Path, context: int) -> Runner:
    return load(open_model(folder), max_seq_len=context)


def differences(
    first: Path, second: Path, prompt: list[int], count: int, eos_token_ids: frozenset[int] = frozenset()
) -> Iterator[DiffToken]:
    return diff(runner(first, 128), runner(second, 128), load_tokenizer(first), prompt, count, eos_token_ids)


def reference_logprobs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)


def test_perplexity_of_one_window(models: tuple[Path, Path]) -> None:
    logprobs = reference_logprobs(models[0], TEXT)
    expected = -sum(float(logprobs[i - 1, TEXT[i]]) for i in range(1, len(TEXT))) / (len(TEXT) - 1)
    result = evaluate(runner(models[0], 200), TEXT, stride=100, bos_token_ids=[BOS_ID])
    assert result.num_tokens == len(TEXT) - 1
    assert result.nll == pytest.approx(expected, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-5)


def test_perplexity_of_strided_windows(models: tuple[Path, Path]) -> None:
    """Context 40, stride 16, BOS before each: by hand with transformers."""
    body, total, scored = TEXT[1:], 0.0, 0
    for end in (39, 55, 71, 87, 103, 119, 135, 149):
        begin = end - 39
        logprobs = reference_logprobs(models[0], [BOS_ID, *body[begin:end]])
        for index in range(scored, end):
            total -= float(logprobs[index - begin, body[index]])
        scored = end
    result = evaluate(runner(models[0], 40), TEXT, stride=16, bos_token_ids=[BOS_ID])
    assert result.num_tokens == 149
    assert result.nll == pytest.approx(total / 149, rel=1e-6)


@given(length=st.integers(2, 300), window=st.integers(8, 64), stride=st.integers(1, 64), has_bos=st.booleans())
def test_every_token_but_the_first_is_scored_once(length: int, window: int, stride: int, has_bos: bool) -> None:
    bos = [-1] if has_bos else []
    text = [*bos, *range(length)]
    stride = min(stride, window - 1 - len(bos))
    scored = []
    for cut in windows(text, window, stride, bos):
        assert len(cut.token_ids) <= window
        assert 0 < cut.first < len(cut.token_ids)
        assert list(cut.token_ids[: len(bos)]) == bos
        scored.extend(cut.token_ids[cut.first :])
    assert scored == list(range(length))[0 if has_bos else 1 :]


def test_a_later_token_has_the_promised_context() -> None:
    for cut in list(windows(range(200), 50, 20, []))[1:-1]:
        assert cut.first == 30


def test_comparison_by_hand(models: tuple[Path, Path]) -> None:
    p, q = (reference_logprobs(folder, TEXT)[:-1] for folder in models)
    result = compare(runner(models[0], 200), runner(models[1], 200), TEXT, stride=100, bos_token_ids=[BOS_ID])
    assert result.mean_kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert result.top1_agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    targets = torch.tensor(TEXT[1:])
    for evaluation, logprobs in ((result.first, p), (result.second, q)):
        losses = -logprobs[range(149), targets].numpy()
        assert evaluation.nll == pytest.approx(float(losses.mean()), rel=1e-6)
        assert evaluation.nll_interval == pytest.approx(mean_interval(losses), rel=1e-5)
        assert evaluation.perplexity_interval == pytest.approx(np.exp(mean_interval(losses)), rel=1e-4)
    changes = (p - q)[range(149), targets].numpy()
    assert result.nll_change_interval == pytest.approx(mean_interval(changes), rel=1e-2)
    assert result.perplexity_change == pytest.approx(math.expm1(changes.mean()), rel=1e-2)
    agreements = (p.argmax(-1) == q.argmax(-1)).numpy()
    assert result.top1_agreement_interval == pytest.approx(share_interval(agreements))
    divergences = (p.exp() * (p - q)).sum(-1).numpy()
    assert result.mean_kl_interval == pytest.approx(mean_interval(divergences), rel=1e-2)


@pytest.mark.parametrize("widening", [0, 1])
def test_models_whose_prompts_are_cut_otherwise(
    models: tuple[Path, Path], widening: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a bfloat16 model and its quantized export, on processors that multiply bfloat16."""
    alike = [runner(folder, 200) for folder in models]
    usual = compare(*alike, TEXT, stride=100, bos_token_ids=[BOS_ID])
    monkeypatch.setattr("llmcli.runners.torch.load.widens_prompts", lambda model, dtype: True)
    cut_otherwise = [runner(folder, 200) if widening == index else alike[index] for index, folder in enumerate(models)]
    result = compare(*cut_otherwise, TEXT, stride=100, bos_token_ids=[BOS_ID])
    assert (result.first.nll, result.second.nll) == pytest.approx((usual.first.nll, usual.second.nll), rel=1e-6)
    assert result.mean_kl == pytest.approx(usual.mean_kl, rel=1e-3)
    assert result.top1_agreement == usual.top1_agreement
    tokenizer = load_tokenizer(models[0])
    pair, both = (list(diff(*two, tokenizer, TEXT[:20], 100, frozenset())) for two in (cut_otherwise, alike))
    assert [token.token_id for token in pair] == [token.token_id for token in both]
    assert [token.kl for token in pair] == pytest.approx([token.kl for token in both], rel=1e-2, abs=1e-9)


def test_a_model_agrees_with_itself(models: tuple[Path, Path]) -> None:
    result = compare(runner(models[0], 64), runner(models[0], 64), TEXT, stride=32, bos_token_ids=[BOS_ID])
    assert (result.mean_kl, result.top1_agreement) == (0, 1)
    assert result.first == result.second


def test_a_text_too_short_to_predict(models: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="fewer than 2 tokens"):
        evaluate(runner(models[0], 64), [BOS_ID], stride=32, bos_token_ids=[BOS_ID])


def test_lockstep_reads_the_first_models_text(models: tuple[Path, Path], tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other", seed=1)
    prompt = TEXT[:20]
    tokens = list(differences(models[0], other, prompt, 30))
    text = prompt + [token.token_id for token in tokens]
    p, q = (reference_logprobs(folder, text) for folder in (models[0], other))
    for index, token in enumerate(tokens):
        row = len(prompt) - 1 + index
        assert token.token_id == int(p[row].argmax())
        assert token.second_choice == int(q[row].argmax())
        assert token.first_probability == pytest.approx(float(p[row].exp().max()), rel=1e-4)
        assert token.second_probability == pytest.approx(float(q[row, token.token_id].exp()), rel=1e-4)
        assert token.kl == pytest.approx(float((p[row].exp() * (p[row] - q[row])).sum()), rel=1e-4)
    numbers = verdict(tokens)
    assert numbers.num_tokens == 30
    assert numbers.num_divergences > 0
    assert all(token.agrees for token in tokens[: numbers.num_agreeing])
    assert not tokens[numbers.num_agreeing].agrees


def test_lockstep_ends_with_the_text(models: tuple[Path, Path]) -> None:
    endless = list(differences(models[0], models[0], TEXT[:20], 10))
    eos = frozenset({endless[3].token_id})
    tokens = list(differences(models[0], models[0], TEXT[:20], 10, eos))
    first = [token.token_id for token in endless].index(endless[3].token_id)
    assert [token.token_id for token in tokens] == [token.token_id for token in endless[: first + 1]]
    for token, of_endless in zip(tokens, endless, strict=False):  # scored as parts of texts of other lengths
        assert token.first_probability == pytest.approx(of_endless.first_probability, rel=1e-5)
    numbers = verdict(tokens)
    assert (numbers.num_agreeing, numbers.num_divergences, numbers.mean_kl, numbers.mean_change) == (first + 1, 0, 0, 0)
