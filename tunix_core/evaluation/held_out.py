"""Held-out success of policy versions: what is stored, and how sure one can be of it.

One evaluation of one version is a folder

    evaluations/held_out/<evaluator version>-<code digest>/policy_version=<v>/<input digest>/
        part.parquet       one row per task
        transcripts.json   a sample of the dialogues, for people
        MANIFEST.json      value, interval, inputs; written last and create-only

so the same weights on the same tasks are evaluated once, and a new evaluator leaves the old rows
alone. Rolling out is the actor's work; this module takes its outcomes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tunix_core import paths
from tunix_core.config import RunConfig
from tunix_core.config_loading import config_to_dict
from tunix_core.errors import CorruptObject, ObjectExists
from tunix_core.evaluation.digest import evaluator_name, input_digest
from tunix_core.storage.store import ObjectStore

NAME = "held_out"
EVALUATOR_VERSION = 1
NUM_TRANSCRIPTS = 16
CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000
_RESAMPLE_BLOCK = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its bootstrap interval."""

    value: float
    low: float
    high: float
    n: int

    def to_dict(self) -> dict[str, float | int]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one held-out task."""

    task_seed: int
    reward: float
    success: bool
    num_turns: int
    num_tokens: int
    finish_reason: str
    messages: Sequence[Mapping[str, str]]
    """The dialogue, `{"role", "content"}` each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutEvaluation:
    """One stored evaluation of one policy version."""

    policy_version: int
    success: Interval
    mean_reward: float
    mean_turns: float
    created_at: float
    folder: str
    transcripts: Sequence[Mapping[str, Any]]
    """`{"task_seed", "success", "reward", "messages"}` each."""


def bootstrap_interval(
    outcomes: np.ndarray, *, seed: int, num_resamples: int = NUM_RESAMPLES, confidence: float = CONFIDENCE
) -> Interval:
    """Percentile bootstrap of the mean (Efron, 1979), seeded.

    Args:
        outcomes: [N] one number per task; tasks are the unit that is resampled.
        seed: of the resampling; the same outcomes and seed give the same interval.
        num_resamples: bootstrap samples.
        confidence: probability mass between `low` and `high`.

    Returns:
        Mean and interval; of no outcomes all are NaN.
    """
    outcomes = np.asarray(outcomes, np.float64)
    n = len(outcomes)
    if n == 0:
        return Interval(value=float("nan"), low=float("nan"), high=float("nan"), n=0)
    rng = np.random.default_rng(seed)
    means = np.concatenate(
        [
            outcomes[rng.integers(0, n, (min(_RESAMPLE_BLOCK, num_resamples - start), n))].mean(axis=1)
            for start in range(0, num_resamples, _RESAMPLE_BLOCK)
        ]
    )
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(value=float(outcomes.mean()), low=float(low), high=float(high), n=n)


def evaluation_digest(config: RunConfig, weights_digest: str, task_seeds: Sequence[int]) -> str:
    """Names the inputs: the weights, the tasks and all that a rollout depends on."""
    values = config_to_dict(config)
    behavior = {section: values[section] for section in ("model", "environment")}
    limits = ("context_tokens", "max_turns", "max_turn_tokens", "stop_ids", "stop_strings")
    behavior["limits"] = {key: values["actor"][key] for key in limits}
    sampling = ("greedy", "temperature", "top_k", "top_p", "min_p")
    behavior["sampling"] = {key: values["evaluation"][key] for key in sampling}
    return input_digest([weights_digest, *map(str, task_seeds), json.dumps(behavior, sort_keys=True)])


def evaluator() -> str:
    return evaluator_name(EVALUATOR_VERSION, __file__)


def evaluation_folder(policy_version: int, digest: str) -> str:
    return paths.evaluation(NAME, evaluator(), f"policy_version={policy_version:08d}", digest)


def is_evaluated(store: ObjectStore, policy_version: int, digest: str) -> bool:
    """Whether this version has its row for these inputs by this evaluator."""
    return store.exists(evaluation_folder(policy_version, digest) + paths.MANIFEST)


def write_evaluation(
    store: ObjectStore,
    policy_version: int,
    outcomes: Sequence[Outcome],
    *,
    digest: str,
    seed: int,
    policy_manifest: str,
    created_at: float | None = None,
) -> HeldOutEvaluation:
    """Store one evaluation; a second writer of the same inputs finds it done and writes nothing.

    Args:
        store: of the run.
        policy_version: what was evaluated.
        outcomes: one per held-out task.
        digest: from `evaluation_digest`.
        seed: of the bootstrap.
        policy_manifest: key of the manifest whose weights were loaded.
        created_at: seconds since the epoch; now by default.
    """
    folder = evaluation_folder(policy_version, digest)
    table = pa.table(
        {
            "policy_version": pa.array([policy_version] * len(outcomes), pa.int64()),
            "task_seed": pa.array([o.task_seed for o in outcomes], pa.int64()),
            "reward": pa.array([o.reward for o in outcomes], pa.float64()),
            "success": pa.array([o.success for o in outcomes], pa.bool_()),
            "num_turns": pa.array([o.num_turns for o in outcomes], pa.int64()),
            "num_tokens": pa.array([o.num_tokens for o in outcomes], pa.int64()),
            "finish_reason": pa.array([o.finish_reason for o in outcomes], pa.string()),
        }
    )
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    transcripts = [
        {"task_seed": o.task_seed, "success": o.success, "reward": o.reward, "messages": [dict(m) for m in o.messages]}
        for o in outcomes[:NUM_TRANSCRIPTS]
    ]
    files = {"part.parquet": sink.getvalue(), "transcripts.json": json.dumps(transcripts, indent=1).encode()}
    digests = {}
    for file_name, data in files.items():
        digests[file_name] = hashlib.sha256(_put_once(store, folder + file_name, data)).hexdigest()
    interval = bootstrap_interval(np.array([o.success for o in outcomes], np.float64), seed=seed)
    manifest = {
        "policy_version": policy_version,
        "policy_manifest": policy_manifest,
        "success": interval.to_dict(),
        "mean_reward": float(np.mean([o.reward for o in outcomes])) if outcomes else float("nan"),
        "mean_turns": float(np.mean([o.num_turns for o in outcomes])) if outcomes else float("nan"),
        "confidence": CONFIDENCE,
        "bootstrap_seed": seed,
        "sha256": digests,
        "created_at": time.time() if created_at is None else created_at,
    }
    _put_once(store, folder + paths.MANIFEST, json.dumps(manifest, indent=1).encode())
    return _read(store, folder)


def _put_once(store: ObjectStore, key: str, data: bytes) -> bytes:
    """Write, or keep what a writer of the same inputs wrote before; returns what the key holds."""
    try:
        store.put_if_absent(key, data)
    except ObjectExists:
        return store.get(key)
    return data


def _read(store: ObjectStore, folder: str) -> HeldOutEvaluation:
    manifest = json.loads(store.get(folder + paths.MANIFEST))
    transcripts = store.get(folder + "transcripts.json")
    received = hashlib.sha256(transcripts).hexdigest()
    accepted = manifest["sha256"]["transcripts.json"]
    if received != accepted:
        raise CorruptObject(f"{folder}transcripts.json: received sha256 {received}, accepted {accepted}")
    return HeldOutEvaluation(
        policy_version=int(manifest["policy_version"]),
        success=Interval(**manifest["success"]),
        mean_reward=float(manifest["mean_reward"]),
        mean_turns=float(manifest["mean_turns"]),
        created_at=float(manifest["created_at"]),
        folder=folder,
        transcripts=json.loads(transcripts),
    )


def read_evaluations(store: ObjectStore) -> dict[int, HeldOutEvaluation]:
    """The newest evaluation of every version, by version."""
    newest: dict[int, HeldOutEvaluation] = {}
    for key in store.list_after(f"{paths.EVALUATIONS}{NAME}/"):
        if key.endswith(f"/{paths.MANIFEST}"):
            found = _read(store, key.removesuffix(paths.MANIFEST))
            held = newest.get(found.policy_version)
            if held is None or found.created_at >= held.created_at:
                newest[found.policy_version] = found
    return dict(sorted(newest.items()))


def read_outcomes(store: ObjectStore, evaluation: HeldOutEvaluation) -> pa.Table:
    """The rows of one evaluation, one per task.

    Raises:
        CorruptObject: the file is not the one its manifest names.
    """
    key = evaluation.folder + "part.parquet"
    data = store.get(key)
    accepted = json.loads(store.get(evaluation.folder + paths.MANIFEST))["sha256"]["part.parquet"]
    received = hashlib.sha256(data).hexdigest()
    if received != accepted:
        raise CorruptObject(f"{key}: received sha256 {received}, accepted {accepted}")
    return pq.read_table(pa.BufferReader(data))
