"""`diff --html`: the verdict's figures match the tokens, the marks are where B differs, and nothing foreign runs."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from html_tree import Element, data_of, parse
from inspected_runs import END, PieceTokenizer
from results import Llmcli
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama

from llmcli.checkpoint.model import open_model
from llmcli.cli.output.page_diff import DiffFacts, render_diff_page, verdict_sentence
from llmcli.cli.units import divergence
from llmcli.engine.scheduler import scores
from llmcli.measure.evaluate import Alternative, DiffToken, diff, verdict
from llmcli.runners.torch.load import load
from llmcli.tokenizer.load import load_tokenizer

HOSTILE = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\"'><b>", "&lt;", "\x00\x1b]0;x\x07"]
FLOWER = "🌼".encode()
TOKENIZER = PieceTokenizer(["Once", " upon", FLOWER[:2], FLOWER[2:], *HOSTILE])


def token(token_id: int, first: float, second: float, choice: int | None = None, kl: float = 0.01) -> DiffToken:
    chosen = token_id if choice is None else choice
    return DiffToken(token_id, first, second, chosen, kl, (Alternative(chosen, 0.125, 0.5),))


def render(tokens: list[DiffToken], prompt: str = "Once", ids: tuple[int, ...] = (0,), names: str = "ab") -> Element:
    facts = DiffFacts(names[0], names[1:], "CPU", prompt, ids, TOKENIZER)
    return parse(render_diff_page(facts, tokens, verdict(tokens)))


def test_marks_stand_where_b_differs() -> None:
    tokens = [token(1, 0.9, 0.8), token(0, 0.6, 0.3, 1), token(1, 0.5, 0.004, 0), token(TOKENIZER.end_id, 0.5, 0.5)]
    root = render(tokens)
    assert [element.classes for element in root.all("t")] == [
        ["t"], ["t", "differs", "l1"], ["t", "differs", "l4"], ["t", "unseen"],
    ]  # fmt: skip
    assert root.all("t")[1].attributes["title"] == "A 60.0%, B 30.0%; B would choose ·upon"
    assert root.all("story")[0].text == f"Once uponOnce upon{END}"
    assert data_of(root)["samples"][0]["tokens"][1] == {
        "id": 0, "first": 0.6, "p": 0.3, "choice": 1, "kl": 0.01, "alternatives": [[1, 0.125, 0.5]],
    }  # fmt: skip


def test_a_character_of_several_tokens_is_marked_if_any_of_them_differs() -> None:
    root = render([token(2, 0.9, 0.4, 0), token(3, 0.9, 0.9)])
    assert [(element.text, element.classes) for element in root.all("t")] == [("🌼", ["t", "differs", "l1"])]


def test_the_verdict_counts_what_is_there() -> None:
    tokens = [token(1, 0.9, 0.8, kl=0.001)] * 76 + [
        token(1, 0.5, 0.25, 0, kl=0.0125),
        token(1, 0.5, 0.125, 0, kl=0.03),
    ] * 2
    sentence = verdict_sentence(verdict(tokens))
    assert sentence == (
        "They agree on 95.0% of 80 tokens; where they differ, B gives A’s choice 18.8% on average; mean KL 0.002: "
        "nearly the same model."
    )
    assert render(tokens).all("h1")[0].text == sentence


@pytest.mark.parametrize(
    ("kl", "words"),
    [
        (0.0, "practically the same model"),
        (0.0019, "practically the same model"),
        (0.0021, "nearly the same model"),
        (0.019, "nearly the same model"),
        (0.021, "a close relative"),
        (0.11, "a clearly different model"),
        (0.51, "another model"),
        (30.0, "another model"),
        (math.inf, "another model"),
    ],
)
def test_the_words_follow_the_documented_limits(kl: float, words: str) -> None:
    assert verdict([token(0, 0.5, 0.5, kl=kl)] * 60).kinship == words
    docs = (Path(__file__).parents[2] / "docs/guide/quantization.md").read_text()
    assert f"| {words} |" in docs


def test_an_infinite_divergence_is_still_json() -> None:
    """A browser's parser must read it."""
    script = render([token(0, 0.5, 0.0, 1, kl=math.inf)]).all("script")[0].text
    assert "Infinity" not in script


def test_few_tokens_are_a_hint() -> None:
    assert verdict_sentence(verdict([token(0, 0.5, 0.5, kl=0.0)])) == (
        "They agree on the one token; mean KL 0: practically the same model (a hint only, from so few tokens)."
    )
    assert "hint" not in verdict_sentence(verdict([token(0, 0.5, 0.5)] * 50))


def test_hostile_text_is_inert_and_complete() -> None:
    first = TOKENIZER.end_id - len(HOSTILE)
    tokens = [token(number, 0.5, 0.25, first) for number in range(first, TOKENIZER.end_id)]
    root = render(tokens, "".join(HOSTILE), (0,), names="<i>&<b>\"'")
    shown = "".join(HOSTILE).replace("\x00\x1b", "␀␛").replace("\x07", "␇")
    assert [story.text for story in root.all("story")] == [shown, shown]
    assert [element.name for element in root if element.name in ("img", "script", "b", "i")] == ["script", "script"]
    assert not any(name.startswith("on") for element in root for name in element.attributes)
    assert root.all("models")[0].text == "A: <B: i>&<b>\"'"


def test_alternatives_are_the_likeliest_of_both_models(tiny_llama: Path, tmp_path: Path) -> None:
    """Against a plain sort of both models' probabilities."""
    other = write_tiny_llama(tmp_path / "other", seed=1)
    runners = [load(open_model(folder), max_seq_len=64) for folder in (tiny_llama, other)]
    prompt = [256, 70, 71]
    tokens = list(diff(*runners, load_tokenizer(tiny_llama), prompt, 6, frozenset()))
    said = [token.token_id for token in tokens]
    for place, found in enumerate(tokens):
        tables = []
        for runner in runners:
            logits = np.concatenate(list(scores(runner, [*prompt, *said], len(prompt))))[place].astype(np.float64)
            tables.append(np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum())
        expected = set().union(*(sorted(range(288), key=lambda index: -table[index])[:5] for table in tables))
        assert {one.token_id for one in found.alternatives} == expected
        assert [one.token_id for one in found.alternatives][0] in (found.token_id, found.second_choice)
        for one in found.alternatives:
            assert one.first_probability == pytest.approx(tables[0][one.token_id], rel=1e-6)
            assert one.second_probability == pytest.approx(tables[1][one.token_id], rel=1e-6)


def test_a_second_model_whose_logits_are_not_numbers_gets_no_verdict(
    llmcli: Llmcli, tiny_llama: Path, tmp_path: Path
) -> None:
    """A divergence summed over NaN would be 0: the best there is."""
    broken = write_tiny_llama(tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] *= 1e38
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"] * 1e6}, broken / "model.safetensors")
    result = llmcli("diff", tiny_llama, broken, "abc")
    assert (result.exit_code, result.stdout) == (3, "")
    # A processor that adds in another order subtracts infinity from infinity.
    assert re.search("error: the model produced (infinite|NaN) logits", result.stderr)


def test_the_command_writes_the_page_of_its_json(llmcli: Llmcli, tiny_llama: Path, tmp_path: Path) -> None:
    coarse = write_tiny_llama(tmp_path / "coarse", dtype=torch.bfloat16)
    path = tmp_path / "diff.html"
    arguments = ("diff", tiny_llama, coarse, "The quick", "--max-new-tokens", 60, "--html", path)
    result = llmcli(*arguments, "--json")
    answer = json.loads(result.stdout)
    assert f"page: {path}\n" in result.stderr
    root = parse(path.read_text(encoding="utf-8"))
    tokens = data_of(root)["samples"][0]["tokens"]
    assert [entry["id"] for entry in tokens] == [entry["token_id"] for entry in answer["tokens"]]
    assert [entry["p"] for entry in tokens] == pytest.approx(
        [entry["second_probability"] for entry in answer["tokens"]], rel=1e-3
    )
    assert f"mean KL {divergence(answer['mean_kl'], digits=2)}: {answer['kinship']}" in root.all("h1")[0].text
    assert sum("differs" in element.classes for element in root.all("t")) <= answer["num_divergences"]
    llmcli(*arguments).expect_error(2, "diff.html exists; replace it with --force")
    assert llmcli(*arguments, "--force").stdout.endswith(f": {answer['kinship']}\n")


def test_a_page_that_cannot_be_written_is_refused_before_the_models_are_looked_at(
    llmcli: Llmcli, tmp_path: Path
) -> None:
    path = tmp_path / "notes.html"
    path.write_text("mine")
    llmcli("diff", "none", "none", "a", "--html", path).expect_error(2, "notes.html exists and is not a page of llmcli")
    llmcli("diff", "none", "none", "a", "--force").expect_error(2, "--force needs --html FILE")
    assert path.read_text() == "mine"
