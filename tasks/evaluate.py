"""Evaluations over a run: saved trajectories by the hour, or a policy version on held-out tasks.

python -m tasks.evaluate --run URI trajectories --start ISO --end ISO
python -m tasks.evaluate --run URI held-out --version N|first|last
"""

from __future__ import annotations

import argparse
import datetime as dt
import sys

from tasks.entry import Task, run_task
from tunix_core import paths
from tunix_core.errors import ConfigError, ObjectMissing
from tunix_core.evaluation import held_out, trajectories
from tunix_core.storage.leases import leased
from tunix_core.storage.policies import PolicyStore


def _moment(field: str, text: str) -> dt.datetime:
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(field, text, "an ISO 8601 moment such as 2026-11-30T04:00+00:00", "Mend it.") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)


def _evaluate_trajectories(task: Task) -> None:
    start, end = _moment("--start", task.arguments.start), _moment("--end", task.arguments.end)
    for hour in trajectories.evaluate_interval(task.store, start, end):
        state = "written" if hour.written else "already there"
        skipped = f", {len(hour.skipped)} unreadable" if hour.skipped else ""
        task.log(
            f"{hour.partition}: {hour.table.num_rows} rows from {hour.num_shards} shards{skipped}, "
            f"{state} in {hour.folder}"
        )


def choose_version(policies: PolicyStore, text: str) -> int:
    """`first`, `last` or a number of a published version.

    Raises:
        ConfigError: no such version.
    """
    versions = policies.versions()
    accepted = f"first, last or one of {len(versions)} published versions"
    if not versions:
        raise ConfigError("--version", text, accepted, "Nothing is published yet.")
    if text in ("first", "last"):
        return versions[0] if text == "first" else versions[-1]
    if not text.isdecimal() or int(text) not in versions:
        raise ConfigError("--version", text, accepted, "Look at policies/ of the run.")
    return int(text)


def evaluate_held_out(task: Task, version: int) -> held_out.HeldOutEvaluation:
    """Rollouts of one published version on the held-out tasks; done before, it is only read."""
    from tunix_core.environments import task_seed

    policies = PolicyStore(task.store)
    manifest = policies.manifest(version)
    config = task.config
    seeds = [task_seed("held_out", i, config.seed) for i in range(config.evaluation.num_tasks)]
    weights = ",".join(sorted(str(entry["sha256"]) for entry in manifest["files"].values()))
    digest = held_out.evaluation_digest(config, weights, seeds)
    if not held_out.is_evaluated(task.store, version, digest):
        with leased(task.store, [paths.policy(version)], reader=task.process):
            _roll_out(task, version, seeds, digest)
    return held_out.read_evaluations(task.store)[version]


def _roll_out(task: Task, version: int, seeds: list[int], digest: str) -> None:
    # JAX only when there is something to roll out.
    from tunix_core.actor.rollout import Evaluator, evaluation_request
    from tunix_core.distributed.compilation import enable_compilation_cache
    from tunix_core.pretrained.loading import PolicyLoader

    enable_compilation_cache()
    loader = PolicyLoader(PolicyStore(task.store), task.config.model)
    params = loader.load(version)
    evaluator = Evaluator(task.config, params, request=evaluation_request(task.config.evaluation))
    rollouts = evaluator.run(params, seeds)
    outcomes = [
        held_out.Outcome(
            task_seed=seed,
            reward=float(rollouts.rewards[i]),
            success=bool(rollouts.success[i]),
            num_turns=int(rollouts.num_turns[i]),
            num_tokens=int(rollouts.num_policy_tokens[i]),
            finish_reason=rollouts.finish_reasons[i],
            messages=rollouts.transcripts[i],
        )
        for i, seed in enumerate(seeds)
    ]
    held_out.write_evaluation(
        task.store,
        version,
        outcomes,
        digest=digest,
        seed=task.config.seed,
        policy_manifest=paths.policy(version) + paths.MANIFEST,
    )


def _evaluate(task: Task) -> None:
    if task.arguments.what == "trajectories":
        _evaluate_trajectories(task)
        return
    try:
        version = choose_version(PolicyStore(task.store), task.arguments.version)
        found = evaluate_held_out(task, version)
    except ObjectMissing as error:
        raise ConfigError("--version", task.arguments.version, "a published version", f"{error}.") from error
    s = found.success
    task.log(f"version {version}: held-out success {s.value:.3f} ({s.low:.3f} to {s.high:.3f}, {s.n} tasks)")


def _configure(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", required=True)
    hours = kinds.add_parser("trajectories", help="the shards of the hours in an interval")
    hours.add_argument("--start", required=True, help="ISO 8601; UTC without an offset")
    hours.add_argument("--end", required=True, help="ISO 8601, exclusive")
    policy = kinds.add_parser("held-out", help="a policy version on held-out tasks, greedily")
    policy.add_argument("--version", default="last", help="first, last or a number (%(default)s)")


def main(argv: list[str] | None = None) -> int:
    return run_task("evaluate", _evaluate, argv, configure=_configure)


if __name__ == "__main__":
    sys.exit(main())
