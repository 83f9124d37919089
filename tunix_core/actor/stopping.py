"""Stop strings: which token of a turn completes one of them.

Text is decoded over a window of the turn's last tokens, so that a long turn costs no more per token
than a short one. A window may begin inside a character: bytes of UTF-8 say where characters begin, so a
stop string behind the broken one is decoded as in the whole turn. Replacement characters, of broken or
unfinished characters, count as nothing when the window is cut, so it holds what a match needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_BROKEN = "\ufffd"


class StopScanner:
    """Follows one turn.

    Args:
        decode: ids to text, `Tokenizer.decode`.
        strings: at least one, none empty.
    """

    def __init__(self, decode: Decode, strings: Sequence[str]) -> None:
        self._decode = decode
        self._strings = tuple(strings)
        self._margin = max(map(len, self._strings)) + 1  # one more: a decoder may strip a leading space
        self._window: list[int] = []

    def feed(self, ids: list[int]) -> int | None:
        """How many of the turn's next `ids` are kept; None: all, and nothing has ended."""
        known = len(self._window)
        self._window += ids
        if self._matches(self._window):
            return next(n for n in range(1, len(ids) + 1) if self._matches(self._window[: known + n]))
        # Twice the bytes that a match can have, so that cutting is rare.
        size = 4 * self._margin
        if len(self._window) > 2 * size:
            text = self._decode(self._window[-size:])
            if len(text) - text.count(_BROKEN) >= self._margin:
                del self._window[:-size]
        return None

    def _matches(self, ids: list[int]) -> bool:
        text = self._decode(ids)
        return any(string in text for string in self._strings)
