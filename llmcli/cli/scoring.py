"""Scores a text by one model, or by two that are compared: for `eval`, and for the figures of an export."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcli.cli import lazy
from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.progress import progress
from llmcli.cli.session import Session
from llmcli.cli.terminal import terminal
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from llmcli.measure.evaluate import Comparison, Evaluation


def require_same_tokenizer(first: Session, second: Session) -> None:
    """Refuse two models that cannot be compared token by token.

    Raises: UsageError.
    """
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

    Of two the first is the measure: an int8 KV cache that the options ask for is the second one's.
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
