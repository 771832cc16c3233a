"""Options that a command lacks: suggests its own by other programs' names or by spelling."""

from collections.abc import Collection, Mapping, Sequence

from llmcli.errors import UsageError

_MAX_PROPOSALS = 2

# Names in llama.cpp, ollama, llm, mlx-lm, transformers and vLLM, with dashes for underscores. A value is an option
# of ours, offered where the command has it, or a note. docs/guide/coming-from-llama.cpp.md has the same names; a test
# compares.
_PROMPT = "give the prompt without an option"
_CHAT = "see llmcli chat"
_TOKEN = "put the token of your account at the hub into the variable HF_TOKEN"
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
    "--adapter-path": ("--adapter",),
    "--batch-size": ("--rows",),
    "--cache-type-k": ("--kv-cache",),
    "--cache-type-v": ("--kv-cache",),
    "--chat-template-file": ("--chat-template",),
    "--chat-template-kwargs": ("--template-var",),
    "--conversation": (_CHAT,),
    "--ctx": ("--context",),
    "--ctx-size": ("--context",),
    "--device-map": ("--device", _PLACE),
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
    "--hf-token": (_TOKEN,),
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
    "--min-length": ("--min-new-tokens",),
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
    "--samples": ("--num-samples",),
    "--stop-sequence": ("--stop",),
    "--stop-strings": ("--stop",),
    "--stream": ("text is always streamed",),
    "--system-prompt": ("--system",),
    "--temp": ("--temperature",),
    "--template": ("--chat-template",),
    "--think": ("--thinking",),
    "--token": (_TOKEN,),
    "--tokens": ("--max-new-tokens",),
    "--top-logprobs": ("--logprobs",),
    "--top-nsigma": ("--top-n-sigma",),
    "--torch-dtype": ("--dtype",),
    "--typical": ("--typical-p",),
    "--verbose": ("--stats",),
    "--verbose-prompt": ("--show-prompt",),
}

# As `ALIASES`, for commands.
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


def near_names(name: str, known: Collection[str]) -> list[str]:
    """The known names that are near, the nearest first, at most two; a dash more or less counts for nothing."""
    found = {other: distance for other in known if (distance := _distance(name, other)) is not None}
    return sorted(found, key=lambda other: (found[other], other))[:_MAX_PROPOSALS]


def _distance(name: str, other: str) -> int | None:
    """The number of slips between two names; None for too many."""
    words, others = name.strip("-").split("-"), other.strip("-").split("-")
    if len(words) != len(others):
        words, others = ["".join(words)], ["".join(others)]
    total = 0
    for word, meant in zip(words, others, strict=True):
        slips = _slips(word, meant)
        # The first letter is usually right, and two slips make another word of a short one.
        if slips and (word[:1] != meant[:1] or slips > min(2, min(len(word), len(meant)) // 3)):
            return None
        total += slips
    return total


def _slips(word: str, meant: str) -> int:
    """The number of letters missing, extra, wrong or swapped (Damerau and Levenshtein's distance, restricted)."""
    before: list[int] = []
    row = list(range(len(meant) + 1))
    for i, letter in enumerate(word, start=1):
        before, last, row = row, before, [i]
        for j, expected in enumerate(meant, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != expected))
            if i > 1 and j > 1 and letter == meant[j - 2] and word[i - 2] == expected:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]


def refuse_unknown_option(argument: str, known: Collection[str], otherwise: str) -> None:
    """Refuse an option that is not among the `known` ones; `otherwise` is the message without a suggestion.

    A group of one-letter options such as `-qv` is left to the parser, unless other programs have one of that name.

    Raises: UsageError.
    """
    name = argument.partition("=")[0]
    if not name.startswith("-") or name in ("-", "--") or name in known:
        return
    if name.startswith("--") or name in ALIASES or name[:2] not in known:
        raise UsageError(f"no such option: {name}; {_proposal(name, known) or otherwise}")


def refuse_unknown_command(name: str, known: Collection[str], parent: str) -> None:
    """Refuse a command that `parent`, such as `llmcli`, lacks. Raises: UsageError"""
    if name in known:
        return
    found = [COMMAND_ALIASES[name]] if name in COMMAND_ALIASES else near_names(name, known)
    meant = f"; did you mean {_listed(found)}?" if found else ""
    raise UsageError(f"no such command: {parent} {name}{meant} (see {parent} --help)")


def _proposal(name: str, known: Collection[str]) -> str:
    """Which option is meant, or how to do without it; empty if unknown."""
    spelled = name if name in ALIASES else name.replace("_", "-").lower()
    ideas = (spelled,) if spelled in known else ALIASES.get(spelled, ())
    options, notes = _usable(ideas, known)
    if not options and not notes and name.startswith("--"):
        options = near_names(spelled, _long_names(known))
        for alias in near_names(spelled, _long_names(ALIASES))[:1] if not options else ():
            options, notes = _usable(ALIASES[alias], known)
    if options:
        return f"did you mean {_listed(options)}?"
    return notes[0] if notes else ""


def _usable(ideas: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Of an alias's meanings, the command's own options and the notes."""
    return [idea for idea in ideas if idea in known], [idea for idea in ideas if not idea.startswith("-")]


def _long_names(names: Collection[str]) -> list[str]:
    return [name for name in names if name.startswith("--")]


def _listed(names: list[str]) -> str:
    return " or ".join(names)
