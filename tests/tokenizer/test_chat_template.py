"""Where a chat template is found, the built-in one, and the message when there is none."""

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jinja2
import pytest
import transformers.utils.chat_template_utils as reference
from chat_templates import LLAMA2_TEMPLATE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llmcli.errors import LLMCliError, TokenizerError, UsageError
from llmcli.tokenizer.chat_encoding import PLAIN_SOURCE, ChatTemplate, encode_chat, load_chat_template
from llmcli.tokenizer.load import load_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def folder(tmp_path, spm_model):
    (tmp_path / "tokenizer.model").write_bytes(spm_model)
    return tmp_path


def write(folder, name, value):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def load(folder, choice=None):
    return load_chat_template(folder, load_tokenizer(folder), choice)


def failure_of(folder, kind, choice=None):
    with pytest.raises(LLMCliError) as caught:
        load(folder, choice)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.isprintable()
    return message


def test_in_tokenizer_config(folder):
    write(folder, "tokenizer_config.json", {"chat_template": "A {{ messages[0].content }}é"})
    template = load(folder)
    assert template.render(HELLO) == "A Helloé"
    assert template.origin == f"the chat_template in {folder / 'tokenizer_config.json'}"


def test_a_list_of_named_ones(folder):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "the default"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert load(folder).render(HELLO) == "the default"


def test_its_own_file_goes_first(folder):
    write(folder, "tokenizer_config.json", {"chat_template": "config"})
    write(folder, "chat_template.jinja", "file é")
    write(folder, "additional_chat_templates/tool_use.jinja", "tools")
    assert load(folder).render(HELLO) == "file é"
    assert load(folder).origin == f"the chat template {folder / 'chat_template.jinja'}"


def test_a_chosen_file_goes_before_the_folder(folder, tmp_path_factory):
    write(folder, "chat_template.jinja", "folder")
    chosen = tmp_path_factory.mktemp("chosen") / "my.jinja"
    chosen.write_text("{{ bos_token }} mine", encoding="utf-8")
    template = load(folder, str(chosen))
    assert template.render(HELLO) == "<s> mine"
    assert template.origin == f"the chat template {chosen}"


def test_plain(folder):
    write(folder, "chat_template.jinja", "folder")
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": False})
    template = load(folder, "plain")
    messages = [
        {"role": "system", "content": "A talk. "},
        {"role": "user", "content": " Hi\nthere "},
        {"role": "assistant", "content": " Hello."},
        {"role": "user", "content": "Bye"},
    ]
    expected = "A talk.\n\nUser: Hi\nthere\nAssistant: Hello.\nUser: Bye\n"
    assert template.render(messages) == expected + "Assistant:"
    assert template.render(messages, add_generation_prompt=False) == expected
    assert template.stop_strings == ("\nUser:",)
    assert load(folder).stop_strings == ()


@pytest.mark.parametrize("add_bos_token", [True, False])
def test_plain_begins_as_the_tokenizer_begins_a_text(add_bos_token, folder):
    write(folder, "tokenizer_config.json", {"add_bos_token": add_bos_token, "bos_token": "<s>"})
    assert load(folder, "plain").render([]) == ("<s>Assistant:" if add_bos_token else "Assistant:")


def test_special_tokens_are_variables(folder):
    config = {"bos_token": {"content": "<b>"}, "eos_token": "</s>", "pad_token": None, "unk_token": "<unk>"}
    write(folder, "tokenizer_config.json", {**config, "chat_template": "-", "added_tokens_decoder": {}})
    write(folder, "special_tokens_map.json", {"eos_token": "ignored", "cls_token": "ignored"})
    assert load(folder).special_tokens == {"bos_token": "<b>", "eos_token": "</s>", "unk_token": "<unk>"}
    write(folder, "tokenizer_config.json", {**config, "chat_template": "-"})
    write(folder, "special_tokens_map.json", {"eos_token": {"content": "<unk>"}, "pad_token": "</s>"})
    assert load(folder).special_tokens == {
        "bos_token": "<b>",
        "eos_token": "<unk>",
        "unk_token": "<unk>",
        "pad_token": "</s>",
    }


def test_special_tokens_that_only_the_tokenizer_knows(folder):
    write(folder, "chat_template.jinja", "-")
    assert load(folder).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_none(folder):
    write(folder, "tokenizer_config.json", {"bos_token": "<s>"})
    assert failure_of(folder, UsageError) == (
        f"{folder} has no chat template: there is no chat_template.jinja, and no chat_template in "
        "tokenizer_config.json; give one with --chat-template FILE, or use --chat-template plain for a conversation "
        "in lines of `User:` and `Assistant:`"
    )


def test_none_and_no_config(folder):
    assert "--chat-template FILE" in failure_of(folder, UsageError)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (5, "is 5, expected a template or a list of named ones"),
        ([], "has no template named default, only none; choose one with --chat-template FILE"),
        ([{"name": "rag", "template": "x"}], "has no template named default, only rag; choose one with"),
        ([{"name": "default", "template": None}], "is null, expected a template or a list of named ones"),
        (["x"], 'is ["x"], expected a template or a list of named ones'),
        (" \n", "is empty; choose another one with --chat-template FILE"),
    ],
)
def test_malformed_in_tokenizer_config(value, reason, folder):
    write(folder, "tokenizer_config.json", {"chat_template": value})
    message = failure_of(folder, TokenizerError)
    assert f"chat_template in {folder / 'tokenizer_config.json'} {reason}" in message


def test_unreadable_in_the_folder(folder):
    path = folder / "chat_template.jinja"
    path.write_bytes(b"\xff\xfe")
    assert failure_of(folder, TokenizerError) == f"{path} is not UTF-8 text; give another with --chat-template FILE"
    path.unlink()
    path.mkdir()
    assert failure_of(folder, TokenizerError) == f"{path} is not a regular file, expected a chat template"


def test_unreadable_choice(folder):
    expected = "; expected a file that holds a Jinja template, or `plain`"
    missing = folder / "missing.jinja"
    assert failure_of(folder, UsageError, str(missing)) == (
        f"{missing} cannot be read: No such file or directory{expected}"
    )
    missing.write_bytes(b"\xff")
    assert failure_of(folder, UsageError, str(missing)) == (
        f"{missing} is not UTF-8 text; give another with --chat-template FILE{expected}"
    )


def test_failures_name_the_origin(folder):
    write(folder, "chat_template.jinja", "\n{{ raise_exception('No system prompt, please.') }}")
    with pytest.raises(TokenizerError) as caught:
        load(folder).render(HELLO)
    path = folder / "chat_template.jinja"
    assert str(caught.value) == f"the chat template {path} failed: No system prompt, please. (line 2)"


def test_messages_beyond_what_a_template_may_write_are_no_fault_of_it(folder):
    write(folder, "tokenizer_config.json", {"chat_template": "{{ messages[0].content }}"})
    template = load(folder)
    assert len(template.render([{"role": "user", "content": "w" * 4 * 2**20}])) == 4 * 2**20
    with pytest.raises(UsageError, match=r"^the messages have 4\.3 MB, at most 4 MB fit; shorten them$"):
        template.render([{"role": "system", "content": "é" * 2**21}, {"role": "user", "content": "w" * 300_000}])
    template.close()


# Rendered prompts and their ids against transformers' `apply_chat_template`, with the real templates.


TEMPLATES = Path(__file__).resolve().parents[2].parent / "shared" / "chat_templates"

MODELS = {
    "llama3.1": ("llama3", "meta-llama-Llama-3.1-8B-Instruct.jinja"),
    "llama3.2": ("llama3", "meta-llama-Llama-3.2-3B-Instruct.jinja"),
    "qwen2.5": ("qwen2", "Qwen-Qwen2.5-7B-Instruct.jinja"),
    "qwen3": ("qwen2", "Qwen-Qwen3-0.6B.jinja"),
    "llama2": ("llama2", None),
}


def turns(*contents, system=None):
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Né <b>", "parameters": {"type": "object", "properties": {}}},
}
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"a": "é"}}}],
}
CONVERSATIONS = {
    "one question": (turns("Hello!"), {}),
    "system prompt": (turns("Hello!", system="You are terse."), {}),
    "several turns": (turns("Hi", "Hello.", "How are you?", "Fine.", "Good", system="Be kind."), {}),
    "ends with the assistant": (turns("Hi", "Hello."), {}),
    "not ASCII": (turns("Grüß dich, 世界! 👩‍👩‍👧 é", "Привет\u2028мир", "ok", system="«Réponds»"), {}),
    "empty": (turns("", "", "", system=""), {}),
    "white space": (turns("  \n hi \t\n", "\n\n yes  ", "   ", system=" s "), {}),
    "code and markup": (
        turns("```py\nprint('<b>&amp;')\n```\n[INST] \\n {{ 1 }} {% if %}", '"quoted" <tool_call>', "x"),
        {},
    ),
    "thinking": (turns("2+2?", "<think>\nadd\n</think>\n\n4", "and 3?", "<think>\nno\n</think>\n\n5"), {}),
    "thinking, next turn": (turns("2+2?", "<think>\nadd\n</think>\n\n4", "and 3?"), {"enable_thinking": False}),
    "reasoning_content": ([*turns("2+2?"), {"role": "assistant", "content": "4", "reasoning_content": "add"}], {}),
    "reasoning under an older name": ([*turns("2+2?"), {"role": "assistant", "content": "4", "thinking": "add"}], {}),
    "keys without a value": ([{"role": "user", "content": "hi", "name": None, "tool_calls": None}], {}),
    "tools": (turns("Weather?", system="Use tools."), {"tools": [WEATHER]}),
    "tool calls": ([*turns("Weather?"), CALL, {"role": "tool", "content": '{"t": 20}'}], {"tools": [WEATHER]}),
    "a date": (turns("Hi"), {"date_string": "01 Jan 2030"}),
}


@pytest.fixture(scope="module")
def model(request, load, tmp_path_factory):
    """Our tokenizer and template of a model, and transformers' tokenizer with the same template."""
    loaded = {}

    def load_llama2(folder):
        copy = tmp_path_factory.mktemp("llama2_reference")
        (copy / "tokenizer.model").symlink_to(folder / "tokenizer.model")
        (copy / "config.json").write_text('{"model_type": "llama"}')
        (copy / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "legacy": false}')
        (copy / "chat_template.jinja").write_text(LLAMA2_TEMPLATE)
        return load("llama2"), load_chat_template(copy, load("llama2")), AutoTokenizer.from_pretrained(copy)

    def load_once(name):
        if name not in loaded:
            tokenizer_name, file = MODELS[name]
            folder = request.getfixturevalue(f"{tokenizer_name}_folder")
            if file is None:
                loaded[name] = load_llama2(folder)
            elif (path := TEMPLATES / file).is_file():
                named = {"bos_token": "<|begin_of_text|>"} if tokenizer_name == "llama3" else {}
                reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **named)
                reference.chat_template = path.read_text(encoding="utf-8")
                tokenizer = load(tokenizer_name)
                loaded[name] = tokenizer, load_chat_template(folder, tokenizer, str(path)), reference
            else:
                pytest.skip(f"chat_templates/{file} is not in ../shared")
        return loaded[name]

    yield load_once
    for _, template, _ in loaded.values():
        template.close()


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_text_and_ids_equal_transformers(name, conversation, model):
    tokenizer, template, reference = model(name)
    messages, variables = CONVERSATIONS[conversation]
    for add_generation_prompt in (True, False):
        options = {"add_generation_prompt": add_generation_prompt, **variables}
        try:
            text = reference.apply_chat_template(messages, tokenize=False, **options)
        except jinja2.TemplateError as error:
            with pytest.raises(TokenizerError, match=re.escape(str(error))):
                template.render(messages, **options)
            continue
        assert template.render(messages, **options) == text
        # From a tokenizer.model transformers makes merges that join runs of spaces differently from sentencepiece.
        if name != "llama2" or "  " not in text:
            token_ids = reference.apply_chat_template(messages, return_dict=False, **options)
            assert encode_chat(tokenizer, template, messages, **options) == token_ids


def test_today(model):
    _, template, reference = model("llama3.2")
    for _ in range(2):  # the second try is for midnight
        text = reference.apply_chat_template(turns("Hi"), tokenize=False, add_generation_prompt=True)
        if template.render(turns("Hi")) == text:
            break
    assert template.render(turns("Hi")) == text
    assert "Today Date: " in text


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}",
        "{{ messages | tojson(indent=2, sort_keys=true) }}{{ 'é' | tojson(ensure_ascii=true) }}",
        "{{ {'a': '<b>'} | tojson(separators=(',', ':')) }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}\n  {%- generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}\n",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "   {% if true %}\n  a  \n   {% endif %}\nb\n",
        "{{ tools is none }} {{ documents is none }} {{ nothing is defined }}{{ nothing }} {{ add_generation_prompt }}",
        "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}",
        "{{ dict(a=1) }} {{ dict.fromkeys('ab', 1) }} {{ dict.fromkeys('a') }}",
        "{% set ns = namespace(a=1, self=2) %}{% set ns.a = 3 %}{{ ns.a }}{{ ns.self }}{{ namespace({'b': 4}).b }}",
        "{{ messages[0].content.split('l')[-1].lstrip('o') }} {{ messages[1:] | length }} {{ messages[::-1][0].role }}",
        "{{ enable_thinking }} {{ bos_token | default('none') }}",
    ],
)
def test_the_environment_is_transformers_own(source, model):
    _, _, reference = model("llama2")
    messages = turns("Hel</s>lo é", "yes")
    variables = {"chat_template": source, "enable_thinking": False, "add_generation_prompt": True}
    expected = reference.apply_chat_template(messages, tokenize=False, **variables)
    del variables["chat_template"]
    template = ChatTemplate(source, "T", reference.special_tokens_map)
    assert template.render(messages, **variables) == expected


def test_a_variable_goes_before_a_special_token(model):
    template = ChatTemplate("{{ bos_token }}", "T", {"bos_token": "<s>"})
    assert template.render(turns("a")) == "<s>"
    assert template.render(turns("a"), bos_token="") == ""


# A message that the template does not write is refused with its role, never silently left out.


KNOWN = """\
{%- for message in messages -%}
{%- if message.role in ['system', 'user', 'assistant'] -%}
[{{ message.role }}]{{ message.content | trim }}
{%- endif -%}
{%- endfor -%}"""
FIRST_SYSTEM = """\
{%- if messages[0].role == 'system' -%}{{ messages[0].content }}{%- endif -%}
{%- for message in messages if message.role != 'system' -%}{{ message.content | upper }}{%- endfor -%}"""
CUT = "{%- for message in messages -%}{{ message.content[2:9] }}{%- endfor -%}"
PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "chat_templates"


@pytest.fixture
def template(request: pytest.FixtureRequest) -> Iterator[ChatTemplate]:
    made = ChatTemplate(request.param, "the template T", {})
    yield made
    made.close()


def talk(*roles: str, content: str = "a") -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role in roles]


@pytest.mark.parametrize("template", [KNOWN], indirect=True)
@pytest.mark.parametrize("role", ["tool", "ipython", "developer", "User", "", "\n", "x" * 500])
def test_an_unknown_role_is_named(template: ChatTemplate, role: str) -> None:
    """Even if its text is elsewhere in the prompt."""
    template.refuse_dropped(talk("system", "user", "assistant", "user"))
    words = f"the template T leaves out message 2 of 3, whose role is {role[:40]!r}; use another role, or"
    for _ in range(2):
        with pytest.raises(TokenizerError) as caught:
            template.refuse_dropped(talk("user", role, "user"))
        assert str(caught.value).startswith(words)


@pytest.mark.parametrize("template", [FIRST_SYSTEM], indirect=True)
def test_a_role_at_another_place_is_another_thing(template: ChatTemplate) -> None:
    template.refuse_dropped(talk("system", "user"))
    with pytest.raises(TokenizerError, match="leaves out message 2 of 3, whose role is 'system'"):
        template.refuse_dropped(talk("user", "system", "user"))


@pytest.mark.parametrize("template", [CUT, PLAIN_SOURCE], indirect=True)
@pytest.mark.parametrize("content", ["", "a", "long enough to be cut"])
def test_what_is_cut_is_not_left_out(template: ChatTemplate, content: str) -> None:
    template.refuse_dropped(talk("system", "user", "assistant", "narrator", content=content))


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs the published chat templates")
def test_published_templates_against_transformers() -> None:
    """Every message of each conversation has its own text, which transformers' rendering contains or not."""
    num_refused = num_taken = 0
    for path in sorted(PUBLISHED.glob("*.jinja")):
        source = path.read_text()
        made = ChatTemplate(source, "the template T", {"bos_token": "<s>"})
        for roles in product(["system", "user", "assistant", "tool", "ipython", "developer"], repeat=2):
            messages = [{"role": role, "content": f"content{index}"} for index, role in enumerate(roles)]
            try:
                (rendered,), _ = reference.render_jinja_template(
                    [messages], chat_template=source, bos_token="<s>", add_generation_prompt=True
                )
            except Exception:  # the template's own refusal
                continue
            is_whole = all(message["content"] in rendered for message in messages)
            if is_whole:
                made.refuse_dropped(messages)
                num_taken += 1
            else:
                with pytest.raises(TokenizerError, match="leaves out message"):
                    made.refuse_dropped(messages)
                num_refused += 1
        made.close()
    assert num_taken > 50
    assert num_refused > 0
