"""Every refusal of the tokenizer room, with its message."""

import json
import subprocess
import sys

import pytest
from tokenizers import decoders

from llmcli.errors import TokenizerError, UsageError
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
