"""Virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Events:
    """What happens next. Of two things at one time, the one that was planned first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, action))

    def run(self, until: float) -> None:
        """Everything up to `until`, which becomes the present."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, action = heapq.heappop(heap)
            action()
        self.now = until
