"""Every refusal of the tokenizer room, with its message."""

import json
import os
import subprocess
import sys
import time

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers

from llmcli.errors import TokenizerError, UsageError
from llmcli.tokenizer import huggingface
from llmcli.tokenizer.chat_encoding import load_chat_template
from llmcli.tokenizer.huggingface import KNOWN_PATTERNS, read_document
from llmcli.tokenizer.load import load_tokenizer


def message_of(folder):
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_no_tokenizer(tmp_path):
    assert message_of(tmp_path) == (
        f"no tokenizer in {tmp_path}: looked for tokenizer.json and tokenizer.model; "
        f"download one of them from the model's page into this folder"
    )


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_git_lfs_pointer(name, tmp_path):
    path = tmp_path / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 499723\n")
    assert message_of(tmp_path) == (
        f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in {tmp_path}"
    )


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_empty_file(name, tmp_path):
    (tmp_path / name).touch()
    assert message_of(tmp_path) == f"{tmp_path / name} is empty; download the file again"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_broken_link(name, tmp_path):
    (tmp_path / name).symlink_to(tmp_path / "nowhere")
    assert message_of(tmp_path) == f"{tmp_path / name} cannot be read: No such file or directory"


def test_tiktoken_file(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\nIw== 2\n")
    assert message_of(tmp_path) == (
        f"{tmp_path / 'tokenizer.model'} is a tiktoken file, as Meta ships it with Llama 3, expected a SentencePiece "
        f"model; put the tokenizer.json of the same model into {tmp_path}"
    )


def test_damaged_model(tmp_path, spm_model):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(spm_model[: len(spm_model) // 2])
    message = message_of(tmp_path)
    assert message.startswith(f"{path} is not a SentencePiece model (")
    assert message.endswith("); download the file again")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {"type": "Nonsense"}}', "\x00\x01"])
def test_damaged_json(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    message = message_of(tmp_path)
    assert message.startswith(f"{path} is not a readable tokenizer.json (")
    assert message.endswith("); download the file again")


@pytest.mark.parametrize(
    ("decoder", "found"),
    [
        (decoders.WordPiece(), "the decoder WordPiece"),
        (decoders.Sequence([decoders.Fuse(), decoders.BPEDecoder()]), "the decoder Fuse, BPEDecoder"),
        (decoders.Strip(" ", 1, 0), "the decoder Strip"),
        (decoders.Replace("_", " "), "the decoder Replace"),
        (None, "no decoder"),
    ],
)
def test_unknown_decoder(decoder, found, byte_level_library, folder_of):
    document = json.loads(byte_level_library.to_str())
    document["decoder"] = None if decoder is None else json.loads(decoder.__getstate__())
    folder = folder_of(tokenizer__json=document)
    assert message_of(folder) == (
        f"{folder / 'tokenizer.json'} declares {found}, expected ByteLevel, Metaspace, or Replace ▁, ByteFallback, "
        f"Fuse and perhaps Strip one left space; remove the file if the folder also has a tokenizer.model, else this "
        f"model cannot be run"
    )


def test_llama_sequence_with_other_values_is_unknown(byte_fallback_library, folder_of):
    document = json.loads(byte_fallback_library.to_str())
    document["decoder"]["decoders"][3]["start"] = 2
    assert "declares the decoder Replace, ByteFallback, Fuse, Strip" in message_of(folder_of(tokenizer__json=document))


def test_settings_that_are_not_json(spm_model, folder_of):
    folder = folder_of(tokenizer__model=spm_model, tokenizer_config__json=b"{oops")
    message = message_of(folder)
    assert message.startswith(f"{folder / 'tokenizer_config.json'} is not valid JSON: ")
    assert message.endswith("; download it again")


def test_settings_that_are_a_folder(spm_model, folder_of):
    folder = folder_of(tokenizer__model=spm_model)
    (folder / "special_tokens_map.json").mkdir()
    path = folder / "special_tokens_map.json"
    assert message_of(folder) == f"{path} is not a regular file, expected tokenizer settings"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ([], "{path} holds a JSON list, expected an object; download it again"),
        ({"add_bos_token": "yes"}, 'add_bos_token in {path} is "yes", expected true, false or null'),
        ({"legacy": 1}, "legacy in {path} is 1, expected true, false or null"),
        (
            {"bos_token": 1},
            'bos_token in {path} is 1, expected a string, an object with "content", or null',
        ),
        (
            {"eos_token": {"id": 2}},
            'eos_token in {path} is {{"id": 2}}, expected a string, an object with "content", or null',
        ),
        (
            {"additional_special_tokens": "<x>"},
            'additional_special_tokens in {path} is "<x>", expected a list of tokens or an object',
        ),
        ({"added_tokens_decoder": []}, "added_tokens_decoder in {path} is [], expected an object"),
        (
            {"added_tokens_decoder": {"x": {"content": "<x>"}}},
            'added_tokens_decoder in {path} holds {{"x": {{"content": "<x>"}}}}, '
            'expected a token id with an object that has "content"',
        ),
        (
            {"added_tokens_decoder": {"7": "<x>"}},
            'added_tokens_decoder in {path} holds {{"7": "<x>"}}, '
            'expected a token id with an object that has "content"',
        ),
        (
            {"bos_token": "<lost>", "add_bos_token": True},
            "{path} has add_bos_token: true, but tokenizer.model has no token '<lost>'; "
            "the files do not belong together, download both again",
        ),
        (
            {"eos_token": "<lost>", "add_eos_token": True},
            "{path} has add_eos_token: true, but tokenizer.model has no token '<lost>'; "
            "the files do not belong together, download both again",
        ),
    ],
)
def test_malformed_settings(config, expected, spm_model, folder_of):
    folder = folder_of(tokenizer__model=spm_model, tokenizer_config__json=config)
    assert message_of(folder) == expected.format(path=folder / "tokenizer_config.json")


def test_malformed_special_tokens_map(spm_model, folder_of):
    folder = folder_of(tokenizer__model=spm_model, special_tokens_map__json={"bos_token": 1})
    assert message_of(folder) == (
        f'bos_token in {folder / "special_tokens_map.json"} is 1, expected a string, an object with "content", or null'
    )


def test_malformed_added_tokens(spm_model, folder_of):
    folder = folder_of(tokenizer__model=spm_model, added_tokens__json={"<x>": "7"})
    path = folder / "added_tokens.json"
    assert message_of(folder) == f'{path} holds {{"<x>": "7"}}, expected token strings with ids'


def test_lost_bos_of_a_tokenizer_json(byte_level_library, folder_of):
    document = json.loads(byte_level_library.to_str()) | {"post_processor": None}
    config = {"bos_token": "<lost>", "add_bos_token": True, "eos_token": "<x>", "add_eos_token": True}
    folder = folder_of(tokenizer__json=document, tokenizer_config__json=config)
    assert "has add_bos_token: true, but tokenizer.json has no token '<lost>'" in message_of(folder)


@pytest.mark.parametrize("name", ["byte_level", "spm"])
def test_text_with_a_lone_surrogate(name, load):
    with pytest.raises(UsageError) as caught:
        load(name).encode("a\udcffb")
    assert str(caught.value) == (
        "the text is not valid Unicode: lone surrogate U+DCFF at character 1; pass the text as UTF-8"
    )


def test_tokenizer_json_wins(spm_model, byte_level_library, folder_of):
    folder = folder_of(tokenizer__model=spm_model, tokenizer__json=json.loads(byte_level_library.to_str()))
    assert load_tokenizer(folder).token_id("<|bos|>") == 0


def test_special_tokens_map_is_read_where_the_config_lists_no_tokens(byte_level_library, folder_of):
    document = json.loads(byte_level_library.to_str())
    token_map = {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|eot|>"}
    folder = folder_of(
        tokenizer__json=document,
        tokenizer_config__json={"eos_token": "<|eos|>", "bos_token": None},
        special_tokens_map__json=token_map,
    )
    assert load_tokenizer(folder).eos_token_ids == {2}
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|eos|>", "added_tokens_decoder": {}}')
    assert load_tokenizer(folder).eos_token_ids == {1}


@pytest.mark.parametrize(
    ("name", "needed", "unwanted"),
    [("byte_level", "tokenizers", "sentencepiece"), ("spm", "sentencepiece", "tokenizers")],
)
def test_only_the_library_in_use_is_imported(name, needed, unwanted, request):
    folder = request.getfixturevalue(f"{name}_folder")
    program = (
        "import sys; from pathlib import Path; from llmcli.tokenizer.load import load_tokenizer; "
        f"assert not {{'tokenizers', 'sentencepiece'}} & set(sys.modules); load_tokenizer(Path({str(folder)!r})); "
        "print(*sorted({'tokenizers', 'sentencepiece', 'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [needed]
    assert unwanted not in result.stdout


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    assert message_of(tmp_path / "nowhere") == f"model folder {tmp_path / 'nowhere'} does not exist"
    assert message_of(tmp_path / "file") == f"model folder {tmp_path / 'file'} is a file"


# A stranger's tokenizer.json: endless expressions, endless growth, panics; and pipes instead of files.


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
