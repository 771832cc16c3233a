"""A stranger's tokenizer.json: endless expressions, endless growth, panics; and pipes instead of files."""

import json
import os
import time

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from llmcli.errors import TokenizerError, UsageError
from llmcli.tokenizer import huggingface
from llmcli.tokenizer.chat_template import load_chat_template
from llmcli.tokenizer.huggingface import KNOWN_PATTERNS, read_document
from llmcli.tokenizer.load import load_tokenizer

ENDLESS = {"Regex": "(a|aa)+$"}
# Each run of 26 stays below the limit of steps that the library's expressions have; all of them take minutes.
SLOW_TEXT = ("a" * 26 + "!") * 2000


def split(pattern):
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.fixture
def document(byte_level_library):
    return json.loads(byte_level_library.to_str())


@pytest.fixture
def failure_of(document, folder_of, monkeypatch):
    """Loads and encodes with changed parts, within limits of 1 s; return the error's one line."""
    assert huggingface.LIMIT_SECONDS == 4
    monkeypatch.setattr(huggingface, "LIMIT_SECONDS", 1)

    def fail(text, **changes):
        started = time.monotonic()
        with pytest.raises(TokenizerError) as caught:
            load_tokenizer(folder_of(tokenizer__json=document | changes)).encode(text)
        assert time.monotonic() - started < 9  # a limit each for loading and encoding, and a busy machine
        assert str(caught.value).isprintable()
        return str(caught.value)

    return fail


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": split(ENDLESS)},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Sequence", "pretokenizers": [split(ENDLESS)]}],
            }
        },
        {"normalizer": replace(ENDLESS, "x")},
    ],
)
def test_an_expression_without_end_is_stopped(changes, failure_of):
    assert "failed: it does not end within 1 s; its expressions or steps do not suit this text" in failure_of(
        SLOW_TEXT, **changes
    )


def test_an_expression_that_meets_an_added_token_is_stopped_at_load(document, failure_of):
    added = {"id": 999, "content": SLOW_TEXT, "special": False, "normalized": True}
    added |= {"lstrip": False, "rstrip": False, "single_word": False}
    changes = {"normalizer": replace(ENDLESS, "x"), "added_tokens": [*document["added_tokens"], added]}
    assert "failed: it does not end within 1 s" in failure_of("a", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [replace({"String": "a"}, "a" * 100)] * 10}},
        {"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 10**5,
                            "pair": [], "special_tokens": {}}},
    ],
)  # fmt: skip
def test_growth_without_end_is_stopped(changes, failure_of):
    assert " failed: it" in failure_of("a" * 5000, **changes)


def test_a_panic_in_an_expression_is_one_line(failure_of, capfd):
    message = failure_of("a" * 5000 + "!", pre_tokenizer=split(ENDLESS))
    assert "retry-limit-in-match over" in message
    assert capfd.readouterr().err == ""


def test_a_panic_at_load_is_one_line(document, failure_of, capfd):
    document["model"]["continuing_subword_prefix"] = "x" * 99
    assert "is not a readable tokenizer.json: the library that reads it failed (range" in failure_of("a")
    assert capfd.readouterr().err == ""


def test_an_unknown_expression_gives_the_libraries_ids(byte_level_library, folder_of, texts):
    library = tokenizers.Tokenizer.from_str(byte_level_library.to_str())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex("[a-m]+|[n-z]+"), "isolated"), pre_tokenizers.ByteLevel(False)]
    )
    config = {"pad_token": "q", "added_tokens_decoder": {"999": {"content": "<more>", "special": True}}}
    folder = folder_of(tokenizer__json=json.loads(library.to_str()), tokenizer_config__json=config)
    tokenizer = load_tokenizer(folder)
    assert tokenizer._encoder is not None
    library.add_tokens([tokenizers.AddedToken("<more>", special=True), tokenizers.AddedToken("q", special=True)])
    for text in [*texts, "a<more>b<|eot|>q"]:
        for add in (True, False):
            assert tokenizer.encode(text, add_special_tokens=add) == library.encode(text, add_special_tokens=add).ids


def test_an_unknown_expression_leaves_special_strings_ordinary_where_they_are(document, folder_of):
    tokenizer = load_tokenizer(folder_of(tokenizer__json=document | {"pre_tokenizer": split({"Regex": "zzz"})}))
    eot = tokenizer.token_id("<|eot|>")
    assert eot not in tokenizer.encode("a<|eot|>", parse_special_tokens=False)
    assert eot in tokenizer.encode("a<|eot|>")


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "metaspace", "llama3", "qwen2"])
def test_usual_tokenizers_start_no_process(name, load):
    assert load(name)._encoder is None


@pytest.mark.parametrize("pattern", sorted(KNOWN_PATTERNS))
@pytest.mark.parametrize(
    "unit", ["a", " ", "\n", "1", "!", "世", "\u0301", "Aa", " a", "a1", "' ", " \n", "!\n", "\r/"]
)
def test_known_expressions_take_time_in_proportion_to_the_text(pattern, unit):
    step = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    text = "x" + unit * (100_000 // len(unit)) + "x"
    started = time.process_time()
    step.pre_tokenize_str(text)
    assert time.process_time() - started < 3


@pytest.mark.parametrize("order", ["of the library", "sorted", "with a second normalizer at the end"])
def test_the_order_of_the_parts_does_not_matter(order, document, byte_level_library):
    text = json.dumps(document, sort_keys=order == "sorted")
    if order.startswith("with"):
        text = text[:-1] + ', "normalizer": ' + json.dumps(replace(ENDLESS, "x")) + "}"
    read = read_document(text)
    assert read.is_known_to_be_quick()
    again = tokenizers.Tokenizer.from_str(read.text())
    assert again.to_str() == byte_level_library.to_str()


def test_a_hidden_expression_is_found_wherever_it_stands(document):
    document["pre_tokenizer"] = split(ENDLESS)
    for text in (json.dumps(document), json.dumps(document, sort_keys=True)):
        assert not read_document(text.replace("Regex", "\\u0052egex")).is_known_to_be_quick()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name are POSIX's")
@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_pipes_and_devices_are_refused_at_once(name, kind, spm_model, folder_of):
    folder = folder_of(tokenizer__model=spm_model)
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(TokenizerError) as caught:
        load_chat_template(folder, load_tokenizer(folder))
    assert str(caught.value).startswith(f"{path} is not a regular file, expected ")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name are POSIX's")
def test_a_pipe_as_the_chosen_template_is_refused_at_once(spm_model, folder_of, tmp_path):
    folder = folder_of(tokenizer__model=spm_model)
    os.mkfifo(tmp_path / "template")
    with pytest.raises(UsageError, match="is not a regular file, expected a chat template; expected a file that holds"):
        load_chat_template(folder, load_tokenizer(folder), str(tmp_path / "template"))
