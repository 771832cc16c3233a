"""Damages files as bytes, as JSON values and as lines of text; each damage is a function of a random generator."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any


class Raw(str):
    """JSON text that `json.dumps` would not write, such as a number of 5,000 digits."""


_RAW = re.compile(r'"raw:(\d+)"')
RAW_TEXTS = [
    "1" + "0" * 400,
    "9" * 5_000,
    "-" + "9" * 120,
    "1e400",
    "1e-320",
    "-0.0",
    "NaN",
    "-Infinity",
    r'"\ud800"',
    r'"\u0000"',
    r'"\u001b]52;c;aGk=\u0007"',
    "[" * 70 + "]" * 70,
    "[" * 3_000 + "]" * 3_000,
    '{"a":' * 1_500 + "1" + "}" * 1_500,
]
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, 10**30, 10**90, -(2**63),
    0.0, 0.5, -1.5, 1e-8, 1e-45, 1e30, 1e39, 1e300, 5e-324,
    "", " ", "a", "0", "true", "ä", "😀", "\n", "x" * 5_000, "../../etc/passwd", "/dev/zero", "re:.*", "re:(a|a)*$",
    "re:(",
    "default", "linear", "llama3", "yarn", "LlamaForCausalLM", "model.safetensors", "<0x00>", "▁",
    [], [[]], {}, [None], [1, "a", None], [0] * 100, {"": ""}, {"a": {"b": {"c": []}}}, [True], [-1], [1.5],
]  # fmt: skip


ODD_PIECES = ["", " ", "\ud800", "\x00", "▁", "<s>", "<unk>", "a" * 3000, "é"]


def damage_bytes(random: Random, content: bytes) -> bytes:
    """Flip, cut, insert, repeat or move bytes, up to four times."""
    data = bytearray(content)
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(data) + 1)
        length = random.choice([1, 1, 2, 8, 64, 1024])
        match random.randrange(6):
            case 0 if data:
                data[place % len(data)] = random.choice(
                    [0, 1, 0x7F, 0x80, 0xFF, ord('"'), ord("{"), random.randrange(256)]
                )
            case 1:
                del data[place:]
            case 2:
                del data[place : place + length]
            case 3:
                data[place:place] = bytes(random.randrange(256) for _ in range(min(length, 64)))
            case 4:
                data[place:place] = data[place : place + length] * random.choice([1, 2, 50])
            case _:
                data[place:place] = random.choice(
                    [b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"[" * 2_000, b"9" * 5_000]
                )
    return bytes(data)


def damage_value(random: Random, value: Any, extra: list[Any]) -> Any:
    """A copy of a JSON value with one to three changes: other values, missing, additional or swapped ones."""
    value = copy.deepcopy(value)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        places = list(_places(value))
        if not places:
            return _pick(random, extra)
        parent, key = random.choice(places)
        match random.randrange(8):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[random.choice(["", "a", "\x1b", "x" * 500, str(key) + "_", "re:.*"])] = parent[key]
            case 2:
                parent[key] = [parent[key]]
            case 3:
                parent[key] = {"a": parent[key]}
            case 4 if isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
                parent[key] = parent[key] * random.choice([-1, 2, 0.5, 1e6, 1e-6, 10**40]) + random.choice([0, 1, -1])
            case 5:
                other, other_key = random.choice(places)
                parent[key] = copy.deepcopy(other.get(other_key) if isinstance(other, dict) else VALUES[5])
            case _:
                parent[key] = _pick(random, extra)
    return value


def as_json(value: Any) -> bytes:
    """JSON text, with `Raw` values as they are."""
    texts: list[str] = []

    def replace(item: Any) -> Any:
        if isinstance(item, Raw):
            texts.append(item)
            return f"raw:{len(texts) - 1}"
        if isinstance(item, dict):
            return {key: replace(below) for key, below in item.items()}
        return [replace(below) for below in item] if isinstance(item, list) else item

    text = json.dumps(replace(value), ensure_ascii=False)
    return _RAW.sub(lambda match: texts[int(match[1])], text).encode(errors="surrogatepass")


def damage_json(random: Random, content: bytes, extra: list[Any]) -> bytes:
    """JSON text that is damaged as a value or, less often, as bytes."""
    if random.random() < 0.2:
        return damage_bytes(random, content)
    return as_json(damage_value(random, json.loads(content), extra))


def damage_model(random: Random, content: bytes) -> bytes:
    """A SentencePiece model with a field changed: of a piece, of the trainer's settings, of the normalizer's."""
    if random.random() < 0.2:
        return damage_bytes(random, content)
    fields = list(_fields(content))
    if not fields:
        return damage_bytes(random, content)
    index = random.randrange(len(fields)) if random.random() < 0.6 else random.choice([0, 1, 2, -1, -2])
    index %= len(fields)
    number, wire, payload = fields[index]
    action = random.randrange(5)
    if action == 0:
        del fields[index]
    elif action == 1:
        fields.insert(random.randrange(len(fields)), fields[index])
    elif action == 2:
        fields[index] = (number, wire, damage_bytes(random, bytes(payload)))
    else:
        inner = list(_fields(payload)) if wire == 2 else []
        if inner:
            at = random.randrange(len(inner))
            inner[at] = (inner[at][0], inner[at][1], _odd_payload(random, inner[at][1]))
            fields[index] = (number, wire, b"".join(_field(*item) for item in inner))
        else:
            fields[index] = (number, wire, _odd_payload(random, wire))
    return b"".join(_field(*item) for item in fields)


def _odd_payload(random: Random, wire: int) -> bytes:
    if wire == 0:
        return _varint(random.choice([0, 1, 2, 3, 4, 5, 6, 7, 300, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
    if wire == 2:
        texts = [text.encode(errors="surrogatepass") for text in ODD_PIECES]
        return random.choice(
            [b"\xff", b"\xe2\x96", b"<0x41>", b"<0xZZ>", random.randbytes(random.randrange(200)), *texts]
        )
    return random.randbytes(8 if wire == 1 else 4)


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


def damage_lines(pieces: list[str]) -> Callable[[Random, bytes], bytes]:
    """Damage of a text: inserted pieces of its language, removed or repeated lines, or damaged bytes."""

    def damage(random: Random, content: bytes) -> bytes:
        if random.random() < 0.3:
            return damage_bytes(random, content)
        text = content.decode()
        for _ in range(random.randint(1, 3)):
            place = random.randrange(len(text) + 1)
            text = text[:place] + random.choice(pieces) + text[place + random.choice([0, 0, 3, 20]) :]
        return text.encode(errors="surrogatepass")

    return damage


def _pick(random: Random, extra: list[Any]) -> Any:
    if random.random() < 0.25:
        return Raw(random.choice(RAW_TEXTS))
    return copy.deepcopy(random.choice(extra if extra and random.random() < 0.3 else VALUES))


def _places(value: Any, depth: int = 0) -> Any:
    """Every (container, key) of a JSON value; only the first entries of long lists."""
    if isinstance(value, dict):
        items: Any = list(value.items())[:400]
    elif isinstance(value, list):
        items = list(enumerate(value[:20]))
    else:
        return
    for key, below in items:
        yield value, key
        if depth < 6:
            yield from _places(below, depth + 1)
