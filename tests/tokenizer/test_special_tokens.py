"""Tokens that only a tokenizer's other files name, against transformers: special, hidden, variables of templates."""

import json

import pytest
import sentencepiece
from conftest import write_json
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from llmcli.tokenizer.base import decode, read_settings
from llmcli.tokenizer.chat_encoding import load_chat_template
from llmcli.tokenizer.load import load_tokenizer

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


# Beginning-of-sequence tokens: never doubled, never lost, otherwise as transformers adds them.


ABSENT = "absent"
CLASSES = ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", ABSENT]
FLAGS = [True, False, None, ABSENT]
BOS, BOS_EOS = "<|bos|> $A", "<|bos|> $A <|eos|>"


def config_of(tokens, **values):
    return tokens | {name: value for name, value in values.items() if value is not ABSENT}


def post_processed(library, single):
    """The JSON of a tokenizer whose post-processor gives this for a text; None for no post-processor."""
    tokenizer = Tokenizer.from_str(library.to_str())
    tokens = [(token, tokenizer.token_to_id(token)) for token in ("<|bos|>", "<|eos|>") if token in (single or "")]
    if single:
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    document = json.loads(tokenizer.to_str())
    return document if single else document | {"post_processor": None}


# All but (None, True), the one intended difference: see test_declared_bos_is_not_lost.
@pytest.mark.parametrize(
    ("single", "add_bos_token"),
    [(single, flag) for single in (BOS, BOS_EOS, None) for flag in FLAGS if single or flag is not True],
)
@pytest.mark.parametrize("tokenizer_class", CLASSES)
def test_byte_level_json_equals_transformers(single, add_bos_token, tokenizer_class, byte_level_library, folder_of):
    tokens = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    folder = folder_of(
        tokenizer__json=post_processed(byte_level_library, single),
        tokenizer_config__json=config_of(tokens, add_bos_token=add_bos_token, tokenizer_class=tokenizer_class),
        config__json={"model_type": "llama"},
    )
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("hello", ""):
        assert tokenizer.encode(text) == reference.encode(text)
        plain_ids = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == plain_ids


@pytest.mark.parametrize("add_bos_token", FLAGS)
@pytest.mark.parametrize("tokenizer_class", CLASSES)
def test_llama2_json_equals_transformers(tokenizer_class, add_bos_token, byte_fallback_library, folder_of):
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = folder_of(
        tokenizer__json=json.loads(byte_fallback_library.to_str()),
        tokenizer_config__json=config_of(tokens, add_bos_token=add_bos_token, tokenizer_class=tokenizer_class),
        config__json={"model_type": "llama"},
    )
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("hello world") == reference.encode("hello world")
    assert tokenizer.encode("hello world")[:2] == [1, tokenizer.token_id("▁hello")]


@pytest.mark.parametrize("add_eos_token", [True, False, ABSENT])
@pytest.mark.parametrize("add_bos_token", [True, False])
@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_tokenizer_model_equals_transformers(tokenizer_class, add_bos_token, add_eos_token, spm_model, folder_of):
    values = {"add_bos_token": add_bos_token, "add_eos_token": add_eos_token, "tokenizer_class": tokenizer_class}
    folder = folder_of(
        tokenizer__model=spm_model,
        tokenizer_config__json=config_of({}, **values),
        config__json={"model_type": "llama"},
    )
    reference = AutoTokenizer.from_pretrained(folder)
    ids, reference_ids = load_tokenizer(folder).encode("hello"), reference.encode("hello")
    # Only the ends: a PreTrainedTokenizerFast made from a tokenizer.model loses the space before the text.
    assert (ids[0] == 1, ids[-1] == 2) == (reference_ids[0] == 1, reference_ids[-1] == 2)
    if tokenizer_class == "LlamaTokenizer":
        assert ids == reference_ids


@pytest.mark.parametrize("files", [{}, {"tokenizer_config__json": {"add_bos_token": None}}])
def test_tokenizer_model_that_says_nothing_adds_bos_once(files, spm_model, folder_of):
    """As in transformers 4 and llama.cpp; transformers 5 loses it here."""
    tokenizer = load_tokenizer(folder_of(tokenizer__model=spm_model, **files))
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert 1 not in plain
    assert tokenizer.encode("hello") == [1, *plain]
    assert tokenizer.encode("<s>hello").count(1) == 1


def test_declared_bos_is_not_lost(byte_level_library, folder_of):
    folder = folder_of(
        tokenizer__json=post_processed(byte_level_library, None),
        tokenizer_config__json={"bos_token": {"content": "<|bos|>"}, "add_bos_token": True},
    )
    tokenizer = load_tokenizer(folder)
    hello = byte_level_library.encode("hello", add_special_tokens=False).ids
    assert tokenizer.encode("hello") == [0, *hello]
    assert tokenizer.encode("<|bos|>hello") == [0, *hello]
    assert tokenizer.encode("") == [0]
    assert tokenizer.encode("hello", add_special_tokens=False) == hello


@pytest.mark.parametrize("config", [{"bos_token": "<|bos|>"}, {"bos_token": "<|bos|>", "add_bos_token": True}, None])
def test_bos_is_not_doubled(config, byte_level_library, folder_of):
    document = post_processed(byte_level_library, BOS)
    files = {"tokenizer__json": document} | ({"tokenizer_config__json": config} if config else {})
    tokenizer = load_tokenizer(folder_of(**files))
    assert tokenizer.bos_token_id == 0
    hello = byte_level_library.encode("hello", add_special_tokens=False).ids
    assert tokenizer.encode("hello") == [0, *hello]
    assert tokenizer.encode("<|bos|>hello") == [0, *hello]
    assert tokenizer.encode("<|bos|>") == [0]
    # Only an added one is dropped.
    assert tokenizer.encode("<|bos|><|bos|>hello") == [0, 0, *hello]
    assert tokenizer.encode("<|bos|><|bos|>hello", add_special_tokens=False) == [0, 0, *hello]
    # As ordinary text it is no BOS, so one is added.
    assert tokenizer.encode("<|bos|>hello", parse_special_tokens=False).count(0) == 1


def test_bos_is_found_in_a_sequence_of_post_processors(byte_level_library, folder_of):
    tokenizer = load_tokenizer(folder_of(tokenizer__json=json.loads(byte_level_library.to_str())))
    assert tokenizer.bos_token_id == 0
    assert tokenizer.encode("<|bos|>hello") == byte_level_library.encode("hello").ids


@pytest.mark.parametrize("bos_token", [None, ""])
def test_no_bos_token_means_no_bos(bos_token, byte_level_library, folder_of):
    document = post_processed(byte_level_library, None)
    config = {"bos_token": bos_token, "add_bos_token": True}
    tokenizer = load_tokenizer(folder_of(tokenizer__json=document, tokenizer_config__json=config))
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("hello") == byte_level_library.encode("hello", add_special_tokens=False).ids


@pytest.mark.parametrize("bos_token", [None, ""])
def test_the_model_names_its_own_bos(bos_token, spm_model, folder_of):
    config = {"bos_token": bos_token, "add_bos_token": True}
    tokenizer = load_tokenizer(folder_of(tokenizer__model=spm_model, tokenizer_config__json=config))
    assert tokenizer.encode("hello") == [1, *tokenizer.encode("hello", add_special_tokens=False)]
    assert tokenizer.bos_token_id == 1


def test_golden_ids_llama3(load):
    tokenizer = load("llama3")
    assert tokenizer.encode("Hello world") == [128000, 9906, 1917]
    assert tokenizer.encode("<|begin_of_text|>Hello world") == [128000, 9906, 1917]
    assert tokenizer.encode("Hello world<|eot_id|>") == [128000, 9906, 1917, 128009]
    assert tokenizer.encode("Hello world", add_special_tokens=False) == [9906, 1917]


def test_golden_ids_llama2(load):
    tokenizer = load("llama2")
    assert tokenizer.encode("Hello world") == [1, 15043, 3186]
    assert tokenizer.encode("<s>Hello world") == [1, 10994, 3186]
    assert tokenizer.encode("Hello world", add_special_tokens=False) == [15043, 3186]
    assert tokenizer.encode("") == [1]


def test_golden_ids_qwen2(load):
    tokenizer = load("qwen2")
    assert tokenizer.encode("Hello world") == [9707, 1879]
    assert tokenizer.encode("<|im_start|>Hello world") == [151644, 9707, 1879]


@pytest.mark.parametrize("bos_token", ["<|eos|>", {"__type": "AddedToken", "content": "<|eos|>"}, None, ABSENT])
@pytest.mark.parametrize("add_bos_token", FLAGS)
@pytest.mark.parametrize("tokenizer_class", CLASSES)
def test_what_the_post_processor_puts_first_is_the_bos(
    tokenizer_class, add_bos_token, bos_token, byte_level_library, folder_of
):
    """For any names in the small files, as in fine-tunes with resized vocabularies."""
    values = {"add_bos_token": add_bos_token, "tokenizer_class": tokenizer_class, "bos_token": bos_token}
    folder = folder_of(
        tokenizer__json=post_processed(byte_level_library, BOS),
        tokenizer_config__json=config_of({"eos_token": "<|eos|>"}, **values),
        config__json={"model_type": "llama"},
    )
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("hello") == reference.encode("hello")
    assert tokenizer.encode("<|bos|>hello") == reference.encode("hello")  # not doubled
    assert tokenizer.bos_token_id == 0


def test_golden_ids_of_a_llama3_whose_small_files_name_another_bos(llama3_folder, tmp_path):
    document = json.loads((llama3_folder / "tokenizer.json").read_text())
    bos = {"id": "<|begin_of_text|>", "ids": [128000], "tokens": ["<|begin_of_text|>"]}
    single = [{"SpecialToken": {"id": bos["id"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    processor = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {bos["id"]: bos}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document | {"post_processor": processor}))
    config = {"bos_token": "<|start_header_id|>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).encode("Hello world") == [128000, 9906, 1917]
