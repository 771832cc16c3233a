"""The pieces of a stream: each is OpenAI's object, whatever its text is made of."""

import json
from typing import Any

import pytest
from paged import make_request

from llmcli.engine.events import Finished, Timings, Token
from llmcli.serve.answers import Answer, ChatAnswer, CompletionAnswer
from llmcli.tokenizer.base import Tokenizer

TEXTS = ["Once", ' "a" \\', "\0", "\0\u2028é", "\ud7ff\U0001f600", "\n"]
MODEL = "\0"  # what a piece's beginning holds is not taken for its text


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
