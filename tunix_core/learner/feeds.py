"""What all feeds of the learner hold together: for the pacing signal, the heartbeat and the ledger of the whole run.

Each host that leads a feed puts its figures up once per pulse and sees the others' as of their last one; its own
are live. A host that leads none sees all as the others do. A ledger in balance on every feed is in balance as a sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunix_core.data.buffer import ReplayBuffer
from tunix_core.data.ledger import Ledger
from tunix_core.distributed.hosts import Hosts, Share

_BOARD = "feeds"


class Feeds:
    """One per learner process; `exchange` belongs to the pulse."""

    def __init__(self, buffer: ReplayBuffer, hosts: Hosts, share: Share) -> None:
        self._buffer = buffer
        self._hosts = hosts
        self._share = share
        self._others: dict[int, Mapping[str, Any]] = {}
        """Of the feeds that other hosts lead."""

    def exchange(self) -> None:
        """Put up this feed's figures and look at the others'. Raises PeerLost."""
        if self._hosts.alone:
            return
        if self._share.leads:
            self._hosts.post(_BOARD, self._own())
        self._others = {view["feed"]: view for view in self._hosts.posted(_BOARD).values()}

    def _own(self) -> dict[str, Any]:
        buffer = self._buffer
        with buffer.lock:
            waiting = buffer.num_fresh(buffer.clock)
            return {
                "feed": self._share.feed,
                "fresh": waiting + buffer.num_reserved(),
                "waiting": waiting,
                "cursors": (buffer.cursors or {"cursors": {}})["cursors"],
                "ledger": buffer.ledger.state(),
                "missing_episodes": buffer.missing_episodes,
            }

    def _all(self) -> list[Mapping[str, Any]]:
        """Of every feed; one that has not put up anything has nothing."""
        empty = {"fresh": 0, "waiting": 0, "cursors": {}, "ledger": Ledger().state(), "missing_episodes": 0}
        own = {self._share.feed: self._own()} if self._share.leads else {}
        return [own.get(feed) or self._others.get(feed, empty) for feed in range(self._share.num_feeds)]

    def queued_groups(self) -> int:
        """Fresh groups that whole batches can take, those reserved included: the feed that has fewest counts.

        Were it the sum, a feed with many could close admission while another has none.
        """
        return min(view["fresh"] for view in self._all()) * self._share.num_feeds

    def waiting_groups(self) -> int:
        """Fresh groups, over all feeds."""
        return sum(view["waiting"] for view in self._all())

    def ledger(self) -> Ledger:
        return Ledger.total([view["ledger"] for view in self._all()])

    def missing_episodes(self) -> int:
        return sum(view["missing_episodes"] for view in self._all())

    def live_cursors(self) -> dict[str, dict[str, Any]]:
        """Of the writers that have not ended, in rank order, as far as their shards are in all feeds' buffers."""
        views = self._all()
        found: dict[str, dict[str, Any]] = {}
        for name in {name for view in views for name in view["cursors"]}:
            own = [view["cursors"].get(name) for view in views]
            known = [cursor for cursor in own if cursor is not None]
            if not any(cursor["closed"] for cursor in known):
                found[name] = dict(known[0]) | {"next_sequence": min(c["next_sequence"] if c else 0 for c in own)}
        return dict(sorted(found.items(), key=lambda item: (item[1]["created_at"], item[0])))
