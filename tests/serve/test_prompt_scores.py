"""`echo` with `logprobs`: the requests of lm-evaluation-harness' `local-completions`, against transformers."""

import http.client
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
from server import ServerProcess, running_server

from llmcli.resources import resource_folder

MODEL = "storyteller-bf16"
TEXTS = [
    "Once upon a time there was a little dog. It lived near the river, and every day",
    "An owl",
    "The snail was happy and went home. " * 12,
]
CONTEXT = 1024


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server(MODEL, "--dtype", "float32", "--temperature", 1) as server:
        yield server


@pytest.fixture(scope="module")
def prompts(client: Any) -> list[list[int]]:
    return [client.post("/../tokenize", body={"prompt": text}, cast_to=object)["tokens"] for text in TEXTS]


@pytest.fixture(scope="module")
def model() -> Any:
    folder = resource_folder(MODEL)
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def expected_logprobs(model: Any, token_ids: Sequence[int]) -> np.ndarray:
    """transformers' log-probabilities of each token but the first. Shapes: result [len(token_ids) - 1, vocab_size]"""
    with torch.no_grad():
        logits = model(torch.tensor([list(token_ids)])).logits[0, :-1]
    return torch.log_softmax(logits.double(), -1).numpy()


def check_scores(model: Any, choice: Any, token_ids: Sequence[int], num_new: int) -> None:
    """The probabilities of a prompt are those of transformers, and lm-evaluation-harness finds them in their places."""
    told = choice.logprobs
    lengths = {len(told.tokens), len(told.token_logprobs), len(told.top_logprobs), len(told.text_offset)}
    assert lengths == {len(token_ids) + num_new}
    assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
    expected = expected_logprobs(model, token_ids)
    own = expected[np.arange(len(expected)), list(token_ids[1:])]
    count = len(token_ids)
    np.testing.assert_allclose(told.token_logprobs[1:count], own, atol=1e-3)
    highest = [max(top.values()) for top in told.top_logprobs[1:count]]
    np.testing.assert_allclose(highest, expected.max(1), atol=1e-3)
    is_greedy = [logprob == most for logprob, most in zip(told.token_logprobs[1:count], highest, strict=True)]
    assert is_greedy == list(expected.argmax(1) == token_ids[1:])
    for token, logprob, top in list(zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True))[1:]:
        assert top[token] == logprob
        assert 1 <= len(top) <= 2
    assert told.text_offset == sorted(told.text_offset)


def test_loglikelihoods_of_several_prompts(client: Any, model: Any, prompts: list[list[int]]) -> None:
    """The body is that of `LocalCompletionsAPI._create_payload`."""
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = client.completions.create(model=MODEL, prompt=prompts, **body)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice, token_ids, text in zip(answer.choices, prompts, TEXTS, strict=True):
        check_scores(model, choice, token_ids, num_new=1)
        assert choice.text.startswith(text)
        assert choice.finish_reason == "length"
        for token, offset in list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))[2:]:
            assert choice.text[offset:].startswith(token)
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == 3
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    of_texts = client.completions.create(model=MODEL, prompt=TEXTS, **body)
    assert of_texts.choices == answer.choices


def test_scores_alone(client: Any, model: Any, prompts: list[list[int]]) -> None:
    """Without a new token even a prompt that fills the context has scores; a single token has none."""
    full = (prompts[2] * 20)[:CONTEXT]
    for token_ids in (full, prompts[0], [1]):
        answer = client.completions.create(model=MODEL, prompt=token_ids, max_tokens=0, logprobs=1, echo=True)
        (choice,) = answer.choices
        check_scores(model, choice, token_ids, num_new=0)
        assert (choice.finish_reason, answer.usage.completion_tokens) == ("length", 0)
    with pytest.raises(openai.BadRequestError, match="shorten the prompt"):
        client.completions.create(model=MODEL, prompt=[*full, 5], max_tokens=0, logprobs=1, echo=True)


def test_an_end_counts_as_the_last_token(client: Any, model: Any, prompts: list[list[int]]) -> None:
    """lm-evaluation-harness leaves the last token out, whatever it is."""
    body: dict[str, Any] = {"max_tokens": 1, "logprobs": 1, "echo": True, "logit_bias": {"2": 100}}
    (choice,) = client.completions.create(model=MODEL, prompt=prompts[0], **body).choices
    assert choice.finish_reason == "stop"
    check_scores(model, choice, prompts[0], num_new=1)
    assert choice.logprobs.tokens[-1] == "</s>"


def test_an_echo_in_a_stream_is_the_whole(client: Any, prompts: list[list[int]]) -> None:
    body: dict[str, Any] = {"prompt": prompts[:2], "max_tokens": 8, "logprobs": 3, "echo": True, "n": 2, "seed": 4}
    whole = client.completions.create(model=MODEL, **body).choices
    pieces = [piece.choices[0] for piece in client.completions.create(model=MODEL, **body, stream=True)]
    for choice in whole:
        own = [piece for piece in pieces if piece.index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        for name, told in choice.logprobs.model_dump().items():
            parts = [getattr(piece.logprobs, name) for piece in own if piece.logprobs]
            assert list(itertools.chain(*parts)) == told
    plain = client.completions.create(model=MODEL, **{**body, "echo": False, "logprobs": None}).choices
    echoed = client.completions.create(model=MODEL, **{**body, "logprobs": None}).choices
    assert [choice.text for choice in echoed] == [choice.text for choice in whole]
    starts = [TEXTS[0], TEXTS[0], TEXTS[1], TEXTS[1]]
    assert [f"{start}{choice.text}" for start, choice in zip(starts, plain, strict=True)] == [
        choice.text for choice in echoed
    ]


def test_the_chosen_token_is_among_the_likeliest(client: Any) -> None:
    """OpenAI's reference: there may be up to logprobs + 1 of them."""
    num_unlikely = 0
    for count in (0, 1, 3, 20):
        (choice,) = client.completions.create(model=MODEL, prompt="Once", seed=3, max_tokens=40, logprobs=count).choices
        told = choice.logprobs
        for token, logprob, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
            assert top[token] == logprob
            assert count <= len(top) <= count + 1
            num_unlikely += len(top) > count
    assert num_unlikely > 40


def test_counts_come_with_every_piece(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Once", "seed": 3, "max_tokens": 12, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = client.completions.create(**asked, stream_options=options)
    counts = [piece.usage.completion_tokens for piece in pieces]
    assert counts == sorted(counts)
    assert (counts[-1], last.choices, last.usage.completion_tokens) == (12, [], 12)
    assert {piece.usage.prompt_tokens for piece in (*pieces, last)} == {last.usage.prompt_tokens}
    pieces = list(client.completions.create(**asked, stream_options={"continuous_usage_stats": True}))
    assert (pieces[-1].usage.total_tokens, len(pieces[-1].choices)) == (last.usage.total_tokens, 1)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Content-Type": ""}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        (
            {"Content-Type": "Application/JSON", "Origin": "http://evil.example"},
            200,
        ),  # which a browser asks about first
        ({"Origin": "http://evil.example"}, 415),
        ({"Origin": "null"}, 415),
        ({"Sec-Fetch-Site": "cross-site"}, 415),
        ({"Content-Type": "", "Origin": "http://evil.example"}, 415),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=a"}, 415),
    ],
)
def test_a_body_without_a_type_is_taken_from_programs_only(
    server: ServerProcess, headers: dict[str, str], status: int
) -> None:
    """A page of another site can send one without permission; its browser then names the site."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/tokenize", json.dumps({"prompt": "Once"}).encode(), headers)
    answer = connection.getresponse()
    assert answer.status == status, answer.read()
    connection.close()
