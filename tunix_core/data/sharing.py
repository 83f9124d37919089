"""Several feeds of one learner: who reads which shard, and how their buffers' states become those of another number.

A writer's shards go to the feeds in turn, starting at one that follows from its name; so every feed has its share of
every writer, and the assignment needs no record. What each feed keeps is whole in itself: its cursors, its groups,
its ledger. A resumed learner joins the saved states and deals them out anew, to as many feeds as it has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tunix_core import paths
from tunix_core.data.ledger import Ledger

State = Mapping[str, Any]
"""The JSON part of `ReplayBuffer.state()`."""


def feed_of(incarnation: str, sequence: int, num_feeds: int) -> int:
    """The feed that reads this shard."""
    start = int.from_bytes(hashlib.sha256(incarnation.encode()).digest()[:4], "little")
    return (start + sequence) % num_feeds


def feed_of_shard(key: str, num_feeds: int) -> int:
    if num_feeds == 1:
        return 0
    name = paths.parse_shard(key)
    return feed_of(name.incarnation, name.sequence, num_feeds)


def ownership(feed: int, num_feeds: int) -> Callable[[str, int], bool]:
    """As `TrajectoryReader` takes it."""
    return lambda incarnation, sequence: feed_of(incarnation, sequence, num_feeds) == feed


def dealt(states: Sequence[State], feed: int, num_feeds: int) -> dict[str, Any]:
    """The state that one of `num_feeds` feeds goes on from.

    A group that two feeds delivered is the one's here that wins when they agree, whether they had yet or not: the one of
    the earlier round, then the lower feed's. A step record may name its rows. What the ledgers say of rows that no buffer holds any
    more goes to feed 0.

    Args:
        states: of all feeds at one clock, in their order.
    """
    entries = _joined_groups(states)
    mine = [entry for entry in entries if feed_of_shard(entry["shard"], num_feeds) == feed]
    replayed = [ref for state in states for ref in state["replayed"] if feed_of_shard(ref[0], num_feeds) == feed]
    ledger = Ledger()
    if feed == 0:
        kept = {(entry["shard"], entry["group_id"]) for entry in entries}
        held = [entry for state in states for entry in state["groups"]]
        lost = [entry for entry in held if (entry["shard"], entry["group_id"]) not in kept]
        ledger = Ledger.total([state["ledger"] for state in states])
        ledger.move("buffered", "duplicate", _lengths(lost))
        ledger.withdraw("buffered")
    ledger.receive("buffered", _lengths(mine))
    return {
        "clock": states[0]["clock"],
        "cursors": _joined_cursors(states),
        "ledger": ledger.state(),
        "missing_episodes": sum(state["missing_episodes"] for state in states) if feed == 0 else 0,
        "groups": mine,
        "replayed": sorted(replayed),
    }


def _lengths(entries: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Of what was not consumed yet."""
    return np.array([length for entry in entries if entry.get("uses", 0) == 0 for length in entry["lengths"]], np.int64)


def _joined_groups(states: Sequence[State]) -> list[dict[str, Any]]:
    """In order of arrival, feeds in turn; of each group one."""
    winner: dict[str, tuple[int, int]] = {}
    for feed, state in enumerate(states):
        for entry in state["groups"]:
            claim = (entry["round"], feed)
            winner[entry["group_id"]] = min(winner.get(entry["group_id"], claim), claim)
    found = []
    for place in range(max(len(state["groups"]) for state in states)):
        for feed, state in enumerate(states):
            if place < len(state["groups"]) and winner[state["groups"][place]["group_id"]][1] == feed:
                found.append(state["groups"][place])
    return found


def _joined_cursors(states: Sequence[State]) -> dict[str, Any] | None:
    """A cursor per writer: where the feed that is least far stands, and what others have read from there on."""
    given = [(feed, state["cursors"]) for feed, state in enumerate(states) if state["cursors"] is not None]
    if not given:
        return None
    names = {name for _, cursors in given for name in cursors["cursors"]}
    found = {}
    for name in sorted(names):
        own = {feed: cursors["cursors"][name] for feed, cursors in given if name in cursors["cursors"]}
        joined = dict(next(iter(own.values())))
        complete = len(own) == len(states)  # a feed that has not seen the writer stands at its beginning
        joined["next_sequence"] = low = min(c["next_sequence"] for c in own.values()) if complete else 0
        joined["hour"] = min(c["hour"] for c in own.values()) if complete else ""
        joined["closed"] = complete and all(c["closed"] for c in own.values())
        ahead = {
            sequence
            for feed, cursor in own.items()
            for sequence in range(low, cursor["next_sequence"])
            if feed_of(name, sequence, len(states)) == feed
        }
        ahead |= {sequence for cursor in own.values() for sequence in cursor.get("ahead", ()) if sequence >= low}
        joined.pop("ahead", None)
        if ahead:
            joined["ahead"] = sorted(ahead)
        found[name] = joined
    return {"format": given[0][1]["format"], "cursors": found}
