"""`HeldGuesses`: where a schema leaves a text no choice of characters, these are the drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmcli.engine.drafts import Guesses

if TYPE_CHECKING:
    from llmcli.schema.schema import HeldText

_FORCED = -1  # the kind of such guesses; the model may write the same characters in other tokens


class HeldGuesses:
    """The guesses of a text that is held to a schema: what is forced, else those of another source."""

    def __init__(self, guesses: Guesses, held_text: HeldText):
        self._guesses = guesses
        self._held_text = held_text
        self._forced: tuple[int, ...] = ()

    def extend(self, token_ids: Sequence[int]) -> None:
        """See `Guesses.extend`."""
        self._guesses.extend(token_ids)

    def kind(self) -> int | None:
        """See `Guesses.kind`."""
        self._forced = self._held_text.forced_tokens()
        return _FORCED if self._forced else self._guesses.kind()

    def guess(self, count: int) -> tuple[int, ...]:
        """See `Guesses.guess`."""
        return self._forced[:count] if self._forced else self._guesses.guess(count)

    def close(self) -> None:
        """See `Guesses.close`."""
        self._guesses.close()
