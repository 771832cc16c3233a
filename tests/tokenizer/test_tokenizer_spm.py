"""tokenizer.model against sentencepiece and, for added tokens, transformers."""

import json

import pytest
import sentencepiece
from transformers import AutoTokenizer

from llmcli.tokenizer.load import load_tokenizer

MODELS = ["spm", "no_fallback", "stories", "llama2"]

BEHAVIOUR = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
CHAT_CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "bos_token": "<s>",
    "eos_token": "<|im_end|>",
    "added_tokens_decoder": {
        "1": {"content": "<s>", "special": True, **BEHAVIOUR},
        "2": {"content": "</s>", "special": True, **BEHAVIOUR},
        "32000": {"content": "<|im_end|>", "special": True, **BEHAVIOUR},
        "32001": {"content": "<tool>", "special": False, **BEHAVIOUR},
        "32002": {"content": "<tool>s", "special": False, **BEHAVIOUR},
        "32003": {"content": "<both>", "special": True, **BEHAVIOUR, "lstrip": True, "rstrip": True},
        "32004": {"content": "xyzzy", "special": False, **BEHAVIOUR, "single_word": True},
    },
}
CHAT_TEXTS = [
    "hello",
    "<s>hello",
    "a</s>b",
    "a</s> b",
    "a <|im_end|> b",
    "x<|im_end|>\nhi",
    "<|im_end|><tool>",
    "<tool>s <tool> ",
    "a  <both>  b",
    "a xyzzy, xyzzys, xyzzy",
    "",
]


@pytest.fixture
def processor(request):
    def load(name):
        path = request.getfixturevalue(f"{name}_folder") / "tokenizer.model"
        return sentencepiece.SentencePieceProcessor(model_file=str(path))

    return load


@pytest.fixture
def llama2_chat_folder(llama2_folder, tmp_path):
    (tmp_path / "tokenizer.model").symlink_to(llama2_folder / "tokenizer.model")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    def write(**changes):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(CHAT_CONFIG | changes))
        return tmp_path

    return write


@pytest.mark.parametrize("name", MODELS)
def test_ids_equal_sentencepiece(name, load, processor, texts):
    reference = processor(name)
    for text in texts:
        assert load(name).encode(text, add_special_tokens=False) == reference.encode(text)


@pytest.mark.parametrize("name", MODELS)
def test_every_token_has_the_bytes_that_the_library_decodes(name, load, processor):
    tokenizer, reference = load(name), processor(name)
    letter = reference.piece_to_id("a")
    for token_id in range(reference.get_piece_size()):
        text = b"a" + tokenizer.token_bytes(token_id)
        assert text.decode(errors="replace") == reference.decode([letter, token_id])


def test_bytes_by_hand(load):
    tokenizer = load("spm")
    pieces = ["<0x0A>", "<0xF0>", "▁the", "▁", "<s>", "<turn>"]
    assert None not in [tokenizer.token_id(piece) for piece in pieces]
    bytes_of = [tokenizer.token_bytes(tokenizer.token_id(piece)) for piece in pieces]
    assert bytes_of == [b"\n", b"\xf0", b" the", b" ", b"", b"<turn>"]
    assert load("no_fallback").token_bytes(0) == " ⁇ ".encode()


@pytest.mark.parametrize("name", MODELS)
def test_vocabulary_look_ups(name, load, processor):
    tokenizer, reference = load(name), processor(name)
    assert tokenizer.vocab_size == reference.get_piece_size()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})
    assert tokenizer.special_token_ids == {1, 2}
    assert tokenizer.strips_leading_space
    for token_id in (0, 1, 40, tokenizer.vocab_size - 1):
        assert tokenizer.piece(token_id) == reference.id_to_piece(token_id)
        assert tokenizer.token_id(tokenizer.piece(token_id)) == token_id
    assert tokenizer.token_id("no such token") is None
    for outside in (-1, tokenizer.vocab_size, 2**40):
        assert tokenizer.token_bytes(outside) == b""
        assert tokenizer.piece(outside) == ""


@pytest.mark.parametrize("legacy", [False, True])
def test_added_tokens_are_found_as_transformers_finds_them(legacy, llama2_chat_folder):
    folder = llama2_chat_folder(legacy=legacy)
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    # Where the text between two tokens begins with white space, legacy transformers leaves the prefix out and
    # sentencepiece does not.
    texts = [text for text in CHAT_TEXTS if not legacy or "> " not in text and "\n" not in text]
    for text in texts:
        expected = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text


def test_added_tokens_by_hand(llama2_chat_folder):
    tokenizer = load_tokenizer(llama2_chat_folder())
    assert tokenizer.vocab_size == 32005
    assert tokenizer.eos_token_ids == {2, 32000}
    assert tokenizer.special_token_ids == {1, 2, 32000, 32003}
    assert tokenizer.encode("hello<|im_end|>") == [1, 22172, 32000]
    assert (tokenizer.token_id("<tool>"), tokenizer.piece(32001)) == (32001, "<tool>")
    assert (tokenizer.token_bytes(32000), tokenizer.token_bytes(32001)) == (b"", b"<tool>")


def test_added_tokens_json_of_older_folders(spm_model, folder_of):
    folder = folder_of(
        tokenizer__model=spm_model,
        added_tokens__json={"<|im_end|>": 700, "<tool>": 702},
        special_tokens_map__json={"eos_token": "<|im_end|>", "additional_special_tokens": [{"content": "<turn>"}]},
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<tool><|im_end|>", add_special_tokens=False) == [702, 700]
    assert tokenizer.eos_token_ids == {2, 700}
    assert tokenizer.special_token_ids == {1, 2, 700, tokenizer.token_id("<turn>")}
    assert tokenizer.vocab_size == 703
    assert [tokenizer.token_bytes(token_id) for token_id in (700, 701, 702)] == [b"", b"", b"<tool>"]


def test_unparsed_special_strings_are_ordinary_text(spm_model, folder_of, processor):
    config = {
        "additional_special_tokens": ["<turn>"],
        "added_tokens_decoder": {
            "700": {"content": "<|im_end|>", "special": True},
            "701": {"content": "<tool>", "special": False},
        },
    }
    tokenizer = load_tokenizer(folder_of(tokenizer__model=spm_model, tokenizer_config__json=config))
    for special in ("<s>", "</s>", "<turn>", "<|im_end|>"):
        for text in (special, f"say {special}{special} and\n{special} x", f" {special}"):
            token_ids = tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False)
            assert not set(token_ids) & tokenizer.special_token_ids
            assert processor("spm").decode(token_ids) == text
            assert set(tokenizer.encode(text, add_special_tokens=False)) & tokenizer.special_token_ids
    assert tokenizer.encode("<tool>", add_special_tokens=False, parse_special_tokens=False) == [701]


@pytest.mark.parametrize("name", ["spm", "no_fallback"])
@pytest.mark.parametrize("text", ["hello", " hello", "", "\n", "☃", "☃☃ hello", "ha", "世界"])
def test_text_after_a_special_token_gets_no_space(name, text, load, processor):
    tokenizer, reference = load(name), processor(name)
    token_ids = tokenizer.encode(f"</s>{text}", add_special_tokens=False)
    assert token_ids[0] == 2
    # "a" in front shows the library a place that is not the start of the text.
    assert reference.decode([reference.piece_to_id("a"), *token_ids[1:]]) == "a" + reference.decode(
        reference.encode(text)
    )
    assert len(token_ids) <= 2 + len(reference.encode(text))


def test_unknown_token_is_hidden_if_declared_special(folder_of, no_fallback_folder):
    model = (no_fallback_folder / "tokenizer.model").read_bytes()
    config = {"added_tokens_decoder": {"0": {"content": "<unk>", "special": True}}}
    tokenizer = load_tokenizer(folder_of(tokenizer__model=model, tokenizer_config__json=config))
    assert tokenizer.token_bytes(0) == b""
