"""Rendered prompts and their ids against transformers' `apply_chat_template`, with the real templates."""

import re
from pathlib import Path

import jinja2
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llmcli.errors import TokenizerError
from llmcli.tokenizer.chat_encoding import encode_chat
from llmcli.tokenizer.chat_template import ChatTemplate, load_chat_template

TEMPLATES = Path(__file__).resolve().parents[2].parent / "shared" / "chat_templates"

# From the model card of Llama 2 Chat.
LLAMA2_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
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
                pytest.skip(f"chat_templates/{file} is not in a folder `shared` beside the project")
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
