"""Rollouts for evaluation: what is left when they are over."""

from __future__ import annotations

import asyncio

import pytest

from tests.actor.scripted import CONFIG, ScriptedEnvironment, no_fault
from tests.actor.support import weights
from tunix_core.actor import rollout


def test_environments_are_closed_before_a_rollout_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Slow(ScriptedEnvironment):
        async def close(self) -> None:
            await asyncio.sleep(0.3)
            closed.append(self)

    monkeypatch.setattr(rollout, "make_environment", lambda *_, **__: Slow(no_fault, 0))
    rollout.Evaluator(CONFIG, weights(0), num_slots=4).run(weights(0), [2, 4])
    assert len(closed) == 2
