"""Packed windows of random trajectories, and their plain form for oracles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Packed(NamedTuple):
    """N windows of W tokens; segments are contiguous, 0 is padding."""

    segment_ids: np.ndarray  # int32 [N, W]
    mask: np.ndarray  # bool [N, W], policy tokens

    def draw(self, seed: int, junk: float = np.nan) -> np.ndarray:
        """float32 [N, W] values at policy tokens, `junk` elsewhere."""
        values = np.random.default_rng(seed).normal(size=self.mask.shape).astype(np.float32)
        return np.where(self.mask, values, np.float32(junk))

    def segments(self) -> Iterator[tuple[int, np.ndarray]]:
        """Window and the columns of the policy tokens of each trajectory, in order; some have none."""
        for window, ids in enumerate(self.segment_ids):
            for segment in np.unique(ids[ids > 0]):
                yield window, np.flatnonzero((ids == segment) & self.mask[window])


def packed(seed: int, num_windows: int = 3, window_tokens: int = 24) -> Packed:
    """Segments of 1 to 9 tokens until the window is nearly full; one of them without a policy token."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((num_windows, window_tokens), np.int32)
    mask = rng.random((num_windows, window_tokens)) < 0.6
    for window in range(num_windows):
        start, segment = 0, 0
        while (length := int(rng.integers(1, 10))) <= window_tokens - start:
            segment += 1
            ids[window, start : start + length] = segment
            start += length
    mask[ids == 0] = False
    mask[ids == 1] = False
    return Packed(ids, mask)
