"""Conversations that begin alike: whose cache entries can be copied, and for whose it pays to wait.

Entries are those of a token prefix under one version; both must be equal. A slot that was given back
keeps its entries until it is taken again, so a group's members share their prompt also when they come
one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Sharing(NamedTuple):
    sources: list[int]
    targets: list[int]
    """Slots that take the first `num_tokens` entries from `sources`."""
    num_tokens: list[int]
    waiting: set[int]
    """Slots whose prefix an earlier one is about to read."""


def sharing(
    pending: Sequence[int],
    *,
    tokens: np.ndarray,
    lengths: np.ndarray,
    cached: np.ndarray,
    versions: np.ndarray,
    min_tokens: int,
) -> Sharing:
    """What the slots of `pending` that hold nothing yet can take from others.

    The last token of a conversation is never taken over: what follows it has to be computed.

    Args:
        pending: slots with tokens to read, first come first.
        tokens: int32 [N, S], of all slots, free ones included.
        lengths: int32 [N], tokens of each slot.
        cached: int32 [N], leading tokens of each whose entries are valid …
        versions: int32 [N], … under this version; of pending ones the version that they are to be read with.
        min_tokens: the shortest prefix worth a copy, at least 1.
    """
    found = Sharing([], [], [], set())
    order = {slot: place for place, slot in enumerate(pending)}
    places = np.array([order.get(slot, -1) for slot in range(len(lengths))])
    for slot in pending:
        goal = int(lengths[slot]) - 1
        if cached[slot] > 0 or goal < min_tokens:
            continue
        promised = np.where((places >= 0) & (places < order[slot]), lengths, cached)
        usable = (versions == versions[slot]) & (promised >= min_tokens)
        usable &= tokens[:, min_tokens - 1] == tokens[slot, min_tokens - 1]
        usable[slot] = False
        others = np.flatnonzero(usable)
        if len(others) == 0:
            continue
        differs = tokens[others, :goal] != tokens[slot, :goal]
        common = np.where(differs.any(1), differs.argmax(1), goal)
        now = np.minimum(common, cached[others])
        later = np.minimum(common, promised[others])
        best = int(np.argmax(now))
        if later.max() > now[best]:
            found.waiting.add(slot)
        elif now[best] >= min_tokens:
            found.sources.append(int(others[best]))
            found.targets.append(slot)
            found.num_tokens.append(int(now[best]))
    return found
