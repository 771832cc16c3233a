"""Options that a command lacks: which of its own was meant, by what other programs call it or by its spelling."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches

from llmcli.errors import UsageError

# What llama.cpp, ollama, llm, mlx-lm, transformers and vLLM call it, with dashes for underscores. A value is an option
# of ours, offered where the command has it, or a note. docs/guide/coming-from-llama.cpp.md has the same names; a test
# compares.
_PROMPT = "give the prompt without an option"
_CHAT = "see llmcli chat"
_PLACE = "a model runs on one device as a whole: see --device"
ALIASES: Mapping[str, tuple[str, ...]] = {
    "-b": ("--rows",),
    "-c": ("--context", "--continue"),
    "-cnv": (_CHAT,),
    "-ctk": ("--kv-cache",),
    "-ctv": ("--kv-cache",),
    "-hf": ("--model",),
    "-i": (_CHAT,),
    "-l": ("--logit-bias",),
    "-md": ("--draft",),
    "-mu": ("--model",),
    "-n": ("--max-new-tokens",),
    "-ngl": ("--device", _PLACE),
    "-np": ("--rows", "--num-samples"),
    "-o": ("--html",),
    "-p": ("--message", _PROMPT),
    "-r": ("--stop",),
    "-s": ("--seed", "--system"),
    "-sys": ("--system",),
    "-t": ("--threads", "--temperature"),
    "--batch-size": ("--rows",),
    "--cache-type-k": ("--kv-cache",),
    "--cache-type-v": ("--kv-cache",),
    "--chat-template-file": ("--chat-template",),
    "--chat-template-kwargs": ("--template-var",),
    "--conversation": (_CHAT,),
    "--ctx": ("--context",),
    "--ctx-size": ("--context",),
    "--do-sample": ("--temperature",),
    "--draft-model": ("--draft",),
    "--dry-penalty-last-n": ("--dry-window",),
    "--dry-sequence-breaker": ("--dry-breaker",),
    "--dynatemp-exp": ("--dynatemp-exponent",),
    "--epsilon-cutoff": ("--min-p",),
    "--eta-cutoff": ("--typical-p",),
    "--gpu": ("--device",),
    "--gpu-layers": ("--device", _PLACE),
    "--grammar-file": ("--grammar",),
    "--greedy": ("--temperature",),
    "--hf-repo": ("--model",),
    "--hidethinking": ("--thinking",),
    "--interactive": (_CHAT,),
    "--json-schema": ("--schema",),
    "--json-schema-file": ("--schema",),
    "--kv-cache-dtype": ("--kv-cache",),
    "--lora": ("--adapter",),
    "--lora-scaled": ("--adapter",),
    "--max-kv-size": ("--context",),
    "--max-length": ("--max-new-tokens", "--context"),
    "--max-model-len": ("--context",),
    "--max-num-seqs": ("--rows",),
    "--max-seq-len": ("--context",),
    "--max-tokens": ("--max-new-tokens",),
    "--min-tokens": ("--min-new-tokens",),
    "--mirostat": ("--mirostat-tau",),
    "--mirostat-ent": ("--mirostat-tau",),
    "--mirostat-lr": ("--mirostat-eta",),
    "--model-draft": ("--draft",),
    "--model-name-or-path": ("--model",),
    "--model-url": ("--model",),
    "--n": ("--num-samples",),
    "--n-gpu-layers": ("--device", _PLACE),
    "--n-predict": ("--max-new-tokens",),
    "--num-beams": ("--num-samples",),
    "--num-ctx": ("--context",),
    "--num-gpu": ("--device",),
    "--num-predict": ("--max-new-tokens",),
    "--num-return-sequences": ("--num-samples",),
    "--num-thread": ("--threads",),
    "--output": ("--html",),
    "--parallel": ("--rows", "--num-samples"),
    "--predict": ("--max-new-tokens",),
    "--prompt": ("--message", _PROMPT),
    "--quantization": ("see llmcli quantize",),
    "--repeat-last-n": ("--penalty-window",),
    "--repeat-penalty": ("--repetition-penalty",),
    "--reverse-prompt": ("--stop",),
    "--sampler-seq": ("--sampler-order",),
    "--samplers": ("--sampler-order",),
    "--stop-sequence": ("--stop",),
    "--stop-strings": ("--stop",),
    "--stream": ("text is always streamed",),
    "--system-prompt": ("--system",),
    "--temp": ("--temperature",),
    "--think": ("--thinking",),
    "--tokens": ("--max-new-tokens",),
    "--top-logprobs": ("--logprobs",),
    "--top-nsigma": ("--top-n-sigma",),
    "--torch-dtype": ("--dtype",),
    "--typical": ("--typical-p",),
    "--verbose": ("--stats",),
    "--verbose-prompt": ("--show-prompt",),
}
# The same for commands.
COMMAND_ALIASES: Mapping[str, str] = {
    "ask": "generate",
    "benchmark": "bench",
    "completion": "generate",
    "download": "pull",
    "list": "models list",
    "ls": "models list",
    "perplexity": "eval",
    "rm": "models rm",
    "run": "chat",
    "show": "info",
    "tokenizer": "tokenize",
}
_SIMILARITY = 0.75  # of 1; below, a proposal confuses more than it helps
_MAX_PROPOSALS = 2


def refuse_unknown_option(argument: str, known: Collection[str], otherwise: str) -> None:
    """Refuse an option that is not among the `known` ones; `otherwise` is what is said without a proposal.

    A group of one-letter options such as `-qv` is left to the parser, unless other programs have one of that name.

    Raises: UsageError.
    """
    name = argument.partition("=")[0]
    if not name.startswith("-") or name in ("-", "--") or name in known:
        return
    if name.startswith("--") or name in ALIASES or name[:2] not in known:
        raise UsageError(f"no such option: {name}; {_proposal(name, known) or otherwise}")


def refuse_unknown_command(name: str, known: Collection[str], parent: str) -> None:
    """Refuse a command that `parent`, such as `llmcli`, lacks.

    Raises: UsageError.
    """
    if name in known:
        return
    found = [COMMAND_ALIASES[name]] if name in COMMAND_ALIASES else _close_matches(name, known)
    meant = f"; did you mean {_listed(found)}?" if found else ""
    raise UsageError(f"no such command: {parent} {name}{meant} (see {parent} --help)")


def _proposal(name: str, known: Collection[str]) -> str:
    """Which option is meant, or how to do without it; empty without an idea."""
    spelled = name if name in ALIASES else name.replace("_", "-").lower()
    ideas = (spelled,) if spelled in known else ALIASES.get(spelled, ())
    options = [idea for idea in ideas if idea in known]
    notes = [idea for idea in ideas if not idea.startswith("-")]
    if not options and not notes and name.startswith("--"):
        options = _close_matches(spelled, known)
    if options:
        return f"did you mean {_listed(options)}?"
    return notes[0] if notes else ""


def _close_matches(name: str, known: Collection[str]) -> list[str]:
    return get_close_matches(name, sorted(known), _MAX_PROPOSALS, _SIMILARITY)


def _listed(names: list[str]) -> str:
    return " or ".join(names)
