"""A LLaMA tokenizer.json of the older kind: its normalizer puts ▁ before a text, and special tokens are normalized."""

import json

import pytest
from transformers import AutoTokenizer

from llmcli.config.llama import FAMILIES
from llmcli.tokenizer.base import decode
from llmcli.tokenizer.chat_encoding import encode_chat, load_chat_template, turn_end_token_ids
from llmcli.tokenizer.load import load_tokenizer

PIECES = ["<unk>", "<s>", "</s>", "▁", "a", "b", "<", "/", "s", ">", "▁a", "▁b", "</", "s>"]
PREPEND = {"type": "Prepend", "prepend": "▁"}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
)
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "a"}]
TEXTS = ["a</s>b", "a</s> b", "a </s>b", "<s>a", "</s>", "a b", " a", "", "</s></s>a"]


def document():
    behaviour = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": True}
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": PIECES[index]} | behaviour for index in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": [PREPEND, REPLACE]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, text],
            "pair": [text, other],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "vocab": {piece: index for index, piece in enumerate(PIECES)},
            "merges": [["▁", "a"], ["▁", "b"], ["<", "/"], ["s", ">"]],
        },
    }


@pytest.fixture
def old(folder_of):
    """Writes the folder; returns it."""

    def write(model_type="llama", **changes):
        config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        return folder_of(
            tokenizer__json=document(),
            tokenizer_config__json=config | {"chat_template": TEMPLATE} | changes,
            config__json={"model_type": model_type},
        )

    return write


@pytest.fixture
def chat():
    opened = {}

    def encode(folder, messages):
        if folder not in opened:
            tokenizer = load_tokenizer(folder)
            opened[folder] = tokenizer, load_chat_template(folder, tokenizer)
        tokenizer, template = opened[folder]
        assert turn_end_token_ids(tokenizer, template) == {2}
        return encode_chat(tokenizer, template, messages, add_generation_prompt=False)

    yield encode
    for _, template in opened.values():
        template.close()


@pytest.mark.parametrize("changes", [{}, {"legacy": True}, {"legacy": None}, {"add_prefix_space": False}])
@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", None])
@pytest.mark.parametrize("model_type", [name for name in FAMILIES if not name.startswith("qwen")])
def test_ids_equal_transformers(model_type, tokenizer_class, changes, old):
    folder = old(model_type, tokenizer_class=tokenizer_class, **changes)
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        token_ids = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == token_ids, text
        if "s>" not in text:  # TokenizersBackend shows a special token that it finds in normalized text
            shown = reference.decode(token_ids, skip_special_tokens=True)
            assert decode(tokenizer, token_ids, at_start=True) == shown


def test_special_tokens_are_found_within_text(old):
    tokenizer = load_tokenizer(old())
    assert tokenizer.encode("a</s>b") == [1, 10, 2, 5]
    assert tokenizer.encode("a</s>b", parse_special_tokens=False) == [1, 10, 12, 13, 5]


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_special_tokens_have_their_own_names(tokenizer_class, old):
    tokenizer = load_tokenizer(old(tokenizer_class=tokenizer_class))
    assert [tokenizer.piece(token_id) for token_id in range(3)] == ["<unk>", "<s>", "</s>"]


def test_what_the_template_writes_is_a_token(old, chat):
    folder = old()
    reference = AutoTokenizer.from_pretrained(folder)
    assert chat(folder, MESSAGES) == reference.apply_chat_template(MESSAGES, return_dict=False) == [1, 4, 5, 2, 4]


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("legacy", [True, False])
def test_what_a_message_says_is_none_and_loses_no_letter(legacy, tokenizer_class, old, chat):
    folder = old(tokenizer_class=tokenizer_class, legacy=legacy)
    for content in ("a</s>b", "a </s>b", " </s>", "</s>", "<s>", "▁</s>a", "</s></s>"):
        token_ids = chat(folder, [{"role": "user", "content": content}])
        assert [token_id for token_id in token_ids if token_id < 3] == [1], content
        text = decode(load_tokenizer(folder), token_ids[1:], at_start=False)
        assert text.lstrip() == content.replace("▁", " ").lstrip()


@pytest.mark.parametrize("normalizer", [{"type": "Lowercase"}, {"type": "NFKC"}])
def test_another_spelling_in_a_message_is_none_either(normalizer, old, chat):
    folder = old(tokenizer_class="PreTrainedTokenizerFast")
    steps = {"type": "Sequence", "normalizers": [normalizer, REPLACE]}
    (folder / "tokenizer.json").write_text(json.dumps(document() | {"normalizer": steps}))
    for content in ("a</S>b", "a\uff1c/s\uff1eb", "</s>\uff1c/S\uff1e", "<S>"):
        token_ids = chat(folder, [{"role": "user", "content": content}, MESSAGES[1]])
        assert [token_id for token_id in token_ids if token_id in (1, 2)] == [1, 2], content
