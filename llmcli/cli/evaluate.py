"""`llmcli eval`: perplexity of a model on a text, and how far a second model is from it.

`diff` compares two models, and `quantize` an export with its source, by the same functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.cli import lazy
from llmcli.cli.command import option
from llmcli.cli.completion import complete_model
from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.options import (
    AUTO,
    DeviceOptions,
    MessageOptions,
    ModelNames,
    adapter_option,
    model_option,
    parse_adapters,
    with_adapters,
)
from llmcli.cli.progress import progress
from llmcli.cli.prompt import read_text
from llmcli.cli.session import Session, open_session
from llmcli.cli.terminal import terminal
from llmcli.cli.units import divergence
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from llmcli.measure.evaluate import Comparison, Evaluation

DEFAULT_WINDOW = 2048


def require_same_tokenizer(first: Session, second: Session) -> None:
    """Refuse two models that cannot be compared token by token. Raises: UsageError"""
    sizes = [session.model.config.vocab_size for session in (first, second)]
    same_pieces = first.tokenizer.vocab_size == second.tokenizer.vocab_size and all(
        first.tokenizer.piece(token_id) == second.tokenizer.piece(token_id)
        for token_id in range(first.tokenizer.vocab_size)
    )
    if not same_pieces or sizes[0] != sizes[1]:
        raise UsageError(
            f"{first.name} and {second.name} have different vocabularies, so their tokens cannot be compared; "
            "give two versions of one model"
        )


def evaluate_models(
    sessions: list[Session], options: RunnerOptions, text: str, *, window: int, stride: int
) -> tuple[list[Evaluation], Comparison | None]:
    """Perplexity of one model on a text, or of two and how far they are from each other.

    The first of two is the reference; a requested int8 KV cache is the second one's.
    """
    token_ids = sessions[0].encode_prompt(text).token_ids
    bos_token_id = sessions[0].tokenizer.bos_token_id
    bos_token_ids = [bos_token_id] if bos_token_id is not None and token_ids[0] == bos_token_id else []
    first_options = options if len(sessions) == 1 else options.with_usual_cache
    runner = sessions[0].load_runner(first_options, window)[0]
    others = [session.load_runner(options, window)[0] for session in sessions[1:]]
    terminal.info(f"{len(token_ids)} tokens, {runner.description}{options.note}, windows of {window}")
    with progress("scoring", unit="tokens") as on_progress:
        if not others:
            return [lazy.evaluate(runner, token_ids, stride, bos_token_ids, on_progress)], None
        pair = lazy.compare(runner, others[0], token_ids, stride, bos_token_ids, on_progress)
        return [pair.first, pair.second], pair


@dataclass(frozen=True)
class WindowOptions:
    """How a text is cut into windows."""

    context: int | None = model_option(
        None, "Tokens in a window.", min=8, show_default=f"the model's maximum, at most {DEFAULT_WINDOW}"
    )
    stride: int | None = option(
        None,
        "Tokens scored in each window after the first; the others are context.",
        min=1,
        hidden=True,
        show_default="half the context",
    )

    def resolve(self, sessions: Sequence[Session]) -> tuple[int, int]:
        """The tokens of a window that all models can run, and of its stride.

        Raises: UsageError for a stride that leaves no context.
        """
        window = min(session.resolve_context(self.context, DEFAULT_WINDOW) for session in sessions)
        stride = window // 2 if self.stride is None else self.stride
        if stride > window - 2:
            raise UsageError(f"--stride {stride} leaves no context in a window of {window}; use at most {window - 2}")
        return window, stride


def evaluate(
    *,
    names: ModelNames,
    file: Path | None = option(None, "Text to measure on.", "-f", show_default="standard input"),
    against: str | None = option(
        None, "Compare with this second model, token by token.", metavar="MODEL", complete=complete_model
    ),
    adapter: list[str] | None = adapter_option(),
    windows: WindowOptions,
    devices: DeviceOptions,
    json_: bool = option(False, "Print one JSON object instead of lines."),
    messages: MessageOptions,
) -> None:
    """Measure a model's perplexity on a text, or compare two models.

    With --kv-cache int8 the second model, or the same one again, has an int8 KV cache. --adapter changes the first.

    Examples:

    llmcli eval my-model --file text.txt

    llmcli eval my-model --against my-int8 --file text.txt

    llmcli eval my-model --kv-cache int8 --file text.txt
    """
    adapters = parse_adapters(adapter)
    options = devices.checked()
    name = names.chosen
    text = read_text(file)
    sessions = [with_adapters(open_session(name), adapters)]
    if against is not None:
        sessions.append(open_session(against))
        require_same_tokenizer(*sessions)
    elif options.kv_cache != AUTO:
        sessions *= 2
    caches = [AUTO, options.kv_cache][: len(sessions)]
    window, stride = windows.resolve(sessions)
    evaluations, comparison = evaluate_models(sessions, options, text, window=window, stride=stride)
    models = [(session.name, cache) for session, cache in zip(sessions, caches, strict=True)]
    if json_:
        terminal.write_json(_as_json(models, evaluations, comparison))
        return
    terminal.write(_as_text(models, evaluations, comparison), wraps=True)
    terminal.write(f"{evaluations[0].num_tokens} tokens scored, windows of {window}, stride {stride}\n")


def _as_json(
    models: Sequence[tuple[str, str]], evaluations: Sequence[Evaluation], comparison: Comparison | None
) -> dict[str, object]:
    """`models` are the name and the KV cache of each."""
    records = [
        {"model": name, "kv_cache": cache, "perplexity": evaluation.perplexity} | dataclasses.asdict(evaluation)
        for (name, cache), evaluation in zip(models, evaluations, strict=True)
    ]
    divergence = {"mean_kl": comparison.mean_kl, "top1_agreement": comparison.top1_agreement} if comparison else {}
    return {"models": records, **divergence}


def _as_text(
    models: Sequence[tuple[str, str]], evaluations: Sequence[Evaluation], comparison: Comparison | None
) -> str:
    lines: list[str] = []
    for (name, cache), evaluation in zip(models, evaluations, strict=True):
        shown = name if cache == AUTO else f"{name}, KV cache {cache}"
        change = _change(evaluations[0].perplexity, evaluation.perplexity) if lines else ""
        lines.append(f"{shown}: perplexity {evaluation.perplexity:.4f}{change}\n")
    if comparison is not None:
        lines.append(
            f"mean KL divergence {divergence(comparison.mean_kl)} nats per token, "
            f"top-1 agreement {comparison.top1_agreement:.2%}\n"
        )
    return "".join(lines)


def _change(before: float, after: float) -> str:
    """How the second perplexity differs, and what that means."""
    size = f"{abs(after / before - 1):.3%}"
    if size == "0.000%":
        return ", the same"
    return f", {size} higher (worse)" if after > before else f", {size} lower (better)"
