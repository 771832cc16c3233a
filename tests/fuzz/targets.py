"""The kinds of file that the fuzzer damages: the damage, and the commands or functions that read it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fuzz.mutations import RAW_TEXTS, damage_bytes, damage_json, damage_lines, damage_model

TEXT = "Once <|end|> upon\n\n  a ä😀 time " + "a" * 40
JINJA = [
    "{{", "}}", "{%", "%}", "{% for a in messages %}", "{% endfor %}", "{{ messages }}", "{{ 10**400 }}",
    "{{ 'a' * 10**9 }}",
    "{{ messages[0] }}", "{{ range(10**9) | list }}", "{{ self }}", "{{ ''.__class__ }}", "{% set a = namespace() %}",
    "{{ raise_exception('x') }}", "{{ bos_token }}", "\x1b", "\0", "{# ", "{{ strftime_now('%Y') }}", "{{ 1 / 0 }}",
    "\ud800",
]  # fmt: skip
TOML = [
    "[sampling]", "[[sampling]]", "top_p = ", "temperature = 1", "= 5", "'''", '"', "\n", "nan", "-inf", "1e400",
    "9" * 5_000,
    "9" * 401, "[" * 900, "true", "1979-05-27", "{a = 1}", "a.b.c = 1", "\0", "\ud800", "description = 1",
    "0x" + "f" * 200,
]  # fmt: skip
CONFIG_VALUES: list[Any] = [
    ["full_attention", "sliding_attention"], {"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, {"rope_type": None},
    "gelu",
    "qwen2", "qwen3", "mistral", "smollm3", ["Qwen2ForCausalLM"], "silu", 10_001, 1e-6, "pack-quantized",
    "compressed-tensors",
    {"targets": ["re:.*"], "weights": {"num_bits": 4}}, {"full_attention": {"rope_theta": 1.0}},
]  # fmt: skip
TOKENIZER_VALUES: list[Any] = [
    {"type": "ByteLevel"}, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"},
    {"type": "ByteFallback"},
    {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}, {"type": "Fuse"},
    {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": ""}, {"type": "NFKC"}, {"type": "Strip",
    "strip_left": True},
    {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}, {"type": "WordPiece"}, "<|end|>",
    {"content": "a", "special": True, "lstrip": True}, {"id": 5, "content": "ab"}, "BPE", "Unigram", {"String": "a"},
]  # fmt: skip
CONVERSATION_VALUES: list[Any] = [
    "eos",
    "stop",
    "length",
    [],
    {"user": "a", "answer": None},
    2**32,
    "llmcli conversation",
]

RECEIPT_VALUES: list[Any] = ["-inf", "cpu", "cuda:0", "auto", "plain", "eos", "llmcli receipt", [5, "-inf"], [[5], 1.0]]

Damage = Callable[[Random, bytes], bytes]


@dataclass(frozen=True)
class Target:
    """A kind of file: `file` inside the base folder `folder` is damaged, then each of `commands` is run.

    In a command "MODEL" stands for the folder and "FILE" for the damaged file. `share` of all cases are of this kind.
    """

    name: str
    share: int
    folder: str
    file: str
    damage: Damage
    commands: Sequence[Sequence[str]] = ()
    door: Callable[[Path, Path], object] | None = None


def damage_header(random: Random, content: bytes) -> bytes:
    """Damage the JSON header of a safetensors file, mostly with a length that fits it, or the file as bytes."""
    if random.random() < 0.2:
        return damage_bytes(random, content)
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    header = damage_json(random, header.strip(), ["BF16", "F32", "I4", "U8", [0, 2**63], [-1, 4], "__metadata__"])
    told = len(header) if random.random() < 0.9 else random.choice([0, 1, len(header) - 1, 2**31, 2**63, 2**64 - 1])
    return told.to_bytes(8, "little") + header + data


def _json(values: list[Any]) -> Damage:
    return lambda random, content: damage_json(random, content, values)


def _render(folder: Path, file: Path) -> None:
    """Render a conversation and encode it, as `generate --chat` does."""
    from llmcli.cli.session import open_session

    session = open_session(str(folder))
    session.encode_message("Hello <|end|>", "Be kind.", None)


def _load_conversation(folder: Path, file: Path) -> None:
    """Load a conversation and use all of it."""
    from llmcli.engine.conversation import load_conversation

    saved = load_conversation(file)
    saved.conversation.messages()
    repr(saved).encode()


def _read_receipt(folder: Path, file: Path) -> None:
    """Load a receipt and do everything before the weights of its model are read."""
    from llmcli.cli.replay import ReplayOptions, _encoded_again, _prepare
    from llmcli.receipt.describe import look_at_files
    from llmcli.receipt.receipt import compare_receipts, compare_samples, load_receipt

    receipt = load_receipt(file).receipt
    run, request = _prepare(receipt, ReplayOptions(file, model=str(folder.parent / "model"), device="cpu"))
    look_at_files(run.session.model, receipt.prompt)
    _encoded_again(run.session, receipt.prompt)
    repr([*map(str, compare_receipts(receipt, receipt)), compare_samples(receipt.samples, receipt.samples)]).encode()
    assert request.prompt_token_ids


def _resolve_preset(folder: Path, file: Path) -> None:
    """Load a preset and take its values."""
    from llmcli.config.presets import load_preset
    from llmcli.sampling.params import resolve

    resolve({}, load_preset(str(file)).sampling, "x", {})


INFO = ("info", "MODEL", "--json")
TOKENIZE = ("tokenize", TEXT, "--model", "MODEL", "--json")

TARGETS = (
    Target("safetensors header", 14, "model", "model.safetensors", damage_header, [INFO]),
    Target("quantized header", 6, "quantized", "model.safetensors", damage_header, [INFO]),
    Target("index", 10, "sharded", "model.safetensors.index.json", _json(["model.safetensors"]), [INFO]),
    Target("config", 20, "model", "config.json", _json(CONFIG_VALUES), [INFO, ("info", "MODEL")]),
    Target("quantized config", 8, "quantized", "config.json", _json(CONFIG_VALUES), [INFO]),
    Target("generation_config", 10, "model", "generation_config.json", _json([]), [INFO]),
    Target("tokenizer.json", 4, "model", "tokenizer.json", _json(TOKENIZER_VALUES), [TOKENIZE]),
    *(
        Target(f"tokenizer.json, {kind}", share, kind, "tokenizer.json", _json(TOKENIZER_VALUES), [TOKENIZE])
        for kind, share in (("byte_fallback", 4), ("unigram", 3), ("split", 1))
    ),
    Target("tokenizer_config.json", 8, "model", "tokenizer_config.json", _json(TOKENIZER_VALUES), [TOKENIZE, INFO]),
    Target("special_tokens_map.json", 4, "spm", "special_tokens_map.json", _json(TOKENIZER_VALUES), [TOKENIZE]),
    Target("added_tokens.json", 4, "spm", "added_tokens.json", _json([]), [TOKENIZE]),
    Target("tokenizer.model", 8, "spm", "tokenizer.model", damage_model, [TOKENIZE]),
    Target("chat template", 1, "model", "chat_template.jinja", damage_lines(JINJA), door=_render),
    Target("conversation", 12, "files", "conversation.json", _json(CONVERSATION_VALUES), door=_load_conversation),
    Target("receipt", 12, "files", "receipt.json", _json(RECEIPT_VALUES), door=_read_receipt),
    Target("preset", 10, "files", "preset.toml", damage_lines(TOML + RAW_TEXTS[:4]), door=_resolve_preset),
)
CYCLE = tuple(target for target in TARGETS for _ in range(target.share))


def target_of(case: int) -> Target:
    """The kind of file that a case damages."""
    return CYCLE[Random(f"target {case}").randrange(len(CYCLE))]
