"""Tokenizers to test with: small ones made on the spot, and the real ones if the shared folder is present."""

import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmcli.tokenizer.load import load_tokenizer

SHARED = Path(__file__).resolve().parents[2].parent / "shared"

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello again!",
    "def main():\n    return 1\n",
    "Привет, мир! Καλημέρα κόσμε. 你好，世界。 こんにちは世界",
    "Once upon a time there was a little girl named Lily. She liked to play in the park.",
] * 4


@pytest.fixture(scope="session")
def texts():
    return [
        "",
        " ",
        "   ",
        "hello",
        " leading",
        "trailing ",
        "  two  spaces  everywhere  ",
        "\n",
        "\n\n\n  \t\t mixed \r\n\r\n runs\u00a0\u3000",
        "The quick brown fox's 1234567890 dogs' DON'T.",
        "Съешь ещё этих мягких французских булок",
        "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
        "نص حكيم له سر قاطع",
        "דג סקרן שט בים מאוכזב",
        "ऋषियों को सताने वाले",
        "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
        "我能吞下玻璃而不伤身体。",
        "いろはにほへと カタカナ 漢字",
        "키스의 고유조건은 입술끼리",
        "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 ❤️ 🇩🇪",
        "e\u0301 a\u0308 n\u0303 Z\u0351\u036b\u0343",
        "def f(x):\n\treturn {'a': [x**2 for _ in range(10)]}  # ok\n\n\n",
        "<0x0A> ▁ Ġ <unk> [INST] \ufffd \u200b \ufeff",
        "\x00\x01\x7f",
    ]


def write_json(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


def shared_folder(tmp_path_factory, relative, file, config):
    source = SHARED / relative / file
    if not source.is_file():
        pytest.skip(f"{relative}/{file} is not in ../shared")
    folder = tmp_path_factory.mktemp(source.parent.name)
    (folder / file).symlink_to(source)
    write_json(folder / "tokenizer_config.json", config)
    return folder


@pytest.fixture(scope="session")
def llama3_folder(tmp_path_factory):
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "add_bos_token": True}
    return shared_folder(tmp_path_factory, "tokenizers/llama3", "tokenizer.json", config)


@pytest.fixture(scope="session")
def qwen2_folder(tmp_path_factory):
    config = {"bos_token": None, "eos_token": {"content": "<|im_end|>"}, "add_bos_token": False}
    return shared_folder(tmp_path_factory, "tokenizers/qwen2", "tokenizer.json", config)


@pytest.fixture(scope="session")
def llama2_folder(tmp_path_factory):
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    return shared_folder(tmp_path_factory, "tokenizers/llama2", "tokenizer.model", config)


@pytest.fixture(scope="session")
def stories_folder(tmp_path_factory):
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": False}
    return shared_folder(tmp_path_factory, "models/stories260K", "tokenizer.model", config)


@pytest.fixture(scope="session")
def byte_level_library():
    """A byte-level BPE with specials, an added word, and added tokens outside the byte alphabet."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|eos|>", "<|eot|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>", "a b", "日本"])
    bos = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    return tokenizer


def saved(folder, library, **config):
    """The folder, with a library's tokenizer.json and, if it is not empty, a tokenizer_config.json."""
    library.save(str(folder / "tokenizer.json"))
    if config:
        write_json(folder / "tokenizer_config.json", config)
    return folder


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory, byte_level_library):
    return saved(tmp_path_factory.mktemp("byte_level"), byte_level_library, bos_token="<|bos|>", eos_token="<|eos|>")


@pytest.fixture(scope="session")
def byte_fallback_library():
    """A BPE of the form of Llama 2's tokenizer.json: ▁ for spaces and a token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlorwé世"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "▁"), ("▁", "w"), ("o", "r")]
    pieces += ["".join(merge) for merge in merges]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>", "<|im_end|>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture(scope="session")
def byte_fallback_folder(tmp_path_factory, byte_fallback_library):
    return saved(tmp_path_factory.mktemp("byte_fallback"), byte_fallback_library, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def metaspace_library():
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def metaspace_folder(tmp_path_factory, metaspace_library):
    return saved(tmp_path_factory.mktemp("metaspace"), metaspace_library)


def train_sentencepiece(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


@pytest.fixture(scope="session")
def spm_model():
    """A tiny SentencePiece model of Llama's kind, with one piece that it finds in any text ("user defined")."""
    return train_sentencepiece(vocab_size=400, byte_fallback=True, user_defined_symbols=["<turn>"])


@pytest.fixture(scope="session")
def spm_folder(tmp_path_factory, spm_model):
    folder = tmp_path_factory.mktemp("spm")
    (folder / "tokenizer.model").write_bytes(spm_model)
    return folder


@pytest.fixture(scope="session")
def no_fallback_folder(tmp_path_factory):
    """A SentencePiece model without byte pieces: unknown text becomes the unknown token."""
    folder = tmp_path_factory.mktemp("no_fallback")
    (folder / "tokenizer.model").write_bytes(train_sentencepiece(vocab_size=150))
    return folder


@pytest.fixture(scope="session")
def load(request):
    """Loads the folder of the fixture `<name>_folder`, once for all tests."""
    loaded = {}

    def load_once(name):
        if name not in loaded:
            loaded[name] = load_tokenizer(request.getfixturevalue(f"{name}_folder"))
        return loaded[name]

    return load_once


@pytest.fixture(scope="session")
def library(request):
    """The `tokenizers` library's own view of `<name>_folder`, once for all tests."""
    loaded = {}

    def load_once(name):
        if name not in loaded:
            folder = request.getfixturevalue(f"{name}_folder")
            loaded[name] = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        return loaded[name]

    return load_once


@pytest.fixture
def folder_of(tmp_path):
    """Writes files into an empty folder: bytes as they are, anything else as JSON."""

    def write(**files):
        for name, content in files.items():
            path = tmp_path / name.replace("__", ".")
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                write_json(path, content)
        return tmp_path

    return write
