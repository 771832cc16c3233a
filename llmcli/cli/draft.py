"""`--draft`: where drafts of a run come from. They make it faster; its text is the same with every choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcli.cli import lazy
from llmcli.cli.device_choice import RunnerOptions
from llmcli.cli.session import Session, open_session
from llmcli.cli.terminal import terminal
from llmcli.errors import LLMCliError, UsageError

if TYPE_CHECKING:
    from llmcli.engine.drafts import Drafting
    from llmcli.runners.base import Runner
    from llmcli.tokenizer.base import Tokenizer

OFF, AUTO, NGRAM = WORDS = ("off", "auto", "ngram")


@dataclass(frozen=True)
class Draft:
    """The choice, and the draft model if it names one that can be used. Its weights are not read yet."""

    choice: str
    session: Session | None = None

    def load(self, runner: Runner, devices: RunnerOptions, context: int) -> Drafting | None:
        """What drafts for `runner`; None if nothing does.

        A draft model that cannot be loaded is not worth a text: a line says so, and the run has no drafts.
        """
        if self.choice == OFF or (self.choice not in WORDS and self.session is None):
            return None
        if not runner.limits.max_drafts:
            if self.choice != AUTO:
                terminal.warn(f"--draft {self.choice} has no effect: drafts are not yet verified on this device")
            return None
        if self.session is None:
            return lazy.Drafting(lazy.NgramSource(), least=int(self.choice == NGRAM), on_problem=_say_problem)
        try:
            most = self.session.model.config.max_position_embeddings
            num_rows = min(runner.limits.num_rows, lazy.MAX_DRAFT_ROWS)
            drafter, _ = self.session.load_runner(devices, min(context, most), num_rows, host_rows=num_rows)
        except LLMCliError as error:
            _say_problem(error)
            return None
        terminal.info(f"Drafts by {self.session.name}: {drafter.description}")
        return lazy.Drafting(lazy.DraftModel(drafter), on_problem=_say_problem)


def open_draft(choice: str, session: Session) -> Draft:
    """Check the value of --draft, and the files of the draft model for `session`'s model if it names one.

    Raises: UsageError for an empty name; CheckpointError and its subclasses for a model that is not there
    """
    if not choice:
        raise UsageError(f"--draft is empty, expected {', '.join(WORDS)} or a model")
    if choice in WORDS:
        return Draft(choice)
    try:
        drafter = open_session(choice)
    except LLMCliError as error:
        raise type(error)(f"--draft is none of {', '.join(WORDS)}, so it names a model: {error}") from error
    if problem := _find_difference(session.tokenizer, drafter.tokenizer):
        terminal.warn(f"--draft: {drafter.name} has another vocabulary than {session.name}: {problem}; no drafts")
        return Draft(choice)
    return Draft(choice, drafter)


def _find_difference(first: Tokenizer, second: Tokenizer) -> str | None:
    """The first token that is not the same in two vocabularies; None if all are."""
    if first.vocab_size != second.vocab_size:
        return f"{second.vocab_size} tokens, not {first.vocab_size}"
    for token_id in range(first.vocab_size):
        texts = second.token_bytes(token_id), first.token_bytes(token_id)
        if texts[0] != texts[1]:
            return f"token {token_id} is {texts[0]!r}, not {texts[1]!r}"
    return None


def _say_problem(error: LLMCliError) -> None:
    terminal.warn(f"--draft: {error}; the run continues without drafts")
