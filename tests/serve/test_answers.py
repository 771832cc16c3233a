"""The pieces of a stream: each is OpenAI's object, whatever its text is made of."""

import json
from dataclasses import replace
from typing import Any

import pytest
from paged import make_request

from llmcli.engine.events import Finished, Timings, Token
from llmcli.sampling.inspect import Inspection, TokenLogprob
from llmcli.serve.answers import Answer, ChatAnswer, CompletionAnswer
from llmcli.tokenizer.base import Tokenizer

TEXTS = ["Once", ' "a" \\', "\0", "\0\u2028é", "\ud7ff\U0001f600", "\n"]
MODEL = "\0"  # the beginning of a piece is not taken for its text


def pieces_of(answer: Answer, text: str) -> list[Any]:
    answer.take(0, Token(1, 97, text))
    return [json.loads(piece) for piece in answer.pieces()]


@pytest.mark.parametrize("includes_usage", [False, True])
@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
def test_all_pieces_have_the_form_of_openai(kind: type[Answer], includes_usage: bool, tokenizer: Tokenizer) -> None:
    answer = kind(MODEL, [make_request([97], 7, num_samples=2)], tokenizer, includes_usage=includes_usage)
    texts = [*TEXTS, *TEXTS]
    pieces = [piece for text in texts for piece in pieces_of(answer, text)]
    answer.take(0, Finished(1, "!", "", (97,), "length", Timings(1, 0.0, 0.0, 0, 0.0)))
    pieces += [json.loads(piece) for piece in answer.pieces()]
    assert answer.pieces() == []
    usage = {"usage": None} if includes_usage else {}
    for index, (piece, text) in enumerate(zip(pieces, [*texts, "!"], strict=True)):
        assert piece.pop("id") == answer.whole()["id"]
        assert piece.pop("created") == answer.whole()["created"]
        role = {"role": "assistant"} if index == 0 else {}
        content: Any = {"delta": {**role, "content": text}} if kind is ChatAnswer else {"text": text}
        reason = "length" if text == "!" else None
        assert piece == {
            "object": "chat.completion.chunk" if kind is ChatAnswer else "text_completion",
            "model": MODEL,
            "seed": 7,
            "choices": [{"index": 1, **content, "logprobs": None, "finish_reason": reason}],
            **usage,
        }


class ThreeAs:
    """Tokens, several with the same text."""

    def token_bytes(self, token_id: int) -> bytes:
        return {1: b"", 9: b"b"}.get(token_id, b"a")

    def piece(self, token_id: int) -> str:
        return "<s>"


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (97, {"a": -0.5, "token_id:98": -1.0, "<s>": -2.0, "token_id:99": -3.0}),
        (98, {"token_id:97": -0.5, "a": -1.0, "<s>": -2.0, "token_id:99": -3.0}),
        (9, {"a": -0.5, "token_id:98": -1.0, "<s>": -2.0, "token_id:99": -3.0, "b": -9.0}),
    ],
)
def test_tokens_of_one_text_do_not_hide_each_other(chosen: int, expected: dict[str, float]) -> None:
    """The chosen one has its text, and its own probability."""
    logprobs = {97: -0.5, 98: -1.0, 1: -2.0, 99: -3.0, 9: -9.0}
    likeliest = tuple(TokenLogprob(token_id, logprobs[token_id]) for token_id in (97, 98, 1, 99))
    view = Inspection(TokenLogprob(chosen, logprobs[chosen]), likeliest, (), ())
    request = replace(make_request([97], 7), num_alternatives=4)
    answer = CompletionAnswer(MODEL, [request], ThreeAs())  # type: ignore[arg-type]
    answer.take(0, Token(0, chosen, "a", view))
    (choice,) = answer.whole()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [expected]
