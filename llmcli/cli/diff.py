"""`llmcli diff`: two models in lockstep on one prompt."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.cli import lazy
from llmcli.cli.command import argument, option
from llmcli.cli.completion import complete_model
from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.evaluate import require_same_tokenizer
from llmcli.cli.options import DeviceOptions, MessageOptions
from llmcli.cli.output.page_kit import PAGE, write_page
from llmcli.cli.output.tokens import SPACE, show_piece
from llmcli.cli.progress import progress
from llmcli.cli.prompt import read_prompt
from llmcli.cli.session import Session, open_session
from llmcli.cli.terminal import has_color, terminal, visible
from llmcli.cli.units import divergence
from llmcli.errors import UsageError
from llmcli.tokenizer.base import StreamDecoder

if TYPE_CHECKING:
    from llmcli.cli.output.page_diff import DiffFacts
    from llmcli.measure.evaluate import DiffToken, Verdict

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
    devices: DeviceOptions,
    output: DiffOutput,
    messages: MessageOptions,
) -> None:
    r"""Show where model B differs from model A's text, token by token.

    Where B would have gone another way stands \[token>other]. On a terminal a token is tinted where B finds it more or
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
        write_page(output.html, lazy.render_diff_page(facts, tokens, numbers), replace=output.force)
        terminal.info(f"page: {output.html}")
    if output.json:
        entries = [{**dataclasses.asdict(token), "piece": tokenizer.piece(token.token_id)} for token in tokens]
        terminal.write_json({"tokens": entries, **dataclasses.asdict(numbers)})
        return
    with_color = has_color(sys.stdout)
    if sys.stdout.isatty():
        _show_legend(with_color)
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
) -> tuple[DiffFacts, list[DiffToken], Verdict]:
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
        tokens: list[DiffToken] = []
        shared = sessions[0].tokenizer, prompt.token_ids, max_new_tokens, sessions[0].eos_token_ids
        for token in lazy.diff(first, second, *shared):
            tokens.append(token)
            on_progress(len(tokens), max_new_tokens)
    facts = lazy.DiffFacts(
        first=sessions[0].name,
        second=sessions[1].name,
        device=second.description,
        prompt=text,
        prompt_token_ids=prompt.token_ids,
        tokenizer=sessions[0].tokenizer,
    )
    return facts, tokens, lazy.verdict(tokens)


def _show_legend(with_color: bool) -> None:
    """What the marks in the text mean."""
    terminal.info("A's text; [token>other] where B would choose another token")
    if with_color:
        tints = f"{MORE_LIKELY}more{RESET} or {LESS_LIKELY}less{RESET}"
        terminal.info(f"tinted where B finds A's token {tints} likely", is_drawn=True)


def _styled(token: DiffToken, text: str, other: str, with_color: bool) -> str:
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


def _agreement(num_tokens: int) -> str:
    if num_tokens == 0:
        return "they differ from the first token on"
    return "the first token is the same" if num_tokens == 1 else f"the first {num_tokens} tokens are the same"


def _sentence(numbers: Verdict) -> str:
    """The verdict in one line."""
    if numbers.num_divergences == 0:
        parting = f"B writes the same text, all {numbers.num_tokens} tokens"
    else:
        parting = (
            f"{_agreement(numbers.num_agreeing)}; B would choose another token at "
            f"{numbers.num_divergences} of {numbers.num_tokens}"
        )
    return (
        f"{parting}; mean KL divergence {divergence(numbers.mean_kl)} nats, "
        f"probability of a token changed by {numbers.mean_change:.2%} on average: {numbers.kinship}"
    )
