"""Where a chat template is found, the built-in one, and the message when there is none."""

import json

import pytest

from llmcli.errors import LLMCliError, TokenizerError, UsageError
from llmcli.tokenizer.chat_template import load_chat_template
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
