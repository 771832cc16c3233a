"""OpenAI's own client against the server: the texts of `generate`, streams equal to whole answers, refusals by name."""

import json
import math
import re
from collections import defaultdict
from typing import Any

import openai
import pytest
from here import run_here
from server import ServerProcess

from llmcli.serve.bodies import Body, ChatBody, CompletionBody, TokenizeBody, parse_body
from llmcli.serve.refusal import Refusal, to_json

MODEL = "storyteller"
MESSAGES: Any = [{"role": "user", "content": "Tell me of a snail."}]


def generate(*arguments: object) -> list[dict[str, Any]]:
    """The objects of `generate --json`."""
    result = run_here("generate", "--device", "cpu", "--json", *arguments)
    result.check_returncode()
    return [json.loads(line) for line in result.stdout.splitlines()]


def samples_of(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (one,) = objects
    return one.get("samples", [one])


def test_a_seed_tells_what_generate_tells(client: Any) -> None:
    told = generate(MESSAGES[0]["content"], "--chat", "--seed", 5, "-n", 3, "--max-new-tokens", 40)
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=5, n=3, max_completion_tokens=40)
    assert [choice.message.content for choice in answer.choices] == [one["text"] for one in samples_of(told)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert answer.usage.completion_tokens == sum(len(one["token_ids"]) for one in samples_of(told))


def test_sampling_parameters_reach_the_sampler(client: Any) -> None:
    """A prompt may be given by its ids."""
    flags = ("--temperature=1.3", "--top-k=20", "--min-p=0.02", "--presence-penalty=0.5", "--logit-bias=263=-4")
    (told,) = generate("The cloud", "--seed", 9, "--max-new-tokens", 30, "--ignore-eos", *flags)
    asked: dict[str, Any] = {"temperature": 1.3, "presence_penalty": 0.5, "logit_bias": {"263": -4}}
    asked["extra_body"] = {"top_k": 20, "min_p": 0.02, "ignore_eos": True}
    for prompt in ("The cloud", told["prompt_token_ids"]):
        answer = client.completions.create(model=MODEL, prompt=prompt, seed=9, max_tokens=30, **asked)
        assert answer.choices[0].text == told["text"]
        assert answer.usage.prompt_tokens == len(told["prompt_token_ids"])


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_the_pieces_of_a_stream_are_the_whole(client: Any, with_logprobs: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": 6, "n": 3, "max_tokens": 40, "stop": ["."]}
    if with_logprobs:
        asked |= {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    texts: dict[int, str] = defaultdict(str)
    logprobs: dict[int, list[Any]] = defaultdict(list)
    reasons: dict[int, str] = {}
    *pieces, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for piece in pieces:
        assert piece.usage is None
        (choice,) = piece.choices
        assert choice.index not in reasons
        texts[choice.index] += choice.delta.content or ""
        logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    if with_logprobs:
        assert logprobs == {choice.index: choice.logprobs.content for choice in whole.choices}
    assert len(pieces) > 3


def test_log_probabilities_are_the_models(client: Any) -> None:
    """They are those of `generate --logprobs`; the chosen token is the likeliest, as nothing is sampled."""
    question = MESSAGES[0]["content"]
    (told,) = generate(question, "--chat", "--temperature", 0, "--max-new-tokens", 15, "--logprobs", 3)
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=15, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert [token.logprob for token in content] == [token["logprob"] for token in told["logprobs"]]
    likeliest = [[item.logprob for item in token.top_logprobs] for token in content]
    assert likeliest == [[item["logprob"] for item in token["top_logprobs"]] for token in told["logprobs"]]
    assert "".join(token.token for token in content).strip() == answer.choices[0].message.content.strip()
    for token in content:
        assert bytes(token.bytes).decode() == token.token
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob == max(item.logprob for item in token.top_logprobs)
        assert sum(math.exp(item.logprob) for item in token.top_logprobs) <= 1 + 1e-6


def test_a_stop_string_is_not_part_of_the_text(client: Any) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once upon a time", seed=1, max_tokens=60)
    stopped = client.completions.create(model=MODEL, prompt="Once upon a time", seed=1, max_tokens=60, stop=" his home")
    assert " his home" in whole.choices[0].text
    assert stopped.choices[0].text == whole.choices[0].text.partition(" his home")[0]
    assert (stopped.choices[0].finish_reason, whole.choices[0].finish_reason) == ("stop", "length")


def test_a_text_can_be_told_again_by_its_seed(client: Any) -> None:
    first = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20)
    again = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, seed=first.seed)
    other = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert other.seed != first.seed


def test_the_next_turn_finds_the_pages_of_the_one_before(client: Any) -> None:
    """And its text is that of a chat without a server."""
    question = "Tell me of an owl and a lamp on a long evening. " * 7
    talk: list[Any] = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model=MODEL, messages=talk, max_tokens=20, seed=1)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    talk += [answer.choices[0].message.to_dict(), {"role": "user", "content": "And then?"}]
    turn = client.chat.completions.create(model=MODEL, messages=talk, max_tokens=20, seed=1)
    assert turn.usage.prompt_tokens_details.cached_tokens >= 64
    said = ("--message", question, "--message", "And then?")
    here = run_here("chat", "--device", "cpu", "--json", "--seed", 1, "--max-new-tokens", 20, *said)
    assert json.loads(here.stdout)["turns"][1]["answer"] == turn.choices[0].message.content


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([2**31], f"prompt[0] is {2**31}, expected < {2**31}"),
        ([5, "a"], "prompt[1] is 'a', expected an integer"),
        ([True], "prompt[0] is true, expected an integer"),
        ([[5], [6, -1]], "prompt[1][1] is -1, expected >= 0"),
        ([[5], "a"], "prompt[1] is 'a', expected a list"),
        (["a", [5]], "prompt[1] is [5], expected a string"),
        ([], "prompt is [], expected at least one entry"),
        (5, "prompt is 5, expected a list"),
        ({"a": 1}, "prompt is {'a': 1}, expected a list"),
    ],
)
def test_a_prompt_is_wrong_where_it_is_wrong(prompt: Any, words: str) -> None:
    with pytest.raises(Refusal) as caught:
        parse_body(CompletionBody, json.dumps({"prompt": prompt}).encode())
    assert caught.value.message == words


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionBody, r'{"prompt":"\ud800"}', "prompt"),
        (CompletionBody, r'{"prompt":["a","b\udfffc"]}', "prompt[1]"),
        (CompletionBody, r'{"prompt":"a","stop":["b","\ud83d"]}', "stop[1]"),
        (CompletionBody, r'{"prompt":"a","choice":["\ude00\ud83d"]}', "choice[0]"),
        (CompletionBody, r'{"prompt":"a","schema":{"enum":["\ud800"]}}', "schema.enum[0]"),
        (CompletionBody, r'{"prompt":"a","schema":{"properties":{"\ud800":{}}}}', "a key of schema.properties"),
        (CompletionBody, r'{"prompt":"a","logit_bias":{"\ud800":1}}', "a key of logit_bias"),
        (CompletionBody, r'{"prompt":"a","model":"\ud800"}', "model"),
        (ChatBody, r'{"messages":[{"role":"user","content":"a\ud800"}]}', "messages[0].content"),
        (
            ChatBody,
            r'{"messages":[{"role":"user","content":[{"type":"text","text":"\ud800"}]}]}',
            "messages[0].content[0].text",
        ),
        (TokenizeBody, r'{"prompt":"\ud800"}', "prompt"),
    ],
)
def test_half_a_surrogate_pair_is_refused_where_it_stands(kind: type[Body], body: str, param: str) -> None:
    with pytest.raises(Refusal, match=rf"^{re.escape(param)} has the lone surrogate U\+D[\dA-F]+, half of") as caught:
        parse_body(kind, body.encode())
    assert (caught.value.status, caught.value.param) == (400, param)
    to_json([caught.value.message, caught.value.param])


def test_a_refusal_of_a_key_that_is_no_unicode_can_be_answered() -> None:
    with pytest.raises(Refusal, match="appears twice") as caught:
        parse_body(CompletionBody, rb'{"a\ud800":1,"a\ud800":2}')
    assert json.loads(to_json([caught.value.message, caught.value.param]))[1] == "a?"


def test_options_of_a_stream_are_for_streams() -> None:
    body = {"prompt": "a", "stream_options": {"include_usage": True}}
    assert parse_body(CompletionBody, json.dumps({**body, "stream": True}).encode()).includes_usage
    with pytest.raises(Refusal, match='stream_options needs "stream": true') as caught:
        parse_body(CompletionBody, json.dumps(body).encode())
    assert caught.value.param == "stream_options"


@pytest.mark.parametrize("prompt", [[5, 999_999], [[5], []], "snail " * 3000])
def test_a_prompt_that_cannot_be_is_refused_by_name(client: Any, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=prompt)
    assert caught.value.param == "prompt"


def test_a_path_takes_its_own_methods(client: Any) -> None:
    with pytest.raises(openai.APIStatusError, match="'/v1/completions' does not take GET") as caught:
        client.get("/completions", cast_to=object)
    assert caught.value.status_code == 405


def test_models_and_what_there_is_not(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here, expected 'storyteller'"):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError, match="no embeddings"):
        client.embeddings.create(model=MODEL, input="Hi")


def test_tokens_there_and_back(server: ServerProcess, client: Any) -> None:
    text = "Zwölf Boxkämpfer jagen 🦊 über den Deich"
    tokens = client.post("/../tokenize", body={"prompt": text}, cast_to=object)
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert client.post("/../detokenize", body={"tokens": tokens["tokens"]}, cast_to=object) == {"prompt": text}
    asked = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    tokens = client.post("/../tokenize", body={"messages": MESSAGES}, cast_to=object)
    assert tokens["count"] == asked.usage.prompt_tokens
