"""Damaged tokenizer folders: seeded mutations of good files, as JSON values, as protobuf fields and as bytes."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

DEEP = "[" * 300 + "]" * 300
ODD_TEXTS = ["", " ", "\ud800", "\x00", "▁", "<s>", "<unk>", "Ġ", "a" * 3000, "{{ messages }}", "BPE", "Replace", "é"]
ODD_PATTERNS = ["(a|aa)+$", "(", "[[:x:]]", "", "(?<=a+)b", r"\p{Nope}", "(?=)", ".*", r"(\w+\s*)+:"]
ODD_NUMBERS = [-1, 0, 1, 7, 2**31, 2**32 - 1, 2**32, 2**63, 2**64, 10**40, 0.5, -1e308, 1e400, float("nan")]
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False},
    "pad_token": "<pad>",
    "image_token": "<image>",
    "add_bos_token": True,
    "add_eos_token": False,
    "legacy": False,
    "extra_special_tokens": {"call_token": "<call>", "end": "</s>"},
    "chat_template": [{"name": "default", "template": "{% for m in messages %}{{ m.content }}{% endfor %}"}],
    "added_tokens_decoder": {"3": {"content": "<pad>", "special": True, "lstrip": True, "rstrip": True}},
}
TOKEN_MAP = {
    "bos_token": "<s>",
    "mask_token": {"content": "<mask>", "lstrip": True},
    "additional_special_tokens": ["a"],
}
ADDED = {"<call>": 300, "<image>": 301}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[{{ m.content | trim }}]{% else %}"
    "{{ m.content + eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)

Files = dict[str, bytes]


def small_tokenizers(corpus: list[str]) -> dict[str, dict[str, Any]]:
    """One tokenizer.json of each kind, small, so that a mutation often hits something that matters."""
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    made = {}

    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    )
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made["byte_level"] = library

    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlorw", "he", "ll"]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    bpe = models.BPE(vocab, [("h", "e"), ("l", "l")], byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    library = tokenizers.Tokenizer(bpe)
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    made["byte_fallback"] = library

    library = tokenizers.Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False)
    library.train_from_iterator(corpus, trainer)
    made["unigram"] = library

    library = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = decoders.WordPiece()
    library.train_from_iterator(corpus, trainers.WordPieceTrainer(vocab_size=80, special_tokens=special))
    made["word_piece"] = library

    made["split"] = copy.deepcopy(made["byte_level"])
    made["split"].pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    for library in made.values():
        library.add_special_tokens(special)
        library.add_tokens(
            [tokenizers.AddedToken("<mask>", lstrip=True), tokenizers.AddedToken("<x>", single_word=True)]
        )
    return {name: json.loads(library.to_str()) for name, library in made.items()}


def damaged_folders(documents: dict[str, dict[str, Any]], spm_model: bytes, seed: int) -> Iterator[Files]:
    """Endless folders, each a valid one with one to three mutations in one of its files."""
    rng = random.Random(seed)
    jsons = {"tokenizer_config.json": CONFIG, "special_tokens_map.json": TOKEN_MAP, "added_tokens.json": ADDED}
    while True:
        files: Files = {"chat_template.jinja": TEMPLATE.encode()} if rng.random() < 0.5 else {}
        files |= {name: json.dumps(value).encode() for name, value in jsons.items() if rng.random() < 0.5}
        is_spm = rng.random() < 0.4
        weights = [1 if name == "split" else 4 for name in documents]  # that kind takes a process
        document = {} if is_spm else documents[rng.choices(list(documents), weights)[0]]
        main = "tokenizer.model" if is_spm else "tokenizer.json"
        files[main] = spm_model if is_spm else json.dumps(document).encode()
        target = main if rng.random() < 0.6 else rng.choice(list(files))
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            files[target] = _mutated(files[target], target, rng)
        yield files


def _mutated(content: bytes, name: str, rng: random.Random) -> bytes:
    if rng.random() < 0.08:
        return _mutated_bytes(content, rng)
    if name == "tokenizer.model":
        return _mutated_model(content, rng)
    if name == "chat_template.jinja":
        return _mutated_bytes(content, rng)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return _mutated_bytes(content, rng)
    _mutate_value(value, rng)
    text = json.dumps(value)
    return (text.replace('"DEEP"', DEEP) if rng.random() < 0.98 else text.encode("utf-16").decode("latin-1")).encode()


def _mutate_value(value: Any, rng: random.Random) -> None:
    """Changes one thing in a JSON value, as often near its root as deep inside."""
    parent: Any = value
    while isinstance(parent, dict | list) and parent:
        key = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
        child = parent[key]
        # Large parts hold one kind of thing; the rest matters more.
        if isinstance(child, dict | list) and child and rng.random() < 0.75:
            parent = child
            continue
        _mutate_item(parent, key, rng)
        return


def _mutate_item(parent: Any, key: Any, rng: random.Random) -> None:
    action = rng.randrange(6)
    if action == 0:
        del parent[key]
    elif action == 1 and isinstance(parent, dict):
        parent[rng.choice([*ODD_TEXTS, *map(str, ODD_NUMBERS)])] = parent.pop(key)
    elif action == 2:
        other = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
        parent[key], parent[other] = copy.deepcopy(parent[other]), parent[key]
    elif action == 3 and isinstance(parent[key], int):
        parent[key] = rng.choice(ODD_NUMBERS)
    elif action == 4 and isinstance(parent[key], str):
        parent[key] = rng.choice(ODD_PATTERNS if key == "Regex" else ODD_TEXTS)
    else:
        parent[key] = rng.choice([None, True, [], {}, [1], {"a": 1}, "DEEP", *ODD_TEXTS, *ODD_NUMBERS])


def _mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 3, 20])):
        if not data:
            break
        position = rng.randrange(len(data))
        actions: list[Callable[[], Any]] = [
            lambda position=position: data.__setitem__(position, rng.randrange(256)),
            lambda position=position: data.__delitem__(slice(position, position + rng.randrange(1, 40))),
            lambda position=position: data.__setitem__(slice(position, position), rng.randbytes(rng.randrange(1, 9))),
            lambda position=position: data.__setitem__(slice(position, position), data[position : position + 60]),
        ]
        rng.choice(actions)()
    return bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.15 else data)


def _mutated_model(content: bytes, rng: random.Random) -> bytes:
    """A SentencePiece model with a field changed: of a piece, of the trainer's settings, of the normalizer's."""
    fields = list(_fields(content))
    if not fields:
        return _mutated_bytes(content, rng)
    index = rng.randrange(len(fields)) if rng.random() < 0.6 else rng.choice([0, 1, 2, -1, -2])
    index %= len(fields)
    number, wire, payload = fields[index]
    action = rng.randrange(5)
    if action == 0:
        del fields[index]
    elif action == 1:
        fields.insert(rng.randrange(len(fields)), fields[index])
    elif action == 2:
        fields[index] = (number, wire, _mutated_bytes(bytes(payload), rng))
    else:
        inner = list(_fields(payload)) if wire == 2 else []
        if inner:
            at = rng.randrange(len(inner))
            inner[at] = (inner[at][0], inner[at][1], _odd_payload(inner[at][1], rng))
            fields[index] = (number, wire, b"".join(_field(*item) for item in inner))
        else:
            fields[index] = (number, wire, _odd_payload(wire, rng))
    return b"".join(_field(*item) for item in fields)


def _odd_payload(wire: int, rng: random.Random) -> bytes:
    if wire == 0:
        return _varint(rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 300, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
    if wire == 2:
        texts = [text.encode(errors="surrogatepass") for text in ODD_TEXTS]
        return rng.choice([b"\xff", b"\xe2\x96", b"<0x41>", b"<0xZZ>", rng.randbytes(rng.randrange(200)), *texts])
    return rng.randbytes(8 if wire == 1 else 4)


def _fields(content: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Number, wire type and payload of each field of a protobuf message, as far as it can be read."""
    position = 0
    while position < len(content):
        tag, position = _read_varint(content, position)
        start = position
        if tag & 7 == 0:
            _, position = _read_varint(content, position)
        elif tag & 7 == 2:
            length, start = _read_varint(content, position)
            position = start + length
        else:
            position += 8 if tag & 7 == 1 else 4
        if tag & 7 not in (0, 1, 2, 5) or position > len(content):
            return
        yield tag >> 3, tag & 7, content[start:position]


def _field(number: int, wire: int, payload: bytes) -> bytes:
    return _varint(number << 3 | wire) + (_varint(len(payload)) if wire == 2 else b"") + payload


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _read_varint(content: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(content):
        value |= (content[position] & 127) << shift
        position += 1
        if content[position - 1] < 128:
            break
        shift += 7
    return value, position
