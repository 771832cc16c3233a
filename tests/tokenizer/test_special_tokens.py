"""Tokens that only a tokenizer's other files name, against transformers: special, hidden, variables of templates."""

import json

import pytest
import sentencepiece
from conftest import write_json
from transformers import AutoTokenizer

from llmcli.tokenizer.base import decode
from llmcli.tokenizer.chat_template import load_chat_template
from llmcli.tokenizer.load import load_tokenizer
from llmcli.tokenizer.settings import read_settings

NAMES = ["unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "image_token"]
TEXT = "a<|eot|>a <tool>, b <new> c"
TYPED = {"__type": "AddedToken", "lstrip": True, "rstrip": False, "single_word": False, "normalized": False}
VARIABLES = [*NAMES, "bos_token", "eos_token", "call_token", "additional_special_tokens", "extra_special_tokens"]
TEMPLATE = "".join(f"{{{{ {name} is defined }}}}{{{{ {name} }}}}|" for name in VARIABLES)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def folder(tmp_path, byte_level_library):
    """A tokenizer.json in which "<|eot|>" is a mere word of the vocabulary and "<tool>" an ordinary added token."""
    document = json.loads(byte_level_library.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] != "<|eot|>"]
    write_json(tmp_path / "tokenizer.json", document)
    return tmp_path


def declare(folder, config=None, token_map=None, added=None):
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>"} | (config or {}),
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name, value in (("special_tokens_map", token_map), ("added_tokens", added)):
        if value is not None:
            write_json(folder / f"{name}.json", value)


def assert_equals_transformers(folder, text=TEXT):
    reference, tokenizer = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    token_ids = reference(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.encode(text, add_special_tokens=False) == token_ids
    assert decode(tokenizer, token_ids, at_start=True) == reference.decode(token_ids, skip_special_tokens=True)
    template = load_chat_template(folder, tokenizer)
    assert template.render(HELLO) == reference.apply_chat_template(HELLO, tokenize=False)
    return tokenizer


@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize("name", NAMES)
def test_a_named_token_is_special(name, file, folder):
    declare(folder, **{"config" if file == "tokenizer_config" else "token_map": {name: "<|eot|>"}})
    tokenizer = assert_equals_transformers(folder)
    token_id = tokenizer.token_id("<|eot|>")
    assert tokenizer.encode("<|eot|>", add_special_tokens=False) == [token_id]
    assert decode(tokenizer, [token_id], at_start=True) == ""


def test_a_named_token_keeps_its_behaviour(folder):
    declare(folder, {"mask_token": {"content": "<|eot|>", **TYPED}})
    tokenizer = assert_equals_transformers(folder, "a  <|eot|> a")
    assert tokenizer.encode("a  <|eot|>", add_special_tokens=False) == tokenizer.encode(
        "a<|eot|>", add_special_tokens=False
    )
    declare(folder, {}, {"mask_token": {"content": "<|eot|>", "lstrip": True}})
    assert_equals_transformers(folder, "a  <|eot|> a")


@pytest.mark.parametrize(
    "files",
    [
        {"config": {"extra_special_tokens": {"call_token": "<|eot|>", "image_token": "<|bos|>"}}},
        {"config": {"additional_special_tokens": {"call_token": "<|eot|>"}}},
        {"config": {"extra_special_tokens": ["<|eot|>"]}},
        {"config": {"additional_special_tokens": ["<|eot|>", "<tool>"]}},
        {"config": {"additional_special_tokens": ["<|eot|>"], "extra_special_tokens": ["<|eos|>"]}},
        {"config": {"additional_special_tokens": ["<|eos|>"]}, "token_map": {"additional_special_tokens": ["<|eot|>"]}},
        {"token_map": {"additional_special_tokens": ["<|eot|>"]}},
        {"token_map": {"extra_special_tokens": {"call_token": "<|eot|>"}}},
        {"config": {"pad_token": "<|eot|>"}, "token_map": {"pad_token": None}},
        {"config": {"added_tokens_decoder": {"500": {"content": "<new>", "special": True}}}},
        {"config": {"added_tokens_decoder": {"2": {"content": "<|eot|>", "special": False, "lstrip": True}}}},
        {"config": {"added_tokens_decoder": {"1": {"content": "<|eos|>", "special": False}}, "pad_token": "<|eos|>"}},
        {"config": {"added_tokens_decoder": {"1": {"content": "<|eos|>", "special": False}}}},
        {"config": {"pad_token": "<new>"}, "added": {"<new>": 500, "<tool>": 501}},
    ],
)  # fmt: skip
def test_each_way_to_declare_special_tokens(files, folder):
    declare(folder, **files)
    assert_equals_transformers(folder, TEXT + "<|eos|>")


@pytest.mark.parametrize(
    "files",
    [
        {"config": {"pad_token": "<New>"}},
        {"config": {"image_token": "<New>"}},
        {"config": {"pad_token": {"content": "<New>", **TYPED, "lstrip": False}}},
        {"token_map": {"pad_token": {"content": "<New>", "lstrip": False}}},
        {"config": {"additional_special_tokens": ["<New>"]}},
        {},
    ],
)
def test_which_tokens_of_added_tokens_json_are_looked_for_in_normalized_text(files, folder):
    document = json.loads((folder / "tokenizer.json").read_text())
    write_json(folder / "tokenizer.json", document | {"normalizer": {"type": "Lowercase"}})
    declare(folder, **files, added={"<New>": 500})
    reference, tokenizer = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in ("a<New>b<new>", "<NEW>"):
        token_ids = reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, add_special_tokens=False) == token_ids


def test_a_name_cannot_take_the_place_of_the_conversation(folder):
    declare(folder, {"extra_special_tokens": {"messages": "<|eot|>", "add_generation_prompt": "<|eot|>"}})
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ add_generation_prompt }}")
    assert load_chat_template(folder, load_tokenizer(folder)).render(HELLO) == "HelloTrue"


@pytest.mark.parametrize("name", NAMES)
def test_a_named_piece_of_a_tokenizer_model_is_special(name, spm_model, folder_of):
    folder = folder_of(
        tokenizer__model=spm_model,
        tokenizer_config__json={"tokenizer_class": "LlamaTokenizer", "legacy": False, name: "<unk>"},
        config__json={"model_type": "llama"},
    )
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = "hello<unk>the <unk> end"
    token_ids = reference.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=False) == token_ids
    assert decode(tokenizer, token_ids, at_start=True) == reference.decode(token_ids, skip_special_tokens=True)
    ordinary = tokenizer.encode("<unk>", add_special_tokens=False, parse_special_tokens=False)
    assert 0 not in ordinary


def test_the_unknown_token_in_ordinary_text_is_text(no_fallback_folder, folder_of):
    model = (no_fallback_folder / "tokenizer.model").read_bytes()
    folder = folder_of(tokenizer__model=model, tokenizer_config__json={"unk_token": "<unk>"})
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in ("hello <unk> the", "<unk>hello"):
        token_ids = load_tokenizer(folder).encode(text, add_special_tokens=False, parse_special_tokens=False)
        assert token_ids == library.encode(text)


def test_a_token_that_swallows_spaces_is_found_quickly_in_a_million_of_them(spm_model, folder_of):
    config = {"mask_token": {"content": "<unk>", "lstrip": True}}
    tokenizer = load_tokenizer(folder_of(tokenizer__model=spm_model, tokenizer_config__json=config))
    assert tokenizer._every_added_token.search(" " * 10**6) is None
    assert tokenizer.encode("the  <unk>", add_special_tokens=False) == tokenizer.encode(
        "the<unk>", add_special_tokens=False
    )


def test_an_extra_token_that_the_settings_call_ordinary_remains_so(folder_of):
    config = {"additional_special_tokens": ["<a>", "<b>"], "pad_token": "<c>"}
    config["added_tokens_decoder"] = {str(i): {"content": f"<{c}>", "special": False} for i, c in enumerate("abc")}
    assert set(read_settings(folder_of(tokenizer_config__json=config)).special_tokens) == {"<c>"}
