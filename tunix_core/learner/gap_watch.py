"""Do actors speak with the weights that they name? What the step's log probability gaps say of each.

At equal version sampler and learner compute the same function of the same weights: what is left of a gap
is numerics. An actor whose weights did not arrive goes on to name new versions, and its gap grows with
every step that the policy moves on. Only tokens of the very version that a step starts from can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tunix_core import paths
from tunix_core.data.packing import sampler_number
from tunix_core.learner.batches import HostBatch
from tunix_core.learner.objectives import SAMPLER_GAP, SAMPLER_TOKENS

MAX_ALARMS = 5
"""Newest ones that the heartbeat repeats."""


class GapWatch:
    """
    Args:
        max_gap: mean gap of an actor's tokens at equal version, in nats, above which there is an alarm.
        log: takes a line for a person.
    """

    def __init__(self, max_gap: float, log: Callable[[str], None]) -> None:
        self._max_gap = max_gap
        self._log = log
        self.num_alarms = 0
        self.alarms: list[str] = []

    def look(self, host: HostBatch, values: Mapping[str, float]) -> dict[str, float]:
        """The step's figures with those by actor's number made into one, and an alarm where an actor is over the limit."""
        of_numbers = {
            int(name.removeprefix(SAMPLER_GAP)): gap for name, gap in values.items() if name.startswith(SAMPLER_GAP)
        }
        known = {number: gap for number, gap in of_numbers.items() if values[f"{SAMPLER_TOKENS}{number}"] > 0}
        over = {number: gap for number, gap in known.items() if not gap <= self._max_gap}
        for number, gap in sorted(over.items()):
            self._raise(host, number, gap)
        kept = {name: value for name, value in values.items() if not name.startswith((SAMPLER_GAP, SAMPLER_TOKENS))}
        if known:
            kept["max_actor_logprob_gap"] = max(known.values())
        return {**kept, "logprob_gap_alarms": self.num_alarms}

    def _raise(self, host: HostBatch, number: int, gap: float) -> None:
        actors = sorted(
            {
                actor
                for group in host.groups
                if sampler_number(actor := paths.parse_shard(group.rows.shard).actor_id) == number
                and ((group.rows.version_min == host.clock) & (group.rows.version_max == host.clock)).any()
            }
        )
        if not actors:
            return  # another host's, which names them
        self.num_alarms += 1
        text = (
            f"{' or '.join(actors)} does not speak with the weights it names: at policy version {host.clock} its log "
            f"probabilities are {gap:.3g} nats from the learner's on the mean, accepted {self._max_gap:g} "
            "(observability.max_logprob_gap)"
        )
        self.alarms = [*self.alarms, text][-MAX_ALARMS:]
        self._log(f"ALARM: {text}")

    def figures(self) -> dict[str, Any]:
        """For the heartbeat."""
        return {"num_alarms": self.num_alarms, "alarms": self.alarms}
