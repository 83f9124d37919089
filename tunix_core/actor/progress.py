"""What an actor tells about itself: figures for heartbeat and metrics, lines for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunix_core.actor.groups import GroupBook
from tunix_core.actor.policy_engine import PolicyEngine
from tunix_core.actor.scheduler import Scheduler

MAX_ALARMS = 5
"""Newest ones that the heartbeat repeats."""


def engine_figures(engine: PolicyEngine) -> dict[str, Any]:
    """Counts are since the start of the process."""
    counters = engine.counters
    return {
        "version": engine.version,
        "policy_tokens": counters.policy_tokens,
        "prefill_tokens": counters.prefill_tokens,
        "recomputed_tokens": counters.recomputed_tokens,
        "swaps": counters.swaps,
        "swap_seconds": round(counters.swap_seconds, 4),
        "decode_seconds": round(counters.decode_seconds, 3),
        "extend_seconds": round(counters.extend_seconds, 3),
        "decode_occupancy": counters.decode_live_rows / max(1, counters.decode_rows),
        "slots_free": engine.num_free,
        "slots_waiting_for_tools": engine.num_parked,
        **{f"engine_{name}": value for name, value in counters.of_kind.items()},
        "num_alarms": len(counters.alarms),
        "alarms": counters.alarms[-MAX_ALARMS:],
    }


def session_figures(scheduler: Scheduler) -> dict[str, Any]:
    """Of the sessions under way, and of their calls."""
    calls = scheduler.calls
    return {
        "sessions": scheduler.num_sessions,
        "abandoned_calls": calls.abandoned.num_now,
        "abandoned_calls_ever": calls.abandoned.num_ever,
        "failed_closes": calls.num_failed_closes,
        "cut_observations": scheduler.counters.num_cut_observations,
        "forks": scheduler.counters.num_forks,
    }


def group_figures(book: GroupBook) -> dict[str, Any]:
    """Counts are since the start of the process."""
    return {
        "episodes": book.num_episodes,
        "success_fraction": book.num_successes / max(1, book.num_episodes),
        "mean_reward": book.reward_sum / max(1, book.num_episodes),
        "finish_reasons": dict(book.finish_reasons),
        "failures": dict(book.failures),
        "failed_attempts": book.failures.total(),
        "lost_episodes": book.num_lost_episodes,
        "late_groups": book.num_late_groups,
        "closed_groups": book.num_closed_groups,
        "dropped_groups": book.num_dropped_groups,
    }


def line(figures: Mapping[str, Any]) -> str:
    """How it goes, in one line; what is as it should be is left out."""
    parts = [
        f"version {figures['version']}",
        f"{figures['tokens_per_second']:g} tokens/s",
        f"{figures['sessions']} sessions ({figures['slots_waiting_for_tools']} wait for tools, the oldest lasts "
        f"{figures['oldest_session_seconds']:g} s)",
        f"{figures['groups_in_flight']} of {figures['groups_allowed']} groups in flight",
        _work(figures),
    ]
    return " | ".join([*parts, *_troubles(figures)])


def last_line(figures: Mapping[str, Any], why: str) -> str:
    """What came of this life of the actor."""
    return " | ".join([f"ends: {why}", _work(figures), *_troubles(figures)])


def _work(figures: Mapping[str, Any]) -> str:
    return (
        f"{figures['episodes']} episodes, mean reward {figures['mean_reward']:.3f}, in {figures['closed_groups']} groups "
        f"and {figures['shards']} shards"
    )


def _troubles(figures: Mapping[str, Any]) -> list[str]:
    by_kind = ", ".join(f"{count} {kind}" for kind, count in sorted(figures["failures"].items()))
    found = [f"failed: {by_kind}"] if by_kind else []
    for name, words in (
        ("lost_episodes", "episodes lost"),
        ("dropped_groups", "groups dropped"),
        ("cut_observations", "answers cut"),
        ("abandoned_calls", "calls abandoned"),
        ("failed_closes", "environments not closed"),
        ("store_errors", "store errors"),
        ("num_alarms", "alarms"),
    ):
        found += [f"{figures[name]} {words}"] if figures[name] else []
    return found
