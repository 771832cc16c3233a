"""Options that a command lacks: suggests its own by other programs' names or by spelling."""

from collections.abc import Collection, Mapping, Sequence

from llmcli.errors import UsageError

_MAX_PROPOSALS = 2

# An option of ours, offered where the command has it, or a note; and what llama.cpp, ollama, llm, mlx-lm, transformers
# and vLLM call it, with dashes for underscores. docs/guide/coming-from-llama.cpp.md has the same names; a test
# compares. A name that may mean several is in several lines, and the first is offered first.
_OTHERS_NAMES = {
    "--adapter": "--adapter-path --lora --lora-scaled",
    "--chat-template": "--chat-template-file --template",
    "--device": "-ngl --device-map --gpu --gpu-layers --n-gpu-layers --num-gpu",
    "--draft": "-md --draft-model --model-draft",
    "--dry-breaker": "--dry-sequence-breaker",
    "--dry-window": "--dry-penalty-last-n",
    "--dtype": "--torch-dtype",
    "--dynatemp-exponent": "--dynatemp-exp",
    "--grammar": "--grammar-file",
    "--html": "-o --output",
    "--kv-cache": "-ctk -ctv --cache-type-k --cache-type-v --kv-cache-dtype",
    "--logit-bias": "-l",
    "--logprobs": "--top-logprobs",
    "--max-new-tokens": "-n --max-length --max-tokens --n-predict --num-predict --predict --tokens",
    "--context": "-c --ctx --ctx-size --max-kv-size --max-length --max-model-len --max-seq-len --num-ctx",
    "--continue": "-c",
    "--message": "-p --prompt",
    "--min-new-tokens": "--min-tokens --min-length",
    "--min-p": "--epsilon-cutoff",
    "--mirostat-eta": "--mirostat-lr",
    "--mirostat-tau": "--mirostat --mirostat-ent",
    "--model": "-hf -mu --hf-repo --model-name-or-path --model-url",
    "--penalty-window": "--repeat-last-n",
    "--repetition-penalty": "--repeat-penalty",
    "--rows": "-b -np --batch-size --max-num-seqs --parallel",
    "--num-samples": "-np --n --num-beams --num-return-sequences --parallel --samples",
    "--sampler-order": "--sampler-seq --samplers",
    "--schema": "--json-schema --json-schema-file",
    "--seed": "-s",
    "--show-prompt": "--verbose-prompt",
    "--stats": "--verbose",
    "--stop": "-r --reverse-prompt --stop-sequence --stop-strings",
    "--system": "-s -sys --system-prompt",
    "--template-var": "--chat-template-kwargs",
    "--thinking": "--hidethinking --think",
    "--threads": "-t --num-thread",
    "--temperature": "-t --do-sample --greedy --temp",
    "--top-n-sigma": "--top-nsigma",
    "--typical-p": "--eta-cutoff --typical",
    "a model runs on one device as a whole: see --device": "-ngl --device-map --gpu-layers --n-gpu-layers",
    "give the prompt without an option": "-p --prompt",
    "put the token of your account at the hub into the variable HF_TOKEN": "--hf-token --token",
    "see llmcli chat": "-cnv -i --conversation --interactive",
    "see llmcli quantize": "--quantization",
    "text is always streamed": "--stream",
}
# The same by the other program's name.
ALIASES: Mapping[str, Sequence[str]] = {
    name: [ours for ours, names in _OTHERS_NAMES.items() if name in names.split()]
    for name in " ".join(_OTHERS_NAMES.values()).split()
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
