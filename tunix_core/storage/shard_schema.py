"""The columns of a trajectory shard, and the hash of what training reads from a row."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa

TOKEN_COLUMNS = ("tokens", "loss_mask", "behavior_logprobs", "token_policy_version")
"""The lists with one entry per token."""


def _list_of(value: pa.DataType) -> pa.ListType:
    return pa.list_(pa.field("element", value, nullable=False))


TURN = pa.struct(
    [
        pa.field("role", pa.string(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("end", pa.int32(), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("tool_name", pa.string(), nullable=False),
        pa.field("tool_ok", pa.bool_(), nullable=False),
        pa.field("seconds", pa.float64(), nullable=False),
    ]
)
_COMPONENTS = pa.map_(pa.string(), pa.field("value", pa.float64(), nullable=False))

SCHEMA = pa.schema(
    [
        pa.field(column, kind, nullable=False)
        for column, kind in (
            ("trajectory_id", pa.string()),
            ("episode_id", pa.string()),
            ("fork_index", pa.int32()),
            ("group_id", pa.string()),
            ("group_size", pa.int32()),
            ("task_id", pa.string()),
            ("environment", pa.string()),
            ("task_seed", pa.int64()),
            ("split", pa.string()),
            ("actor_id", pa.string()),
            ("incarnation", pa.string()),
            ("created_at", pa.float64()),
            ("num_tokens", pa.int32()),
            ("num_policy_tokens", pa.int32()),
            ("tokens", _list_of(pa.int32())),
            ("loss_mask", _list_of(pa.bool_())),
            ("behavior_logprobs", _list_of(pa.float32())),
            ("token_policy_version", _list_of(pa.int32())),
            ("policy_version_min", pa.int32()),
            ("policy_version_max", pa.int32()),
            ("temperature", pa.float64()),
            ("turns", _list_of(TURN)),
            ("reward", pa.float64()),
            ("reward_components", _COMPONENTS),
            ("finish_reason", pa.string()),
            ("generation_seconds", pa.float64()),
            ("environment_seconds", pa.float64()),
            ("messages", pa.string()),
            ("content_hash", pa.string()),
        )
    ]
)
"""Column names and types of schema version 1, in order."""

TRAJECTORY_SCALARS = tuple(
    field.name
    for field in SCHEMA
    if not pa.types.is_nested(field.type)
    and field.name
    not in ("num_tokens", "num_policy_tokens", "policy_version_min", "policy_version_max", "content_hash")
)
"""Those that a `Trajectory` has as they are."""


def content_hash(
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    behavior_logprobs: np.ndarray,
    token_policy_version: np.ndarray,
    reward: float,
) -> str:
    """SHA-256 (hex) of what training reads from a trajectory: four `[T]` arrays and the reward."""
    digest = hashlib.sha256(len(tokens).to_bytes(8, "little"))
    digest.update(np.ascontiguousarray(tokens, "<i4").data)
    digest.update(np.ascontiguousarray(loss_mask, "u1").data)
    digest.update(np.ascontiguousarray(behavior_logprobs, "<f4").data)
    digest.update(np.ascontiguousarray(token_policy_version, "<i4").data)
    digest.update(np.float64(reward).astype("<f8").tobytes())
    return digest.hexdigest()
