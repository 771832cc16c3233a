"""Reasoning apart from the answer: in whole answers, streams, counts, `chat --server`, batch and Python."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import openai
import pytest
from here import run_here
from hypothesis import given
from hypothesis import strategies as st
from paged import make_request
from server import ServerProcess, running_server
from test_openai_client import MESSAGES, MODEL, generate
from transformers.utils.chat_template_utils import render_jinja_template

import llmcli
from llmcli.engine.chat_events import Start
from llmcli.engine.request import Finished, Timings, Token
from llmcli.serve.answers import ChatAnswer

TEMPLATE = (
    "{{ bos_token }}{% for one in messages %}{{ one.role }}: "
    "{% if one.reasoning_content %}<think>\n{{ one.reasoning_content }}\n</think>\n{% endif %}{{ one.content }}\n"
    "{% endfor %}assistant:{% if thinks %} <think>\n{% endif %}"
)
THOUGHT = r"<think>\n(Yes|No)\n</think>\n\nThe [a-z]{3,5}\."  # a regular expression
QWEN3 = Path(__file__).resolve().parents[3] / "shared" / "chat_templates" / "Qwen-Qwen3-0.6B.jinja"
TIMINGS = Timings(1, 0.0, 0.0, 0, 0.0)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def thinker(template: Path) -> Iterator[ServerProcess]:
    with running_server("--chat-template", template) as server:
        yield server


@pytest.fixture(scope="module")
def thinking(thinker: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0)


def answer_in(parts: list[str], start: Start) -> tuple[dict[str, Any], int, list[dict[str, Any]]]:
    """The message of a text that comes in these tokens, its reasoning tokens, and the deltas of its stream."""
    request = make_request([97], 7)
    whole, streamed = (ChatAnswer("m", [request], None, start=start) for _ in range(2))  # type: ignore[arg-type]
    deltas = []
    for event in [*(Token(0, 97, part) for part in parts), Finished(0, "", "", (), "eos", TIMINGS)]:
        for answer in (whole, streamed):
            answer.take(0, event)
        deltas += [json.loads(piece)["choices"][0]["delta"] for piece in streamed.pieces()]
    told = whole.whole()
    return told["choices"][0]["message"], told["usage"]["completion_tokens_details"]["reasoning_tokens"], deltas


@given(
    st.sampled_from(
        [
            ("<think>\nA < b </thi\n</think>\n\nHi <think>no</think> ", "undecided", "A < b </thi"),
            ("A\n</think>\n\nHi <think>no</think> ", "reasoning", "A"),
            ("<think>\nA\n</think>Hi <think>no</think> ", "reasoning", "A"),
            ("Hi <think>no</think> ", "undecided", None),
            ("<think>no</think> ", "answer", None),
        ]
    ),
    st.lists(st.integers(1, 60), max_size=8),
)
def test_a_text_is_read_wherever_its_tokens_end(case: tuple[str, Start, str | None], cuts: list[int]) -> None:
    text, start, reasoning = case
    end = text.index("</think>") + 8 if reasoning else 0
    ends = sorted({*(cut for cut in cuts if cut < len(text)), len(text)})
    parts = [text[first:last] for first, last in zip([0, *ends], ends, strict=False)]
    content = "<think>no</think> " if start == "answer" else "Hi <think>no</think> "
    message, num_reasoning, deltas = answer_in(parts, start)
    assert message == {
        "role": "assistant",
        "content": content,
        **({"reasoning_content": reasoning} if reasoning else {}),
    }
    assert num_reasoning == sum(first < end for first in [0, *ends[:-1]])
    assert "".join(delta.get("content", "") for delta in deltas) == content
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (reasoning or "")
    kinds = [key for delta in deltas for key in ("reasoning_content", "content") if delta.get(key)]
    assert kinds == sorted(kinds, reverse=True)


def test_reasoning_that_is_cut_is_no_answer() -> None:
    assert answer_in(["<think>", "Hm"], "undecided")[:2] == (
        {"role": "assistant", "content": "", "reasoning_content": "Hm"},
        2,
    )
    assert answer_in(["<thi"], "undecided")[:2] == ({"role": "assistant", "content": "<thi"}, 0)


def test_a_model_reasons(thinking: Any) -> None:
    """The pieces of a stream are the whole; the tokens up to the closing tag are counted."""
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": 3, "extra_body": {"regex": THOUGHT}}
    answer = thinking.chat.completions.create(**asked, n=2, logprobs=True)
    num_tokens = 0
    for choice in answer.choices:
        assert choice.message.reasoning_content in ("Yes", "No")
        assert re.fullmatch(r"The [a-z]{3,5}\.", choice.message.content)
        texts = [bytes(token.bytes).decode() for token in choice.logprobs.content]
        num_tokens += next(count for count in range(99) if "</think>" in "".join(texts[:count]))
    assert answer.usage.completion_tokens_details.reasoning_tokens == num_tokens
    options = {"include_usage": True}
    *pieces, last = thinking.chat.completions.create(**asked, n=2, stream=True, stream_options=options)
    for index, choice in enumerate(answer.choices):
        deltas = [piece.choices[0].delta for piece in pieces if piece.choices[0].index == index]
        reasoning = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
        assert reasoning == choice.message.reasoning_content
        assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert last.usage == answer.usage


def test_a_template_that_does_not_know_reasoning_has_none(client: Any) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=3, extra_body={"regex": THOUGHT})
    assert re.fullmatch(THOUGHT, answer.choices[0].message.content)
    assert not hasattr(answer.choices[0].message, "reasoning_content")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_the_template_opens_the_reasoning(thinking: Any, template: Path) -> None:
    """If a variable says so; an answer that is held to a schema has none."""
    flags = ("--chat", "--chat-template", template, "--seed", 5, "--max-new-tokens", 20)
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": 5, "max_tokens": 20}
    (told,) = generate(MESSAGES[0]["content"], *flags)
    (message,) = (choice.message for choice in thinking.chat.completions.create(**asked).choices)
    assert message.content == told["text"]
    (told,) = generate(MESSAGES[0]["content"], *flags, "--template-var", "thinks=true")
    body: dict[str, Any] = {"chat_template_kwargs": {"thinks": True}}
    answer = thinking.chat.completions.create(**asked, extra_body=body)
    assert answer.choices[0].message.content == ""
    assert answer.choices[0].message.reasoning_content == told["text"].strip()
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens == 20
    answer = thinking.chat.completions.create(**asked, extra_body={**body, "choice": ["Yes", "No"]})
    assert answer.choices[0].message.content in ("Yes", "No")


def test_earlier_reasoning_reaches_the_template(thinker: ServerProcess, thinking: Any) -> None:
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "Snails are slow."}
    messages = [*MESSAGES, said, {"role": "user", "content": "Why?"}]
    told = thinking.post("/../tokenize", body={"messages": messages}, cast_to=object)
    text = thinking.post("/../detokenize", body={"tokens": told["tokens"]}, cast_to=object)["prompt"]
    assert text == jinja2.Template(TEMPLATE).render(messages=messages)
    assert "Snails are slow." in text
    for wrong in (5, ["a"]):
        bad: Any = [{**said, "reasoning_content": wrong}]
        with pytest.raises(openai.BadRequestError) as caught:
            thinking.chat.completions.create(model=MODEL, messages=bad)
        assert caught.value.param == "messages[0].reasoning_content"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"think": True}, "chat_template_kwargs think: the chat template has no such variable; it has thinks"),
        ({"messages": []}, "messages: the chat template has no such variable"),
        ({"bos_token": ""}, "bos_token: the chat template has no such variable"),
        ({"thinks": "a" * 300_000}, "the prompt has at least"),
        ([], "chat_template_kwargs is [], expected an object such as"),
        ("thinks", "chat_template_kwargs is 'thinks', expected an object such as"),
    ],
)
def test_variables_that_cannot_be_are_refused(thinking: Any, variables: Any, words: str) -> None:
    body = {"chat_template_kwargs": variables}
    with pytest.raises(openai.BadRequestError) as caught:
        thinking.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=body)
    assert caught.value.param == "chat_template_kwargs"
    assert words in str(caught.value)


def test_a_chat_with_the_server_shows_reasoning(thinker: ServerProcess, template: Path, tmp_path: Path) -> None:
    """As the model here does, also in the second turn, whose prompt has the reasoning of the first."""
    talk = ("--message", "Tell me of a snail.", "--message", "And?", "--seed", 2, "--max-new-tokens", 12)
    flags = ("--thinking", "show", *talk)
    with running_server("--chat-template", template, "--template-var", "thinks=true") as server:
        there = run_here("chat", "--server", server.url, *flags, LLMCLI_HOME=tmp_path)
    model = ("--device", "cpu", "--chat-template", template, "--template-var", "thinks=true")
    here = run_here("chat", *model, *flags, LLMCLI_HOME=tmp_path)
    assert there.returncode == here.returncode == 0
    assert there.stdout == here.stdout
    _, _, *thoughts = here.stderr.splitlines()  # after the lines of the model and its device
    assert there.stderr.splitlines() == thoughts
    assert len("".join(thoughts)) > 99


def test_a_batch_has_the_same(thinking: Any, template: Path, tmp_path: Path) -> None:
    bodies = [{"chat_template_kwargs": {"thinks": True}, "max_tokens": 9}, {"max_tokens": 9}]
    own = {"messages": MESSAGES, "seed": 1, "max_new_tokens": 9, "chat_template_kwargs": {"thinks": True}, "id": "own"}
    lines: list[Any] = [own]
    for index, body in enumerate(bodies):
        common = {"custom_id": f"{index}", "method": "POST", "url": "/v1/chat/completions"}
        lines.append({**common, "body": {"messages": MESSAGES, "seed": 1, **body}})
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    files = (tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    run_here("batch", "--device", "cpu", "--chat-template", template, *files).check_returncode()
    native, *results = [json.loads(line) for line in files[1].read_text().splitlines()]
    for result, body in zip(results, bodies, strict=True):
        answer = thinking.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1, extra_body=body)
        expected = {name: value for name, value in answer.choices[0].message.to_dict().items() if value is not None}
        assert result["response"]["body"]["choices"][0]["message"] == expected
    reasoning = results[0]["response"]["body"]["choices"][0]["message"]["reasoning_content"]
    assert native["text"].strip() == reasoning


@pytest.mark.skipif(not QWEN3.exists(), reason="needs the template of Qwen3")
def test_variables_and_reasoning_reach_qwen3() -> None:
    """The prompts are transformers'."""
    call = {"role": "assistant", "content": "Hm.", "reasoning_content": "Well."}
    talks = [MESSAGES, [*MESSAGES, call, *MESSAGES], [*MESSAGES, call]]
    with llmcli.load(MODEL, device="cpu", chat_template=str(QWEN3), context=1024) as model:
        for messages in talks:
            for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
                options: Any = {"max_new_tokens": 1, "chat_template_kwargs": variables}
                (expected,), _ = render_jinja_template(
                    [messages], chat_template=QWEN3.read_text(), add_generation_prompt=True, **variables
                )
                token_ids = model.chat(messages, **options).prompt_token_ids
                assert b"".join(map(model.tokenizer.token_bytes, token_ids)).decode().strip() == expected.strip()
        with pytest.raises(llmcli.LLMCliError, match="chat_template_kwargs thinking: .* has no such variable; it has"):
            model.chat(MESSAGES, chat_template_kwargs={"thinking": True})
        with pytest.raises(llmcli.LLMCliError, match="chat_template_kwargs needs messages"):
            model.generate("Hi", chat_template_kwargs={})
