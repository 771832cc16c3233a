"""`llmcli eval`: perplexity on a text, of one model or of two. `llmcli diff`: two models in lockstep on one prompt.

`quantize` compares an export with its source by the same functions.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmcli.cli import lazy, shared
from llmcli.cli.command import argument, option
from llmcli.cli.completion import complete_model
from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.output.page_kit import PAGE, write_page
from llmcli.cli.output.tokens import SPACE, show_piece
from llmcli.cli.progress import progress
from llmcli.cli.prompt import read_prompt, read_text
from llmcli.cli.session import Session, open_session
from llmcli.cli.terminal import has_color, terminal, visible
from llmcli.cli.units import divergence
from llmcli.errors import UsageError
from llmcli.tokenizer.base import StreamDecoder

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
) -> tuple[list[lazy.evaluate.Evaluation], lazy.evaluate.Comparison | None]:
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
            return [lazy.evaluate.evaluate(runner, token_ids, stride, bos_token_ids, on_progress)], None
        pair = lazy.evaluate.compare(runner, others[0], token_ids, stride, bos_token_ids, on_progress)
        return [pair.first, pair.second], pair


@dataclass(frozen=True)
class WindowOptions:
    """How a text is cut into windows."""

    context: int | None = shared.model_option(
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
    names: shared.ModelNames,
    file: Path | None = option(None, "Text to measure on.", "-f", show_default="standard input"),
    against: str | None = option(
        None, "Compare with this second model, token by token.", metavar="MODEL", complete=complete_model
    ),
    adapter: list[str] | None = shared.adapter_option(),
    windows: WindowOptions,
    devices: shared.DeviceOptions,
    json_: bool = option(False, "Print one JSON object instead of lines."),
    messages: shared.MessageOptions,
) -> None:
    """Measure a model's perplexity on a text, or compare two models.

    A figure's 95% interval says how sure it is; the difference of two models has one of its own, token by token.
    With --kv-cache int8 the second model, or the same one again, has an int8 KV cache. --adapter changes the first.

    Examples:

    llmcli eval my-model --file text.txt

    llmcli eval my-model --against my-int8 --file text.txt

    llmcli eval my-model --kv-cache int8 --file text.txt
    """
    adapters = shared.parse_adapters(adapter)
    options = devices.checked()
    name = names.chosen
    text = read_text(file)
    sessions = [shared.with_adapters(open_session(name), adapters)]
    if against is not None:
        sessions.append(open_session(against))
        require_same_tokenizer(*sessions)
    elif options.kv_cache != shared.AUTO:
        sessions *= 2
    caches = [shared.AUTO, options.kv_cache][: len(sessions)]
    window, stride = windows.resolve(sessions)
    evaluations, comparison = evaluate_models(sessions, options, text, window=window, stride=stride)
    models = [(session.name, cache) for session, cache in zip(sessions, caches, strict=True)]
    if json_:
        terminal.write_json(_as_json(models, evaluations, comparison))
        return
    terminal.write(_as_text(models, evaluations, comparison), wraps=True)
    ranges = "in parentheses 95% intervals" if evaluations[0].nll_interval else "too few for 95% intervals"
    terminal.write(f"{evaluations[0].num_tokens} tokens scored, windows of {window}, stride {stride}; {ranges}\n")


def _as_json(
    models: Sequence[tuple[str, str]],
    evaluations: Sequence[lazy.evaluate.Evaluation],
    comparison: lazy.evaluate.Comparison | None,
) -> dict[str, object]:
    """`models` are the name and the KV cache of each."""
    records = [
        {
            "model": name,
            "kv_cache": cache,
            "perplexity": evaluation.perplexity,
            "perplexity_interval": evaluation.perplexity_interval,
        }
        | dataclasses.asdict(evaluation)
        for (name, cache), evaluation in zip(models, evaluations, strict=True)
    ]
    if comparison is None:
        return {"models": records}
    figures = ["perplexity_change", "perplexity_change_interval", "perplexity_differs", "mean_kl", "mean_kl_interval"]
    figures += ["top1_agreement", "top1_agreement_interval"]
    return {"models": records, **{figure: getattr(comparison, figure) for figure in figures}}


def _as_text(
    models: Sequence[tuple[str, str]],
    evaluations: Sequence[lazy.evaluate.Evaluation],
    comparison: lazy.evaluate.Comparison | None,
) -> str:
    lines: list[str] = []
    for (name, cache), evaluation in zip(models, evaluations, strict=True):
        shown = name if cache == shared.AUTO else f"{name}, KV cache {cache}"
        sure = _range(evaluation.perplexity_interval, "{:.4f}")
        change = f", {describe_change(comparison)}" if lines and comparison is not None else ""
        lines.append(f"{shown}: perplexity {evaluation.perplexity:.4f}{sure}{change}\n")
    if comparison is not None:
        ends = comparison.mean_kl_interval
        sure = "" if ends is None else f" ({' to '.join(map(divergence, ends))})"
        lines.append(
            f"mean KL divergence {divergence(comparison.mean_kl)}{sure} nats per token, "
            f"top-1 agreement {comparison.top1_agreement:.2%}{_range(comparison.top1_agreement_interval, '{:.2%}')}\n"
        )
    return "".join(lines)


def _range(interval: tuple[float, float] | None, form: str) -> str:
    return "" if interval is None else f" ({' to '.join(map(form.format, interval))})"


def describe_change(comparison: lazy.evaluate.Comparison) -> str:
    """How the second perplexity differs, and what that means; a difference within its interval is none."""
    change, sure = comparison.perplexity_change, _range(comparison.perplexity_change_interval, "{:+.3%}")
    if comparison.perplexity_differs is False and any(comparison.nll_change_interval or ()):
        return f"no difference that this text shows{sure}"
    size = f"{abs(change):.3%}"
    if size == "0.000%":
        return "the same"
    return f"{size} {'higher (worse)' if change > 0 else 'lower (better)'}{sure}"


# A token is tinted from this change of its probability on; grey-green for more, amber for less. Both contrast with
# black and with white.
NOTABLE_CHANGE = 0.02
MORE_LIKELY, LESS_LIKELY, RESET = "\x1b[38;5;65m", "\x1b[38;5;130m", "\x1b[0m"


@dataclass(frozen=True)
class DiffOutput:
    """What is written. Raises: UsageError for a page that cannot be written"""

    html: Path | None = option(None, "Write the text as a page that shows both models' choices.")
    force: bool = option(False, "Replace an older page of --html.")
    json: bool = option(False, "Print one JSON object instead of text.")

    def __post_init__(self) -> None:
        if self.force and self.html is None:
            raise UsageError("--force needs --html FILE")
        if self.html is not None:
            PAGE.check(self.html, replace=self.force)  # before minutes of work


def diff(
    *,
    first: str = argument(..., "Model that writes the text: folder or hub id.", metavar="A", complete=complete_model),
    second: str = argument(..., "Model to compare with it.", metavar="B", complete=complete_model),
    prompt: str | None = argument(None, "Text to continue; without it, or with `-`, read standard input."),
    file: Path | None = option(None, "Read the prompt from a file.", "-f"),
    max_new_tokens: int = option(128, "New tokens to compare.", min=1),
    devices: shared.DeviceOptions,
    output: DiffOutput,
    messages: shared.MessageOptions,
) -> None:
    """Show where model B differs from model A's text, token by token.

    Where B would have gone another way stands [token>other]. On a terminal a token is tinted where B finds it more or
    less likely. --kv-cache int8 is for B.

    Examples:

    llmcli diff my-model my-int8 "Once upon a time"

    llmcli diff my-model my-int4 -f prompt.txt --html d.html
    """
    options = devices.checked()
    text = read_prompt(prompt, file)
    sessions = [open_session(name) for name in (first, second)]
    require_same_tokenizer(*sessions)
    facts, tokens, numbers = _follow(sessions, options, text, max_new_tokens)
    tokenizer = facts.tokenizer
    if output.html is not None:
        write_page(output.html, lazy.page_diff.render_diff_page(facts, tokens, numbers), replace=output.force)
        terminal.info(f"page: {output.html}")
    if output.json:
        entries = [{**dataclasses.asdict(token), "piece": tokenizer.piece(token.token_id)} for token in tokens]
        terminal.write_json({"tokens": entries, **dataclasses.asdict(numbers)})
        return
    with_color = has_color(sys.stdout)
    if sys.stdout.isatty():
        terminal.info("A's text; [token>other] where B would choose another token")
        if with_color:
            tints = f"{MORE_LIKELY}more{RESET} or {LESS_LIKELY}less{RESET}"
            terminal.info(f"tinted where B finds A's token {tints} likely", is_drawn=True)
    terminal.show_prompt(text)
    decoder = StreamDecoder(tokenizer, at_start=False)
    for token in tokens:
        other = show_piece(tokenizer, token.second_choice)
        styled = _styled(token, decoder.push(token.token_id), other, with_color)
        terminal.write(styled, is_drawn=with_color, wraps=True)
    terminal.write(f"{decoder.flush()}\n", wraps=True)
    if sys.stdout.isatty():
        terminal.write("\n")
    terminal.write(f"{_sentence(numbers)}\n", wraps=True)


def _follow(
    sessions: list[Session], options: RunnerOptions, text: str, max_new_tokens: int
) -> tuple[lazy.page_diff.DiffFacts, list[lazy.evaluate.DiffToken], lazy.evaluate.Verdict]:
    """Two models in lockstep on one prompt; a requested int8 KV cache is the second one's."""
    prompt = sessions[0].encode_prompt(text)
    context = len(prompt.token_ids) + max_new_tokens
    for session in sessions:
        longest = session.model.config.max_position_embeddings
        session.limit_new_tokens(max_new_tokens, len(prompt.token_ids), longest)
    first = sessions[0].load_runner(options.with_usual_cache, context)[0]
    second = sessions[1].load_runner(options, context)[0]
    terminal.info(f"{sessions[0].name} against {sessions[1].name}: {first.description}{options.note}")
    with progress("comparing", unit="tokens") as on_progress:
        tokens: list[lazy.evaluate.DiffToken] = []
        common = sessions[0].tokenizer, prompt.token_ids, max_new_tokens, sessions[0].eos_token_ids
        for token in lazy.evaluate.diff(first, second, *common):
            tokens.append(token)
            on_progress(len(tokens), max_new_tokens)
    facts = lazy.page_diff.DiffFacts(
        first=sessions[0].name,
        second=sessions[1].name,
        device=second.description,
        prompt=text,
        prompt_token_ids=prompt.token_ids,
        tokenizer=sessions[0].tokenizer,
    )
    return facts, tokens, lazy.evaluate.verdict(tokens)


def _styled(token: lazy.evaluate.DiffToken, text: str, other: str, with_color: bool) -> str:
    """A token's text; empty while a character that spans tokens is unfinished."""
    shown = text if token.agrees else marked(text, other)
    if not with_color:
        return shown
    change = token.second_probability - token.first_probability
    style = MORE_LIKELY if change >= NOTABLE_CHANGE else LESS_LIKELY if change <= -NOTABLE_CHANGE else ""
    return f"{style}{visible(shown)}{RESET}" if style else visible(shown)


def marked(text: str, other: str) -> str:
    """A's token and B's; a space that both begin with goes before them, so that lines break there."""
    if text.startswith(" ") and other.startswith(SPACE):
        return f" [{text[1:]}>{other[1:]}]"
    return f"[{text.replace(' ', SPACE)}>{other}]"


def _sentence(numbers: lazy.evaluate.Verdict) -> str:
    """The verdict in one line."""
    first = {0: "they differ from the first token on", 1: "the first token is the same"}
    same = first.get(numbers.num_agreeing, f"the first {numbers.num_agreeing} tokens are the same")
    parting = f"{same}; B would choose another token at {numbers.num_divergences} of {numbers.num_tokens}"
    if numbers.num_divergences == 0:
        parting = f"B writes the same text, all {numbers.num_tokens} tokens"
    return (
        f"{parting}; mean KL divergence {divergence(numbers.mean_kl)} nats, "
        f"probability of a token changed by {numbers.mean_change:.2%} on average: {numbers.kinship}"
    )
