"""Writes the undamaged files that the fuzzer starts from: models in three forms, a conversation, a preset."""

import copy
import json
from pathlib import Path

import sentencepiece
import tokenizers
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmcli.cli.main import run
from llmcli.engine.conversation import Answer, Conversation, SavedConversation, Turn, save_conversation

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
GENERATION_CONFIG = {
    "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1, "max_new_tokens": 64,
    "eos_token_id": [257], "bos_token_id": 256, "suppress_tokens": [3], "begin_suppress_tokens": [4],
    "stop_strings": ["x"],
    "bad_words_ids": [[5, 6]], "sequence_bias": [[[7], -1.0]], "forced_eos_token_id": 257, "num_beams": 1,
    "max_time": None,
    "encoder_repetition_penalty": 1.2, "min_new_tokens": 2,
}  # fmt: skip
TOKENIZER_CONFIG = {
    "bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, "pad_token": "<|end|>", "add_bos_token": True,
    "additional_special_tokens": ["<|end|>"], "extra_special_tokens": {"image_token": "<|end|>"},
    "model_max_length": 1000000000000000019884624838656, "clean_up_tokenization_spaces": False,
    "added_tokens_decoder": {"256": {"content": "<|begin|>", "special": True}, "257": {"content": "<|end|>",
    "special": True}},
}  # fmt: skip


def write_base(folder: Path) -> Path:
    """Write everything into `folder` and return it."""
    model = write_tiny_llama(
        folder / "model", **SHAPE, rope_scaling={"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "truncate": True}
    )
    (model / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    (model / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    for kind, content in _small_tokenizers().items():
        (folder / kind).mkdir()
        (folder / kind / "config.json").write_bytes((model / "config.json").read_bytes())
        (folder / kind / "model.safetensors").symlink_to(model / "model.safetensors")
        (folder / kind / "tokenizer.json").write_text(content)
    _split(write_tiny_llama(folder / "sharded", **SHAPE))
    _write_spm(write_tiny_llama(folder / "spm", with_tokenizer=False, **{**SHAPE, "vocab_size": 320}))
    assert run(["quantize", str(model), str(folder / "quantized"), "--group-size", "32", "--quiet"]) == 0
    files = folder / "files"
    files.mkdir()
    turns = (
        Turn("Grüße", Answer("Hello", "Hello", None, (1, 22, 333), "eos", 0)),
        Turn("Why?", Answer("<think>\nHm.\n</think>\n\nSo.", "So.", "Hm.", (4,), "interrupted", 2)),
        Turn("And?", None),
    )
    save_conversation(
        files / "conversation.json", SavedConversation("org/name", Conversation("Be kind.", turns, 1)), replace=False
    )
    prompt = ["generate", "Hello", "--chat", "--system", "Be kind.", "--model", str(model), "--max-new-tokens", "4"]
    settings = ["-n", "2", "--seed", "1", "--dry-multiplier", "1", "--logit-bias", "7=-inf", "--quiet"]
    assert run([*prompt, *settings, "--receipt", str(files / "receipt.json")]) == 0
    (files / "preset.toml").write_text('description = "x"\n\n[sampling]\ntemperature = 0.7\ntop_k = 5\ntop_p = 0.9\n')
    return folder


def _split(folder: Path) -> None:
    """Turn model.safetensors into two shards and their index."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    names = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {name: names[index % 2] for index, name in enumerate(sorted(tensors))}
    for shard in names:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    whole.unlink()


def _small_tokenizers() -> dict[str, str]:
    """One tokenizer.json of each kind, small, so that a mutation often hits something that matters."""
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    corpus = [
        "Once upon a time there was a little girl named Lily.",
        "def main():\n    return 12\n",
        "你好，世界 мир",
    ] * 4
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

    made["split"] = copy.deepcopy(made["byte_level"])
    made["split"].pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    for library in made.values():
        library.add_special_tokens(special)
        library.add_tokens(
            [tokenizers.AddedToken("<mask>", lstrip=True), tokenizers.AddedToken("<x>", single_word=True)]
        )
    return {name: library.to_str() for name, library in made.items()}


def _write_spm(folder: Path) -> None:
    text = folder / "text"
    text.write_text(
        "\n".join(" ".join("abcdefgh"[i % 8 : i % 5 + 3] * (i % 3 + 1) for i in range(j, j + 9)) for j in range(300))
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=300, model_type="bpe", byte_fallback=True,
        character_coverage=1.0, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    for name in ("text", "tokenizer.vocab"):
        (folder / name).unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    (folder / "added_tokens.json").write_text(json.dumps({"<extra>": 300, "<more>": 301}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "unk_token": "<unk>"}))
