"""tokenizer.json against the `tokenizers` library and transformers."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from llmcli.tokenizer.load import load_tokenizer

REAL = ["llama3", "qwen2"]
SYNTHETIC = ["byte_level", "byte_fallback", "metaspace"]


@pytest.mark.parametrize("name", SYNTHETIC + REAL)
def test_ids_equal_transformers(name, load, request, texts):
    path = request.getfixturevalue(f"{name}_folder") / "tokenizer.json"
    reference = PreTrainedTokenizerFast(tokenizer_file=str(path))
    for text in texts:
        assert load(name).encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_post_processor_is_followed(name, load, library, texts):
    for text in texts:
        assert load(name).encode(text) == library(name).encode(text).ids


@pytest.mark.parametrize("name", SYNTHETIC + REAL)
def test_special_tokens_in_text_are_parsed_as_the_library_parses_them(name, load, library):
    special = [token.content for token in library(name).get_added_tokens_decoder().values()][:5]
    for token in special:
        for text in (token, f"a{token}b", f"a {token} b\n", f" {token}{token}"):
            ids = load(name).encode(text, add_special_tokens=False)
            assert ids == library(name).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", SYNTHETIC + REAL)
def test_every_token_has_the_bytes_that_the_library_decodes(name, load, library):
    tokenizer, reference = load(name), library(name)
    # A plain letter first, so that the library has nothing to strip from the token in question.
    letter = reference.token_to_id("a")
    step = max(1, tokenizer.vocab_size // 3000)
    for token_id in range(0, tokenizer.vocab_size, step):
        text = b"a" + tokenizer.token_bytes(token_id)
        assert text.decode(errors="replace") == reference.decode([letter, token_id], skip_special_tokens=True)


def test_byte_level_bytes_by_hand(load):
    tokenizer = load("byte_level")
    bytes_of = {
        piece: tokenizer.token_bytes(tokenizer.token_id(piece)) for piece in ("Ġ", "Ċ", "A", "ð", "a b", "日本")
    }
    assert bytes_of == {"Ġ": b" ", "Ċ": b"\n", "A": b"A", "ð": b"\xf0", "a b": b"a b", "日本": "日本".encode()}
    assert tokenizer.token_bytes(tokenizer.token_id("<tool>")) == b"<tool>"


def test_byte_fallback_bytes_by_hand(load):
    tokenizer = load("byte_fallback")
    bytes_of = {p: tokenizer.token_bytes(tokenizer.token_id(p)) for p in ("<0x0A>", "<0xF0>", "▁hello", "▁▁", "世")}
    expected = {"<0x0A>": b"\n", "<0xF0>": b"\xf0", "▁hello": b" hello", "▁▁": b"  ", "世": "世".encode()}
    assert bytes_of == expected


@pytest.mark.parametrize("name", SYNTHETIC + REAL)
def test_vocabulary_look_ups(name, load, library):
    tokenizer, reference = load(name), library(name)
    assert tokenizer.vocab_size == 1 + max(reference.get_vocab().values())
    for token_id in (0, 1, 150, tokenizer.vocab_size - 1):
        assert tokenizer.piece(token_id) == reference.id_to_token(token_id)
        assert tokenizer.token_id(tokenizer.piece(token_id)) == token_id
    assert tokenizer.token_id("no such token") is None
    for outside in (-1, tokenizer.vocab_size, 2**40):
        assert tokenizer.token_bytes(outside) == b""
        assert tokenizer.piece(outside) == ""


def test_special_tokens_give_no_bytes(load):
    tokenizer = load("byte_level")
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert [tokenizer.token_bytes(token_id) for token_id in (0, 1, 2)] == [b"", b"", b""]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, {1})


def test_real_special_ids(load):
    llama3 = load("llama3")
    assert (llama3.bos_token_id, llama3.eos_token_ids) == (128000, {128009})
    assert llama3.special_token_ids == frozenset(range(128000, 128256))
    qwen2 = load("qwen2")
    assert (qwen2.bos_token_id, qwen2.eos_token_ids) == (None, {151645})


@pytest.mark.parametrize("name", SYNTHETIC + REAL)
def test_no_token_is_longer_than_the_longest(name, load, texts):
    tokenizer = load(name)
    longest = max(range(tokenizer.vocab_size), key=lambda token_id: len(tokenizer.token_bytes(token_id)))
    for text in [*texts, tokenizer.token_bytes(longest).decode(errors="ignore") * 10]:
        assert len(text.encode()) <= len(tokenizer.encode(text)) * tokenizer.longest_token, text
    assert tokenizer.longest_token < 200


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", *REAL])
def test_unparsed_special_strings_are_ordinary_text(name, load, library):
    tokenizer, reference = load(name), library(name)
    special = [t.content for t in reference.get_added_tokens_decoder().values() if t.special and t.content != "<unk>"]
    for text in ("".join(special[:6]), *(f"say {token} and\n{token}{token}" for token in special[:6])):
        token_ids = tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False)
        assert not set(token_ids) & tokenizer.special_token_ids
        assert reference.decode(token_ids, skip_special_tokens=True) == text
        # The next call parses them again.
        assert set(tokenizer.encode(text, add_special_tokens=False)) & tokenizer.special_token_ids


def test_unparsed_special_strings_keep_bos_and_other_added_tokens(load):
    tokenizer = load("byte_level")
    token_ids = tokenizer.encode("<|bos|><tool>", parse_special_tokens=False)
    assert token_ids[0] == 0
    assert 0 not in token_ids[1:]
    assert token_ids[-1] == tokenizer.token_id("<tool>")


class SlowLibrary:
    """A slow `tokenizers.Tokenizer`, so that other threads get in between."""

    def __init__(self, library):
        self.library = library

    @property
    def encode_special_tokens(self):
        return self.library.encode_special_tokens

    @encode_special_tokens.setter
    def encode_special_tokens(self, value):
        self.library.encode_special_tokens = value

    def encode(self, *arguments, **options):
        time.sleep(0.001)
        return self.library.encode(*arguments, **options)


def test_threads_do_not_disturb_each_other(byte_level_folder):
    tokenizer = load_tokenizer(byte_level_folder)
    text = "hello <|eot|> world"
    expected = {parse: tokenizer.encode(text, parse_special_tokens=parse) for parse in (True, False)}
    assert expected[True] != expected[False]
    tokenizer._tokenizer = SlowLibrary(tokenizer._tokenizer)
    choices = [index % 3 == 0 for index in range(60)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda parse: tokenizer.encode(text, parse_special_tokens=parse), choices))
    assert results == [expected[parse] for parse in choices]


def test_truncation_and_padding_of_the_file_are_ignored(byte_level_library, tmp_path):
    tokenizer = tokenizers.Tokenizer.from_str(byte_level_library.to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "Hello world, hello again!"
    assert load_tokenizer(tmp_path).encode(text) == byte_level_library.encode(text).ids
    assert len(tokenizer.encode(text).ids) == 64  # the library itself would have cut and padded


@pytest.mark.parametrize("token", ["<tool>", "<|eot|>"])
def test_a_token_that_only_the_config_calls_special(token, byte_level_library, folder_of):
    document = json.loads(byte_level_library.to_str())
    # "<tool>" is listed as an ordinary added token; "<|eot|>" is now only a word of the vocabulary.
    document["added_tokens"] = [entry for entry in document["added_tokens"] if entry["content"] != "<|eot|>"]
    folder = folder_of(tokenizer__json=document, tokenizer_config__json={"eos_token": token})
    token_id = byte_level_library.token_to_id(token)
    assert token_id is not None
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token_ids == {token_id}
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.vocab_size == byte_level_library.get_vocab_size()
    assert token_id in tokenizer.encode(f"x{token}x")
    assert token_id not in tokenizer.encode(f"x{token}x", parse_special_tokens=False)


def test_declared_tokens_missing_from_the_vocabulary_are_ignored(byte_level_library, folder_of):
    config = {"bos_token": "<nowhere>", "eos_token": "<neither>", "additional_special_tokens": ["<nor-this>"]}
    folder = folder_of(tokenizer__json=json.loads(byte_level_library.to_str()), tokenizer_config__json=config)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, frozenset())  # the post-processor adds that BOS
    assert tokenizer.vocab_size == byte_level_library.get_vocab_size()


@pytest.mark.parametrize(
    ("decoder", "first_piece"),
    [
        (decoders.ByteLevel(), "Ġx"),
        (decoders.Sequence([decoders.ByteLevel()]), "Ġx"),
        (decoders.Metaspace(), "▁x"),
        (decoders.Metaspace(prepend_scheme="never"), "▁x"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), "▁x"),
    ],
)
def test_which_decoders_strip_the_leading_space(decoder, first_piece, byte_level_library, tmp_path):
    tokenizer = tokenizers.Tokenizer.from_str(byte_level_library.to_str())
    tokenizer.decoder = decoder
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).strips_leading_space is (decoder.decode([first_piece]) == "x")
