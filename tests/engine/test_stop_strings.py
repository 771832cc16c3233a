"""Stop strings against a search in the whole text, for any pieces, and against transformers' StopStringCriteria."""

import json
import random
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import EOS_ID, write_byte_tokenizer
from transformers.generation.stopping_criteria import StopStringCriteria

from llmcli.engine.request import Request
from llmcli.engine.texts import Sample, StopStrings
from llmcli.sampling.params import Sampler, SamplingParams
from llmcli.tokenizer.base import Tokenizer
from llmcli.tokenizer.load import load_tokenizer

letters = st.text(alphabet="ab\n", max_size=12)
stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3)
# A text, and the string of a special token that follows it, or none.
pushes = st.lists(
    st.tuples(st.text(alphabet="ab<", max_size=3), st.sampled_from(["", "", "<a>", "b", "<<"])), max_size=8
)
special_stops = st.lists(st.text(alphabet="ab<>", min_size=1, max_size=5), max_size=3)
SPECIAL = ["<|turn|>", "<|call|>", "<turn>", "|>"]
WORDS = ["a", "b", "ab", "\n", "<", "|", ">", "|>", "turn", "<|", " a", "λ", *SPECIAL]


@given(pieces=pushes, stop_strings=st.one_of(stops, special_stops))
def test_shown_text_is_all_before_the_first_match(pieces: list[tuple[str, str]], stop_strings: list[str]) -> None:
    matcher = StopStrings(stop_strings)
    text, is_stopped, matched, shown_part = "", False, "", ""
    for piece, special in pieces:
        matched += piece + special
        shown_part += "1" * len(piece) + "0" * len(special)
        shown, is_stopped = matcher.push(piece, special)
        text += shown
        if is_stopped:
            break
    else:
        text += matcher.flush()
    starts = [matched.find(stop) for stop in stop_strings if stop in matched]
    assert is_stopped == bool(starts)
    # The first match to be complete counts; one that begins earlier may complete later.
    end = min(starts) if starts else len(matched)
    assert text == "".join(
        letter for letter, is_shown in zip(matched[:end], shown_part, strict=False) if is_shown == "1"
    )


@given(text=letters, stop_strings=stops)
def test_no_more_is_held_back_than_could_become_a_stop_string(text: str, stop_strings: list[str]) -> None:
    matcher = StopStrings(stop_strings)
    shown, is_stopped = matcher.push(text)
    if not is_stopped:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stop_strings)


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopStrings([]).push("abc", "<special>") == ("abc", False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokens of WORDS and every byte; some of the words are special tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_tokens([word for word in WORDS if word not in SPECIAL and library.token_to_id(word) is None])
    library.add_special_tokens(SPECIAL)
    library.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": library.id_to_token(EOS_ID)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def sample_of(tokenizer: Tokenizer, stop_strings: tuple[str, ...], eos_token_ids: frozenset[int]) -> Sample:
    sampler = Sampler(SamplingParams(temperature=0.0), seed=1, eos_token_ids=eos_token_ids)
    request = Request((0,), sampler, (0,), None, stop_strings)
    return Sample(0, request, 0, tokenizer, 1000)


def play(sample: Sample, token_ids: list[int]) -> str:
    """The text that a stream shows for these tokens."""
    shown = ""
    for token_id in token_ids:
        shown += sample.push(token_id, None)
        if sample.finish_reason:
            break
    finished = sample.finish(sample.finish_reason or "length")
    assert finished.text == shown + finished.tail
    return finished.text


def test_a_text_stops_where_transformers_stops_it(
    tokenizer: Tokenizer, folder: Path, request: pytest.FixtureRequest
) -> None:
    """Stop texts of special tokens, parts of them and other text; `--odd-tokenizers N` tries N texts."""
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    rng = random.Random(1)
    num_special = 0
    for _ in range(request.config.getoption("odd_tokenizers") or 40):
        words = [rng.choice(WORDS) for _ in range(12)]
        token_ids = [token_id for word in words if (token_id := tokenizer.token_id(word)) is not None]
        pieces = [tokenizer.special_text(i) or tokenizer.token_bytes(i).decode(errors="replace") for i in token_ids]
        whole = "".join(pieces)
        begin = rng.randrange(len(whole))
        stop = rng.choice([rng.choice(SPECIAL), whole[begin : begin + rng.randrange(1, 12)], "\n<|call|>", "<|turn|>a"])
        if "\ufffd" in stop:
            continue
        criteria = StopStringCriteria(reference, [stop])
        expected = next(
            (n for n in range(1, len(token_ids) + 1) if criteria(torch.tensor([token_ids[:n]]), None)[0]), None
        )
        sample = sample_of(tokenizer, (stop,), frozenset())
        text = play(sample, token_ids)
        assert (len(sample.token_ids) if sample.finish_reason == "stop" else None) == expected, (stop, whole, token_ids)
        if expected is not None:
            num_special += any(special in stop for special in SPECIAL)
            visible = "".join(
                "" if tokenizer.special_text(i) else piece for i, piece in zip(token_ids, pieces, strict=True)
            )
            assert visible.startswith(text)
            if stop in SPECIAL:
                before = whole[: whole.index(stop)]
                assert len(text) <= len(before)
    assert num_special > 5


@pytest.mark.parametrize(
    ("tokens", "stop_strings", "text", "reason", "num_tokens"),
    [
        (["a", "<|turn|>", "b"], ("<|turn|>",), "a", "stop", 2),
        (["<|turn|>", "b"], ("<|turn|>",), "", "stop", 1),
        (["a", "\n", "<|turn|>", "b"], ("\n<|turn|>",), "a", "stop", 3),
        (["a", "\n", "<|call|>", "<|turn|>", "b"], ("<|call|><|turn|>",), "a\n", "stop", 4),
        (["a", "<|call|>", "b", "<|turn|>"], ("<|call|>\n",), "ab", "length", 4),
        (["a", "<|call|>", "ab", "b"], ("|>a",), "a", "stop", 3),
        (["a", "\n", "EOS"], ("\nUser:",), "a\n", "eos", 3),
        (["a", "\n", "EOS"], ("\nEOS",), "a", "stop", 3),
        (["a", "EOS"], ("EOS",), "a", "eos", 2),
    ],
)
def test_special_tokens_stop_a_text_and_are_not_shown(
    tokens: list[str], stop_strings: tuple[str, ...], text: str, reason: str, num_tokens: int, tokenizer: Tokenizer
) -> None:
    eos = tokenizer.piece(EOS_ID)
    sample = sample_of(tokenizer, tuple(stop.replace("EOS", eos) for stop in stop_strings), frozenset({EOS_ID}))
    token_ids = [tokenizer.token_id(token.replace("EOS", eos)) for token in tokens]
    assert play(sample, [token_id for token_id in token_ids if token_id is not None]) == text
    assert (sample.finish_reason, len(sample.token_ids)) == (reason, num_tokens)
