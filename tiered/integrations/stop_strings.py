"""Where the text of a model ends that is made piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Ends a text before the first of some strings. What may be the beginning of one waits until it is known not to be."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Return what of the text may be shown with ``text``, the next piece."""
        if self.found:
            return ""
        self._held += text
        places = [place for place in map(self._held.find, self._strings) if place >= 0]
        self.found = bool(places)
        end = min(places) if places else len(self._held) - self._waiting()
        shown, self._held = self._held[:end], "" if self.found else self._held[end:]
        return shown

    def end(self) -> str:
        """Return what has waited, after the last piece."""
        held, self._held = self._held, ""
        return held

    def _waiting(self) -> int:
        """Return how many characters at the end begin a stop string."""
        longest = max(map(len, self._strings), default=0) - 1
        lengths = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in lengths if any(one.startswith(self._held[-n:]) for one in self._strings)), 0)
