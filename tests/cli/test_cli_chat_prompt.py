"""`generate --chat`: the template's prompt, the tokens that end a turn, and the flags of `--chat`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from results import Llmcli

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BOS_ID, EOS_ID = 256, 257


@pytest.fixture
def chat_model(tiny_llama: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "chat-model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def answer(llmcli: Llmcli) -> Callable[..., dict]:
    def call(model: Path, *arguments: object) -> dict:
        common = ("--chat", "-m", model, "--temperature", 0, "--max-new-tokens", 8, "--json")
        result = llmcli("generate", *arguments, *common)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return call


def test_the_template_writes_the_prompt(answer: Callable[..., dict], chat_model: Path) -> None:
    """Special strings of a message are text."""
    expected = [BOS_ID, *b"[system]Be kind.", EOS_ID, *b"[user]a<|end|>b", EOS_ID, *b"[assistant]"]
    assert answer(chat_model, "a<|end|>b", "--system", "Be kind.")["prompt_token_ids"] == expected


def test_another_template(answer: Callable[..., dict], chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jinja").write_text("{{ messages[-1].content }}!")
    template = tmp_path / "other.jinja"
    assert answer(chat_model, "Hi", "--chat-template", template)["prompt_token_ids"] == [*b"Hi!"]
    plain = answer(chat_model, "Hi", "--chat-template", "plain")
    assert plain["prompt_token_ids"] == [BOS_ID, *b"User: Hi\nAssistant:"]


def test_the_token_that_ends_a_turn_ends_the_answer(
    llmcli: Llmcli, chat_model: Path, answer: Callable[..., dict]
) -> None:
    """The template's <|end|> is not an end-of-sequence token of any file here."""
    config = json.loads((chat_model / "config.json").read_text())
    (chat_model / "config.json").write_text(json.dumps({**config, "eos_token_id": 280}))
    (chat_model / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin|>"}))
    force = ("--logit-bias", f"{EOS_ID}=1000")
    assert answer(chat_model, "Hi", *force)["finish_reason"] == "eos"
    raw = llmcli("generate", "Hi", "-m", chat_model, "--max-new-tokens", 8, "--json", *force)
    assert json.loads(raw.stdout)["finish_reason"] == "length"


def test_show_prompt(llmcli: Llmcli, chat_model: Path) -> None:
    result = llmcli("generate", "Hi", "--chat", "-m", chat_model, "--show-prompt", "--max-new-tokens", 1, "--quiet")
    text = "<|begin|>[user]Hi<|end|>[assistant]"
    ids = [BOS_ID, *b"[user]Hi", EOS_ID, *b"[assistant]"]
    assert result.stderr == f"{text}\n{' '.join(map(str, ids))}\n"


def test_a_model_without_a_template_names_the_flag(llmcli: Llmcli, tiny_llama: Path) -> None:
    result = llmcli("generate", "Hi", "--chat", "-m", tiny_llama)
    result.expect_error(2, "has no chat template", "--chat-template FILE", "plain")


def test_a_template_that_refuses_or_writes_nothing(llmcli: Llmcli, chat_model: Path) -> None:
    for template, message in (
        ("{{ raise_exception('no system prompts here') }}", "no system prompts here"),
        ("{{ '' }}", "chat_template.jinja gives an empty prompt for this message"),
    ):
        (chat_model / "chat_template.jinja").write_text(template)
        llmcli("generate", "Hi", "--chat", "-m", chat_model).expect_error(3, message, "chat_template.jinja")


@pytest.mark.parametrize("flags", [("--system", "Be kind."), ("--chat-template", "plain")])
def test_flags_that_belong_to_chat(llmcli: Llmcli, tiny_llama: Path, flags: tuple[str, str]) -> None:
    llmcli("generate", "Hi", "-m", tiny_llama, *flags).expect_error(2, "need --chat")


def test_info_says_where_the_template_is(llmcli: Llmcli, chat_model: Path) -> None:
    assert f"the chat template {chat_model / 'chat_template.jinja'}" in llmcli("info", chat_model).stdout
