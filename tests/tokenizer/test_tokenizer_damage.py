"""Single damages that were once internal errors: each is used as it is, or refused with one line and exit 3.

Random ones are those of tests/fuzz.
"""

import json

import pytest
from conftest import train_sentencepiece
from tokenizers import decoders

from llmcli.errors import TokenizerError
from llmcli.tokenizer.chat_encoding import load_chat_template
from llmcli.tokenizer.load import load_tokenizer

DEEP = b'{"a": ' * 5000 + b"1" + b"}" * 5000


@pytest.fixture
def document(byte_level_library):
    return json.loads(byte_level_library.to_str())


@pytest.fixture
def message_of(folder_of):
    def load(**files):
        with pytest.raises(TokenizerError) as caught:
            load_tokenizer(folder_of(**files))
        message = str(caught.value)
        assert message.isprintable()
        assert len(message) < 700
        return message

    return load


def test_deep_json(message_of):
    assert "nested" in message_of(tokenizer__json=DEEP)


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map", "added_tokens"])
def test_deep_json_in_the_settings(name, spm_model, message_of):
    message = message_of(tokenizer__model=spm_model, **{f"{name}__json": DEEP})
    assert f"{name}.json is not valid JSON: nested more than 64 levels deep" in message


def test_half_a_surrogate_pair(document, message_of):
    document["model"]["vocab"]["\ud800"] = 9999
    assert "is not a readable tokenizer.json" in message_of(tokenizer__json=document)
    document["model"]["vocab"].pop("\ud800")
    document["added_tokens"][0]["content"] = "\ud800"
    assert "is not a readable tokenizer.json" in message_of(tokenizer__json=document)


def test_a_piece_that_is_not_utf8(spm_model, message_of):
    assert "text that is not valid Unicode" in message_of(
        tokenizer__model=spm_model.replace("▁the".encode(), b"\xff" * 6)
    )


def test_an_empty_template_of_a_post_processor(document, folder_of):
    document["post_processor"] = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
    assert load_tokenizer(folder_of(tokenizer__json=document)).bos_token_id is None


@pytest.mark.parametrize("place", [0, 1])
def test_a_template_with_a_token_that_has_no_id(place, document, message_of):
    parts = [{"Sequence": {"id": "A", "type_id": 0}}]
    parts.insert(place, {"SpecialToken": {"id": "<lost>", "type_id": 0}})
    template = {"type": "TemplateProcessing", "single": parts, "pair": [], "special_tokens": {}}
    for processor in (template, {"type": "Sequence", "processors": [template]}):
        document["post_processor"] = processor
        assert "adds '<lost>' without an id" in message_of(tokenizer__json=document)


def test_a_model_without_an_unknown_token(spm_model, folder_of):
    # The field `type` of its first piece, from "unknown" to "normal".
    assert spm_model.count(b"<unk>\x15\x00\x00\x00\x00\x18\x02") == 1
    model = spm_model.replace(b"<unk>\x15\x00\x00\x00\x00\x18\x02", b"<unk>\x15\x00\x00\x00\x00\x18\x01")
    tokenizer = load_tokenizer(folder_of(tokenizer__model=model))
    assert tokenizer.token_id("no such piece") is None
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("☃ hello"))) == " ☃ hello".encode()


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"added_tokens__json": {"<x>": -1}}, 'gives "<x>" the id -1, expected 0 to 4194304'),
        ({"added_tokens__json": {"<x>": 2**32}}, 'gives "<x>" the id 4294967296, expected 0 to 4194304'),
        ({"added_tokens__json": {"<x>": True}}, 'holds {"<x>": true}, expected token strings with ids'),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"9" * 19: {"content": "x"}}}}, "expected 0 to 4194304"),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}}, "expected a token id"),
        ({"tokenizer_config__json": {"extra_special_tokens": {"a": 5}}}, "extra_special_tokens in"),
        ({"tokenizer_config__json": {"extra_special_tokens": [{"content": 5}]}}, "extra_special_tokens in"),
        ({"tokenizer_config__json": {"pad_token": ["x" * 10**6]}}, "pad_token in"),
    ],
)
def test_wrong_values_in_the_settings(files, reason, spm_model, message_of):
    assert reason in message_of(tokenizer__model=spm_model, **files)


@pytest.mark.parametrize("token_id", [2**22 + 1, 2**32 - 1])
def test_huge_ids_in_the_vocabulary(token_id, document, message_of):
    document["model"]["vocab"]["huge"] = token_id
    assert f"has the token id {token_id}, expected ids up to 4194304" in message_of(tokenizer__json=document)


@pytest.mark.parametrize("token_id", [-1, 2**32, 0.5, None, "1"])
def test_ids_that_are_none(token_id, document, message_of):
    document["model"]["vocab"]["odd"] = token_id
    assert "is not a readable tokenizer.json" in message_of(tokenizer__json=document)


def test_a_vocabulary_with_holes_and_one_with_an_id_twice(document, folder_of):
    document["model"]["vocab"]["far"] = 5000
    tokenizer = load_tokenizer(folder_of(tokenizer__json=document))
    assert (tokenizer.vocab_size, tokenizer.piece(4000), tokenizer.token_bytes(4000)) == (5001, "", b"")
    document["model"]["vocab"]["far"] = document["model"]["vocab"]["a"]
    tokenizer = load_tokenizer(folder_of(tokenizer__json=document))
    assert tokenizer.piece(tokenizer.encode("a")[-1]) in ("a", "far")


def test_a_text_that_the_library_refuses(folder_of):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}
    document = {"added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None}
    document["decoder"] = json.loads(decoders.ByteLevel().__getstate__())
    folder = folder_of(tokenizer__json=document | {"model": model})
    with pytest.raises(TokenizerError, match="cannot encode the text"):
        load_tokenizer(folder).encode("b")


def test_a_named_template_with_a_name_that_is_a_list(spm_model, folder_of):
    config = {"chat_template": [{"name": [1], "template": "x"}]}
    folder = folder_of(tokenizer__model=spm_model, tokenizer_config__json=config)
    with pytest.raises(TokenizerError, match="has no template named default"):
        load_chat_template(folder, load_tokenizer(folder))


def test_a_model_that_calls_another_piece_a_byte(folder_of):
    model = train_sentencepiece(vocab_size=400, byte_fallback=True)
    with pytest.raises(TokenizerError):
        load_tokenizer(folder_of(tokenizer__model=model.replace(b"<0x41>", b"<0xZZ>")))
