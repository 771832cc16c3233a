"""A tokenizer.json as text for the `tokenizers` library, and whether the library may be trusted with it.

Owns the parts of the file before its model, which is left as text: reading a vocabulary takes the library itself half
a second, and Python as long again.

**Trust.** The library runs whatever regular expression the file names, and one such as `(a|aa)+$` never ends; a few
replacements of a character by ten make gigabytes of a word. So the steps that a text takes before the model are
compared with a list of those that are known to be quick: the expressions of well-known models by their exact text,
and steps without one that cannot lengthen a text much. A file with any other step is not refused. It is run by a child
process with bounds on time and memory, which costs another load of the file (see encoding_process.py); decoding is
this program's own and runs no expression.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from llmcli.errors import TokenizerError
from llmcli.reading import check_value, parse_json

MAX_STEPS = 32
LONGEST_PREFIX = 8
PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")
LLAMA_DECODERS = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
STRIP_ONE_LEFT = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
LLAMA_BPE = {
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": True,
    "byte_fallback": True,
    "ignore_merges": False,
}
UNUSED_PARTS = ("truncation", "padding")  # of use in training; here they would cut or lengthen a prompt

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
)
# Each has been run on long texts of one character and of two; none takes more than a few microseconds a character.
KNOWN_PATTERNS = frozenset(
    {
        _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _END,  # Llama 3, SmolLM3
        _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _END,  # Qwen 2, Qwen 3
        _TEKKEN_WORDS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # Mistral Nemo and later
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        r"\p{N}{1,3}",
        r"\p{N}",
        r"\d",
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
    }
)
# Without an expression of the file's, and at most a few times as long afterwards.
_SAFE_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents", "ByteLevel"}
_SAFE_SPLITTERS = {"Punctuation", "UnicodeScripts", "Whitespace", "WhitespaceSplit", "CharDelimiterSplit"}
_SAFE_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Metaspace", "BertPreTokenizer", *_SAFE_SPLITTERS}


@dataclass(frozen=True)
class TokenizerDocument:
    """The parts of a tokenizer.json. `head` holds JSON values, of which at least those of `PARTS`."""

    head: dict[str, Any]
    model: str

    def text(self) -> str:
        """A tokenizer.json of these parts. Of a key that comes twice the library takes the last, so `head` goes last,
        and nothing that may follow the model in the file matters."""
        return f'{{"model": {self.model}, {json.dumps(self.head)[1:]}'

    def for_looking_up(self) -> "TokenizerDocument":
        """The same without what is not known to be quick; it has the same tokens, and gives other ids to a text.

        The library passes added tokens through the normalizer, so a quick one stays.
        """
        normalizer = self.head["normalizer"] if self._has_quick_normalizer() else None
        return replace(self, head=self.head | {"normalizer": normalizer, "pre_tokenizer": None})

    def as_llama_tokenizer(self, *, is_legacy: bool, adds_prefix_space: bool, is_complete: bool) -> "TokenizerDocument":
        """What transformers' LlamaTokenizer makes of the file, whose normalizer, steps and decoder it replaces.

        With `is_complete` it takes the added tokens of tokenizer_config.json alone. A byte-level file stays as it is.

        Source: transformers 5.23, `LlamaTokenizer.__init__`, and `AutoTokenizer.from_pretrained` for byte-level files.
        """
        if '"ByteLevel"' in json.dumps(self.head) or re.search(r'"type"\s*:\s*"BPE"', self.model) is None:
            return self
        scheme = ("always" if is_legacy else "first") if adds_prefix_space else "never"
        metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
        decoders = [*LLAMA_DECODERS, STRIP_ONE_LEFT] if adds_prefix_space else LLAMA_DECODERS
        head = {
            "normalizer": None,
            "pre_tokenizer": metaspace,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "added_tokens": [] if is_complete else self.head["added_tokens"],
        }
        # Of a key that comes twice the library takes the last.
        return replace(self, head=self.head | head, model=f"{self.model.rstrip()[:-1]}, {json.dumps(LLAMA_BPE)[1:]}")

    def is_known_to_be_quick(self) -> bool:
        """Whether every step is one of the known ones; see the module docstring."""
        pre_tokenizers = list(_steps(self.head["pre_tokenizer"], "pretokenizers"))
        processors = list(_steps(self.head["post_processor"], "processors"))
        return (
            self._has_quick_normalizer()
            and len(pre_tokenizers) + len(processors) <= MAX_STEPS
            and all(map(_is_quick_pre_tokenizer, pre_tokenizers))
            and all(map(_is_quick_processor, processors))
        )

    def _has_quick_normalizer(self) -> bool:
        normalizers = list(_steps(self.head["normalizer"], "normalizers"))
        return len(normalizers) <= MAX_STEPS and all(map(_is_quick_normalizer, normalizers))


def read_document(text: str) -> TokenizerDocument:
    """The parts of a tokenizer.json.

    Raises: TokenizerError, without the name of the file, if it is not JSON, or nested or with digits beyond bounds.
    """
    try:
        document = _split_before_model(text) or _split_anywhere(text)
        check_value(document.head)
    except RecursionError as error:
        raise TokenizerError("nested too deeply") from error
    except ValueError as error:
        raise TokenizerError(str(error)) from error
    head = {name: None for name in PARTS} | document.head | {name: None for name in UNUSED_PARTS}
    return replace(document, head=head | {"added_tokens": head["added_tokens"] or []})


def _split_before_model(text: str) -> TokenizerDocument | None:
    """The parts, if they stand in the order in which the library writes them, the model last; else None."""
    decoder = json.JSONDecoder()
    gap = re.compile(r"[ \t\r\n]*([{:,])[ \t\r\n]*")
    head: dict[str, Any] = {}
    position = 0
    while (match := gap.match(text, position)) is not None and text[match.end() : match.end() + 1] == '"':
        key, position = decoder.raw_decode(text, match.end())
        match = gap.match(text, position)
        if match is None or match[1] != ":":
            return None
        if key == "model":
            end = text.rstrip(" \t\r\n")
            return TokenizerDocument(head, end[match.end() : -1]) if set(PARTS) <= head.keys() else None
        head[key], position = decoder.raw_decode(text, match.end())
    return None


def _split_anywhere(text: str) -> TokenizerDocument:
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"it holds a JSON {type(value).__name__}, expected an object")
    head = {key: part for key, part in value.items() if key != "model"}
    return TokenizerDocument(head, json.dumps(value.get("model")))


def _steps(component: Any, name: str) -> Iterator[Any]:
    """The steps of a component; those of a Sequence one by one."""
    if isinstance(component, dict) and component.get("type") == "Sequence" and isinstance(component.get(name), list):
        for step in component[name]:
            yield from _steps(step, name)
    elif component is not None:
        yield component


def _is_quick_normalizer(step: Any) -> bool:
    if not isinstance(step, dict):
        return False
    if step.get("type") == "Prepend":
        prefix = step.get("prepend")
        return isinstance(prefix, str) and len(prefix) <= LONGEST_PREFIX
    if step.get("type") == "Replace":
        pattern, content = step.get("pattern"), step.get("content")
        if not isinstance(pattern, dict) or pattern.keys() != {"String"}:
            return False
        string = pattern["String"]
        return isinstance(string, str) and isinstance(content, str) and len(content) <= len(string)
    return str(step.get("type")) in _SAFE_NORMALIZERS


def _is_quick_pre_tokenizer(step: Any) -> bool:
    if not isinstance(step, dict):
        return False
    if step.get("type") != "Split":
        return str(step.get("type")) in _SAFE_PRE_TOKENIZERS
    pattern = step.get("pattern")
    if not isinstance(pattern, dict) or len(pattern) != 1:
        return False
    return isinstance(pattern.get("String"), str) or str(pattern.get("Regex")) in KNOWN_PATTERNS


def _is_quick_processor(step: Any) -> bool:
    if not isinstance(step, dict):
        return False
    if step.get("type") == "TemplateProcessing":
        return isinstance(step.get("single"), list) and len(step["single"]) <= MAX_STEPS
    return step.get("type") == "ByteLevel"
