"""Stop strings, matched on decoded text however the tokens cut it; a match is never shown, not even in part.

The strings of special tokens are part of the text that is matched, though never shown.
"""

from collections.abc import Sequence


class StopStrings:
    """Passes text through until one of the stop strings appears in it.

    Text that could still turn out to be the start of a stop string is held back until it is decided. Where several
    match, the one that begins first counts.
    """

    def __init__(self, stop_strings: Sequence[str]):
        self._stop_strings = [stop for stop in stop_strings if stop]
        self._held = ""
        self._hidden: list[tuple[int, int]] = []  # where special tokens begin and end in it

    @property
    def is_empty(self) -> bool:
        """Whether there is none, so that nothing is held back."""
        return not self._stop_strings

    def is_completed_by(self, special: str) -> bool:
        """Whether the string of a special token completes a stop string that begins in the text held back."""
        return any(0 <= (self._held + special).find(stop) < len(self._held) for stop in self._stop_strings)

    def push(self, text: str, special: str = "") -> tuple[str, bool]:
        """Take new text, and the string of a special token that follows it.

        Return what is safe to show, and whether a stop string was found (nothing follows then).
        """
        if self.is_empty:
            return text, False
        self._held += text
        if special:
            self._hidden.append((len(self._held), len(self._held) + len(special)))
            self._held += special
        starts = [start for stop in self._stop_strings if (start := self._held.find(stop)) >= 0]
        if starts:
            shown, self._held, self._hidden = self._take(min(starts)), "", []
            return shown, True
        return self._take(len(self._held) - self._longest_open_suffix()), False

    def flush(self) -> str:
        """The text still held back, when nothing more will come."""
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        """Cut the first characters off what is held; return them without those of special tokens."""
        taken, self._held = self._held[:count], self._held[count:]
        if not self._hidden:
            return taken
        shown, position = "", 0
        for start, end in self._hidden:
            shown += taken[position:start]
            position = end
        self._hidden = [(max(start - count, 0), end - count) for start, end in self._hidden if end > count]
        return shown + taken[position:]

    def _longest_open_suffix(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max((len(stop) - 1 for stop in self._stop_strings), default=0))
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop_strings):
                return length
        return 0
