"""Random tokenizers, their settings, and random chat templates: seeded, small, and all valid."""

import io
import json
import random
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmcli.tokenizer.huggingface import KNOWN_PATTERNS

WORDS = ["the", "quick", "brown", "fox's", "naïve", "café", "12", "3456", "Привет", "мир", "世界", "こんにちは"]
WORDS += ["don't", "x=1;", "ﬁne", "Å", "e\u0301", "foo_bar", "👍🏽"]
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|end|>"]
ADDED = ["<tool>", "<mask>", "fox", "a b", "日本", "<img>", " <sp>", "<NEW>"]
NAMES = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "image_token"]
OLD_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}"
    "{% endfor %}"
)
OLD_SETTINGS: dict[str, list[Any]] = {
    "tokenizer_class": ["LlamaTokenizer", "LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "absent"],
    "add_bos_token": [True, True, False, None, "absent"],
    "add_eos_token": [True, False, "absent"],
    "bos_token": ["<s>", "</s>", "<unk>", None, {"content": "</s>", "normalized": True, "lstrip": False}, "absent"],
    "eos_token": ["</s>", "<s>", "absent"],
    "legacy": [True, False, None, "absent"],
    "add_prefix_space": [True, False, None, "absent", "absent"],
}
PATTERNS = [*sorted(KNOWN_PATTERNS), r"[A-Za-z]+|[^A-Za-z]"]  # the last is not known to be quick
SOURCES = [
    "{{ bos_token }}",
    "{{ eos_token | default('-') }}",
    "{{ NAME is defined }}{{ NAME }}",
    "{{ [bos_token, pad_token, unk_token, mask_token, cls_token, sep_token, image_token, call_token] }}",
    "{{ additional_special_tokens is defined }}{{ extra_special_tokens is defined }}",
    "{% for m in messages %}\n  {%- if m.role == 'user' -%} U:{{ m.content | trim }}\n{% else %}A:{{ m.content }}"
    "{% endif %}{% endfor %}",
    "{%- for m in messages %}{{ loop.index0 }}{{ m['role'] | upper }}{{ m | tojson }}"
    "{% if not loop.last %},{% endif %}{% endfor -%}",
    "{% if tools %}{{ tools | tojson(indent=2) }}{% else %}no tools{% endif %}\n",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}"
    "{{ ns.n }}",
    "{% macro say(x) %}<{{ x }}>{% endmacro %}{{ say(messages[0].content) }}",
    "{% if add_generation_prompt %}{{ '<|end|>assistant\\n' }}{% endif %}",
    "  \n{% generation %}{{ messages[-1].content }}{% endgeneration %}\n",
    "{{ documents is none }}{{ flag }}{{ number + 1 }}{{ messages | map(attribute='role') | join('+') }}",
    "{{ messages[0].content[::-1] }}{{ dict(a=1) }}{{ 'é' | tojson }}{# a remark #}",
]
FAILING = [
    "{% if messages[0].role != 'system' %}{{ raise_exception('No system prompt') }}{% endif %}",
    "{{ nothing.at.all }}",
]
MESSAGES = [
    {"role": "system", "content": " Be kind.\n"},
    {"role": "user", "content": "naïve  fox?", "name": None},
    {"role": "assistant", "content": "the 世界"},
]


def random_text(rng: random.Random, tokens: list[str]) -> str:
    """Words, spaces, line ends and tokens, in any order."""
    parts = [rng.choice([*WORDS, *tokens, " ", "  ", "\n", "\t"]) for _ in range(rng.randrange(12))]
    return rng.choice(["", " "]).join(parts)


def random_template(rng: random.Random) -> str:
    """A template of a few parts; now and then one that fails."""
    parts = rng.choices(SOURCES if rng.random() < 0.8 else SOURCES + FAILING, k=rng.randrange(1, 6))
    return "".join(parts).replace("NAME", rng.choice(NAMES))


def write_folder(folder: Path, rng: random.Random) -> list[str]:
    """A random tokenizer.json and its other files; returns the tokens that a text may name."""
    library = _random_library(rng)
    (folder / "tokenizer.json").write_text(library.to_str(), encoding="utf-8")
    # No ordinary added tokens: a named one is hidden here, and in transformers only sometimes.
    ordinary = {token.content for token in library.get_added_tokens_decoder().values() if not token.special}
    known = [t for t in [*SPECIAL, *ADDED] if library.token_to_id(t) is not None and t not in ordinary]
    write_settings(folder, rng, known, library.get_vocab_size(), "PreTrainedTokenizerFast")
    return [*SPECIAL, *ADDED]


def write_old_folder(folder: Path, rng: random.Random) -> list[str]:
    """A tokenizer.json of LLaMA's older kinds, in which special tokens may be looked for in normalized text.

    Its post-processor may begin a text with a token other than the one in the small files.
    """
    document = json.loads(_byte_fallback_library([" ".join(rng.choices(WORDS, k=30)) for _ in range(20)], rng).to_str())
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    others: list[dict[str, Any]] = [{"type": name} for name in ("NFKC", "Lowercase")]
    steps = [*rng.sample(others, k=rng.choice([0, 0, 1, 2])), {"type": "Prepend", "prepend": "▁"}, replace]
    document["normalizer"] = rng.choice([None, replace, *[{"type": "Sequence", "normalizers": steps}] * 4])
    used = len(document["model"]["vocab"])
    new = rng.sample(["<NEW>", "<s>s", "a b", "fox"], k=rng.randrange(4))
    document["added_tokens"] += [{"id": used + index, "content": token} for index, token in enumerate(new)]
    for token in document["added_tokens"]:
        token |= {name: rng.random() < 0.2 for name in ("lstrip", "rstrip", "single_word")}
        token |= {"normalized": rng.random() < 0.7, "special": token["content"] in SPECIAL or rng.random() < 0.7}
    document["post_processor"] = random_post_processor(rng)
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    config: dict[str, Any] = {"chat_template": OLD_TEMPLATE}
    for name, values in OLD_SETTINGS.items():
        if (value := rng.choice(values)) != "absent":
            config[name] = value
    if rng.random() < 0.3:  # the names in the other small file
        token_map = {name: config.pop(name) for name in ("bos_token", "eos_token") if name in config}
        (folder / "special_tokens_map.json").write_text(json.dumps(token_map))
    (folder / "tokenizer_config.json").write_text(json.dumps(_typed(config)))
    if (model_type := rng.choice(["llama", "llama", "mistral", "smollm3", None])) is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return [*SPECIAL, "</S>", "＜s＞", "▁</s>", " </s>", "<new>", *new]


def random_post_processor(rng: random.Random) -> Any:
    """A post-processor: templates, one, several or none, or another kind."""
    ids = {"<unk>": 0, "<s>": 1, "</s>": 2}

    def template() -> dict[str, Any]:
        single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
        for token in rng.sample(list(ids), k=rng.randrange(2)):
            single.insert(rng.randrange(2), {"SpecialToken": {"id": token, "type_id": 0}})
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        special = {token: {"id": token, "ids": [token_id], "tokens": [token]} for token, token_id in ids.items()}
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}

    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    roberta = {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1]}
    roberta |= {"trim_offsets": True, "add_prefix_space": True}
    bert = {"type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1]}
    sequence = {"type": "Sequence", "processors": [template() for _ in range(rng.randrange(1, 3))]}
    return rng.choice([None, template(), template(), template(), sequence, byte_level, bert, roberta])


def write_model_folder(folder: Path, rng: random.Random) -> list[str]:
    """A random tokenizer.model of Llama's kind and its other files; returns the tokens that a text may name."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(" ".join(rng.choices(WORDS, k=30)) for _ in range(20)),
        model_writer=model,
        model_type="bpe",
        vocab_size=rng.randrange(330, 380),
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    size = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    # `LlamaTokenizer`'s defaults; sentencepiece knows only BOS and EOS as special.
    defaults = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False, "add_bos_token": True}
    write_settings(folder, rng, ["<unk>", "<s>", "</s>"], size, "LlamaTokenizer", defaults)
    return ["<unk>", "<s>", "</s>", "<tool>", "<mask>", "<img>"]


def write_settings(
    folder: Path,
    rng: random.Random,
    known: list[str],
    size: int,
    tokenizer_class: str,
    defaults: dict[str, Any] | None = None,
) -> None:
    """Some of the three JSON files: new added tokens, and names for known tokens in each form that occurs."""
    config: dict[str, Any] = {"tokenizer_class": tokenizer_class, "chat_template": random_template(rng)} | (
        defaults or {}
    )
    token_map: dict[str, Any] = {}
    new = rng.sample(["<tool>", "<mask>", "<img>"], k=rng.randrange(3))
    # One form for each token: transformers' result for two contradicting ones depends on their order.
    forms = {token: _form(token, rng) for token in [*known, *new]}
    if defaults:
        forms |= {token: token for token in defaults.values() if isinstance(token, str)}
    else:
        config["bos_token"] = forms[rng.choice(known)]  # else ours is that of the post-processor
    new_ids = {token: size + index for index, token in enumerate(token for token in new if token not in known)}
    for name in NAMES:
        if rng.random() < 0.4 and not (defaults and name in defaults):
            rng.choice([config, token_map])[name] = forms[rng.choice([*known, *new_ids])]
    forms["<unk>"] = "<unk>"
    plain = [token for token in known if isinstance(forms[token], str)]
    extra = rng.sample(plain, k=rng.randrange(len(plain) + 1))[:3]
    form = rng.randrange(5)
    if form == 0:
        config["extra_special_tokens"] = {"call_token": rng.choice(plain), "image_token": rng.choice(plain)}
    elif form == 1:
        config["extra_special_tokens"] = extra
    elif form == 2:
        config["additional_special_tokens"] = extra
    elif form == 3:
        token_map["additional_special_tokens"] = extra
    if new_ids and rng.random() < 0.6:
        config["added_tokens_decoder"] = {
            str(token_id): {
                **_behaviour(rng),
                **(forms[token] if isinstance(forms[token], dict) else {"content": token}),
            }
            for token, token_id in new_ids.items()
        }
    elif new_ids:
        (folder / "added_tokens.json").write_text(json.dumps(new_ids))
    (folder / "tokenizer_config.json").write_text(json.dumps(_typed(config)))
    if token_map:
        (folder / "special_tokens_map.json").write_text(json.dumps(token_map))


def _form(token: str, rng: random.Random) -> Any:
    if rng.random() < 0.6:
        return token
    behaviour = _behaviour(rng)
    del behaviour["special"]
    return {"content": token, **behaviour}


def _typed(config: dict[str, Any]) -> dict[str, Any]:
    """With the mark that transformers requires in this file only."""
    return {
        name: {"__type": "AddedToken", **value, "special": True}
        if isinstance(value, dict) and "content" in value
        else value
        for name, value in config.items()
    }


def _behaviour(rng: random.Random) -> dict[str, bool]:
    behaviour = {name: rng.random() < 0.25 for name in ("lstrip", "rstrip", "single_word")}
    return {**behaviour, "normalized": False, "special": rng.random() < 0.5}


def _random_library(rng: random.Random) -> tokenizers.Tokenizer:
    corpus = [" ".join(rng.choices(WORDS, k=30)) for _ in range(20)]
    kind = rng.choice(["byte_level", "byte_level", "byte_fallback", "metaspace", "unigram"])
    size = rng.randrange(300, 400)
    special = rng.sample(SPECIAL, k=rng.randrange(1, len(SPECIAL)))
    special = ["<unk>", *(token for token in special if token != "<unk>")]
    form = rng.choice([None, None, normalizers.NFC(), normalizers.NFKC(), normalizers.Lowercase()])
    if kind == "byte_level":
        library = tokenizers.Tokenizer(models.BPE())
        library.normalizer = form
        library.pre_tokenizer = _random_byte_level(rng)
        library.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        )
        library.train_from_iterator(corpus, trainer)
    elif kind == "byte_fallback":
        library = _byte_fallback_library(corpus, rng)
    else:
        library = tokenizers.Tokenizer(models.Unigram() if kind == "unigram" else models.BPE(unk_token="<unk>"))
        library.normalizer = form
        scheme = rng.choice(["always", "first", "never"])
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=rng.random() < 0.5)
        library.decoder = decoders.Metaspace(prepend_scheme=scheme)
        options = {"special_tokens": special, "vocab_size": size, "show_progress": False}
        if kind == "unigram":
            library.train_from_iterator(corpus, trainers.UnigramTrainer(unk_token="<unk>", **options))
        else:
            library.train_from_iterator(corpus, trainers.BpeTrainer(**options))
    for token in rng.sample(ADDED, k=rng.randrange(5)):
        behaviour = _behaviour(rng)  # the library shows a special token that it finds in another form
        behaviour["normalized"] = not behaviour["special"] and rng.random() < 0.5
        library.add_tokens([tokenizers.AddedToken(token, **behaviour)])
    if rng.random() < 0.5 and library.token_to_id("<s>") is not None:
        template = rng.choice(["<s> $A", "$A <s>", "<s> $A <s>"])
        token = ("<s>", library.token_to_id("<s>"))
        library.post_processor = processors.TemplateProcessing(single=template, special_tokens=[token])
    elif kind == "byte_level":
        library.post_processor = processors.ByteLevel()
    return library


def _random_byte_level(rng: random.Random) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=rng.random() < 0.3, use_regex=rng.random() < 0.6)
    if rng.random() < 0.4:
        return byte_level
    split = pre_tokenizers.Split(
        tokenizers.Regex(rng.choice(PATTERNS)), rng.choice(["isolated", "merged_with_previous"])
    )
    digits = pre_tokenizers.Digits(individual_digits=rng.random() < 0.5)
    return pre_tokenizers.Sequence([rng.choice([split, digits]), byte_level])


def _byte_fallback_library(corpus: list[str], rng: random.Random) -> tokenizers.Tokenizer:
    """Llama 2's form; its merges come from a trained tokenizer of the same words."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {piece: token_id for token_id, piece in enumerate(dict.fromkeys([*pieces, "▁", "<pad>"]))}
    merges = [tuple(merge) for merge in model["merges"]]
    bpe = models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    library = tokenizers.Tokenizer(bpe)
    begins_with_space = rng.random() < 0.7
    steps = [normalizers.Prepend("▁")] if begins_with_space else []
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends = [decoders.Strip(" ", 1, 0)] if begins_with_space else []
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    library.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return library
