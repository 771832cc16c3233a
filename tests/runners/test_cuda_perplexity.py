"""Perplexity of texts that rows decode side by side, against a torch runner that reads them whole."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantized import SCHEMES, SIZES, export
from row_steps import GREEDY, PROMPT
from simulated_card import simulate
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.measure.evaluate import evaluate
from llmcli.quantization.schemes import ExportOptions
from llmcli.resources import built_in_model
from llmcli.runners.base import Logits, Runner, Span
from llmcli.runners.cuda.load.model import load as load_simulated
from llmcli.runners.torch.load import load
from llmcli.sampling.candidates import pack_mask
from llmcli.sampling.params import Sampler, SamplingParams

LENGTH = 48  # tokens of a text
NEARNESS = 5e-4


def perplexity_of_rows(runner: Runner, texts: Sequence[Sequence[int]], num_rows: int) -> float:
    """Perplexity of texts of one length, in batches; every row is made to choose its text's next token."""
    vocabulary, surprises = np.arange(runner.config.vocab_size), []
    for first in range(0, len(texts), num_rows):
        group = texts[first : first + num_rows]
        rows = [runner.open(text[:1], GREEDY) for text in group]
        for place in range(1, len(group[0])):
            wanted = [text[place] for text in group]
            spans = [
                Span(
                    row,
                    () if place > 1 else (text[0],),
                    masks=lambda token_id=token_id: pack_mask(vocabulary == token_id)[None],  # type: ignore[misc]
                )
                for row, text, token_id in zip(rows, group, wanted, strict=True)
            ]
            step = runner.queue(spans)
            assert [chosen[0].token_id for chosen in step.choices()] == wanted  # type: ignore[index]
            surprises += [surprise(step.logits(span)[0], token_id) for span, token_id in enumerate(wanted)]
        for row in rows:
            runner.close(row)
    return math.exp(sum(surprises) / len(surprises))


def surprise(logits: Logits, token_id: int) -> float:
    """The negative logarithm of a token's probability."""
    scores = logits.astype(np.float64)
    return float(np.logaddexp.reduce(scores) - scores[token_id])


def perplexity_of_torch(folder: Path, texts: Sequence[Sequence[int]]) -> float:
    """The weights as floats of 32 bits."""
    reference = load(open_model(folder), max_seq_len=LENGTH, dtype="float32")
    scored = [evaluate(reference, text, stride=LENGTH, bos_token_ids=()) for text in texts]
    return math.exp(sum(one.nll for one in scored) / len(scored))


def told(runner: Runner, num_texts: int) -> list[list[int]]:
    """The model's own texts, with separate draws for each."""
    texts = [PROMPT[:1] for _ in range(num_texts)]
    rows = [
        runner.open(text, Sampler(SamplingParams(temperature=1.0, top_p=1.0), seed=seed))
        for seed, text in enumerate(texts)
    ]
    spans = [Span(row, tuple(text)) for row, text in zip(rows, texts, strict=True)]
    for _ in range(LENGTH - 1):
        chosen = runner.queue(spans).choices()
        texts = [[*text, one[0].token_id] for text, one in zip(texts, chosen, strict=True)]  # type: ignore[index]
        spans = [Span(row) for row in rows]
    for row in rows:
        runner.close(row)
    return texts


def test_rows_on_a_simulated_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = simulate(monkeypatch)
    source = write_tiny_llama(tmp_path / "source", with_tokenizer=False, **SIZES)
    folder = export(source, tmp_path / "model", ExportOptions(SCHEMES["int8 groups of 128"]))
    options = {"max_seq_len": LENGTH, "num_rows": 72, "uses_graphs": False}
    runner = load_simulated(open_model(folder), device=device, **options)  # type: ignore[arg-type]
    texts = [PROMPT[begin : begin + 4] for begin in range(72)]
    expected = perplexity_of_torch(folder, texts)
    for num_rows in (1, 8, 72):
        assert perplexity_of_rows(runner, texts, num_rows) == pytest.approx(expected, rel=NEARNESS)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["storyteller", "stories260K"])
def test_rows_on_a_card(name: str, request: pytest.FixtureRequest, load_on_card: Callable[..., Any]) -> None:
    folder = built_in_model(name) if name == "storyteller" else request.getfixturevalue("stories")
    assert folder is not None
    runner = load_on_card(folder, max_seq_len=LENGTH, num_rows=256)
    texts = told(runner, 256)
    expected = perplexity_of_torch(folder, texts)
    for num_rows in (1, 8, 64, 256):
        found = perplexity_of_rows(runner, texts, num_rows)
        print(f"{name}, {num_rows} rows: perplexity {found:.4f}, {found / expected - 1:+.5%} of torch's")
        assert found == pytest.approx(expected, rel=NEARNESS)
