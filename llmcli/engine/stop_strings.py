"""Stop strings, matched on decoded text however the tokens cut it; a match is never shown, not even in part."""

from collections.abc import Sequence


class StopStrings:
    """Passes text through until one of the stop strings appears in it.

    Text that could still turn out to be the start of a stop string is held back until it is decided. Where several
    match, the one that begins first counts.
    """

    def __init__(self, stop_strings: Sequence[str]):
        self._stop_strings = [stop for stop in stop_strings if stop]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take new text; return what is safe to show, and whether a stop string was found (nothing follows then)."""
        if not self._stop_strings:
            return text, False
        self._held += text
        starts = [start for stop in self._stop_strings if (start := self._held.find(stop)) >= 0]
        if starts:
            shown, self._held = self._held[: min(starts)], ""
            return shown, True
        keep = self._longest_open_suffix()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, False

    def flush(self) -> str:
        """The text still held back, when nothing more will come."""
        held, self._held = self._held, ""
        return held

    def _longest_open_suffix(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max((len(stop) - 1 for stop in self._stop_strings), default=0))
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop_strings):
                return length
        return 0
