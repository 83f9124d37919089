"""Which rows of a decoded shard must not be used, and why. The others stay usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tunix_core.storage.shard_schema import SCHEMA, TOKEN_COLUMNS, TURN, content_hash
from tunix_core.types import SPLITS

if TYPE_CHECKING:
    from tunix_core.storage.shards import ShardRows

Blame = Callable[[np.ndarray, str], None]
"""(rows, reason); the first reason given for a row stands."""

MAX_NAME_BYTES = 512
MAX_COMPONENTS = 1024
_REQUIRED = ("trajectory_id", "episode_id", "group_id")
_NAMES = (*_REQUIRED, "task_id", "environment", "split", "actor_id", "incarnation", "finish_reason")
_CONTROL = r"[\x00-\x1f\x7f]"


def to_numpy(array: pa.Array) -> np.ndarray:
    """The values, nulls as zeros or empty texts: their rows are faults, the values only need to be harmless."""
    if array.null_count:
        array = array.fill_null("" if pa.types.is_string(array.type) else array.type.to_pandas_dtype()(0))
    # no copy for numbers; bits become bytes, texts become objects
    return array.to_numpy(zero_copy_only=not (pa.types.is_boolean(array.type) or pa.types.is_string(array.type)))


def find_faults(rows: ShardRows, vocab_size: int | None) -> dict[int, str]:
    """Row -> reason."""
    faults: dict[int, str] = {}

    def blame(bad_rows: np.ndarray, reason: str) -> None:
        if len(bad_rows):  # nearly never
            for row in np.unique(bad_rows).tolist():
                faults.setdefault(row, reason)

    def blame_values(column: str, bad: np.ndarray, reason: str) -> None:
        if bad.any():
            blame(np.searchsorted(rows.ragged(column)[0], np.flatnonzero(bad), side="right") - 1, reason)

    _blame_nulls(rows, blame)
    num_tokens = rows.column("num_tokens")
    for name in TOKEN_COLUMNS:
        blame(np.flatnonzero(np.diff(rows.ragged(name)[0]) != num_tokens), f"{name}: length differs from num_tokens")
    blame(np.flatnonzero(num_tokens < 1), "num_tokens: accepted at least 1")
    tokens, logprobs = rows.ragged("tokens")[1], rows.ragged("behavior_logprobs")[1]
    limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    blame_values("tokens", (tokens < 0) | (tokens >= limit), f"tokens: accepted 0 to {limit - 1}")
    blame_values("behavior_logprobs", ~np.isfinite(logprobs), "behavior_logprobs: not finite")
    with np.errstate(over="ignore"):
        reward = rows.column("reward").astype(np.float32)  # as it is trained on
    blame(np.flatnonzero(~np.isfinite(reward)), "reward: not finite")
    for name in ("temperature", "created_at", "generation_seconds", "environment_seconds"):
        blame(np.flatnonzero(~np.isfinite(rows.column(name))), f"{name}: not finite")
    blame(np.flatnonzero(rows.column("temperature") <= 0), "temperature: accepted above 0")
    blame(np.flatnonzero(rows.column("group_size") < 1), "group_size: accepted at least 1")
    blame(np.flatnonzero(rows.column("fork_index") < 0), "fork_index: accepted at least 0")
    unknown = ~np.isin(rows.column("split").astype(str), SPLITS)
    blame(np.flatnonzero(unknown), f"split: accepted {' or '.join(SPLITS)}")
    _blame_names(rows, blame)
    _blame_versions(rows, blame)
    _blame_turns(rows, blame)
    _blame_components(rows, blame)
    _blame_hashes(rows, faults)
    _blame_repetitions(rows, faults, blame)
    _blame_groups(rows, faults, blame)
    return faults


def _blame_nulls(rows: ShardRows, blame: Blame) -> None:
    for name in SCHEMA.names:
        array = rows.array(name)
        if array.null_count:
            blame(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)), f"{name}: null")
        if name in TOKEN_COLUMNS and array.values.null_count:
            positions = np.flatnonzero(array.values.is_null().to_numpy(zero_copy_only=False))
            blame(np.searchsorted(rows.ragged(name)[0], positions, side="right") - 1, f"{name}: null entry")


def _blame_versions(rows: ShardRows, blame: Blame) -> None:
    offsets, mask = rows.ragged("loss_mask")
    version_offsets, versions = rows.ragged("token_policy_version")
    row_of = np.repeat(np.arange(rows.num_rows), np.diff(offsets))
    if not np.array_equal(offsets, version_offsets):  # some row is at fault already: judge the others all the same
        aligned = (np.diff(offsets) == np.diff(version_offsets))[row_of]
        within = np.flatnonzero(aligned) - offsets[row_of[aligned]]
        row_of = row_of[aligned]
        mask, versions = mask[aligned], versions[version_offsets[row_of] + within]
    row_of = row_of[mask]
    policy = versions[mask]
    blame(row_of[policy < 0], "token_policy_version: negative on a policy token")
    counts = np.bincount(row_of, minlength=rows.num_rows)
    blame(np.flatnonzero(counts != rows.column("num_policy_tokens")), "num_policy_tokens: differs from loss_mask")
    oldest, newest = np.full(rows.num_rows, -1), np.full(rows.num_rows, -1)
    some = np.flatnonzero(counts)
    if len(some):
        first = np.cumsum(counts)[some] - counts[some]
        oldest[some] = np.minimum.reduceat(policy, first)
        newest[some] = np.maximum.reduceat(policy, first)
    blame(np.flatnonzero(oldest != rows.column("policy_version_min")), "policy_version_min: differs from the tokens")
    blame(np.flatnonzero(newest != rows.column("policy_version_max")), "policy_version_max: differs from the tokens")


def _blame_turns(rows: ShardRows, blame: Blame) -> None:
    array = rows.array("turns")
    offsets = array.offsets.to_numpy() if rows.num_rows else np.zeros(1, np.int32)
    row_of = np.repeat(np.arange(rows.num_rows), np.diff(offsets))
    children = {field.name: array.values.field(index) for index, field in enumerate(TURN)}
    if array.values.null_count:
        blame(row_of[array.values.is_null().to_numpy(zero_copy_only=False)], "turns: null entry")
    for name, child in children.items():
        if child.null_count:
            blame(row_of[child.is_null().to_numpy(zero_copy_only=False)], f"turns.{name}: null")
    for name in ("reward", "seconds"):
        blame(row_of[~np.isfinite(to_numpy(children[name]))], f"turns.{name}: not finite")
    start, end = to_numpy(children["start"]), to_numpy(children["end"])
    bad = (start < 0) | (end < start) | (end > rows.column("num_tokens")[row_of])
    blame(row_of[bad], "turns: indices outside the tokens")


def _blame_names(rows: ShardRows, blame: Blame) -> None:
    """What ends up in tables, pages and terminals; none of it becomes a key."""
    names = pa.concat_arrays(
        [rows.array(name) for name in _NAMES]
    )  # one call each costs more than a small shard's rows
    length = to_numpy(pc.binary_length(names))
    control = to_numpy(pc.match_substring_regex(names, _CONTROL))
    empty = length[: len(_REQUIRED) * rows.num_rows] == 0
    for bad, reason in (
        (length > MAX_NAME_BYTES, f"accepted at most {MAX_NAME_BYTES} bytes"),
        (empty, "empty"),
        (control, "has control characters"),
    ):
        if bad.any():
            for name, of_column in zip(_NAMES, np.split(bad, len(bad) // rows.num_rows), strict=False):
                blame(np.flatnonzero(of_column), f"{name}: {reason}")


def _blame_components(rows: ShardRows, blame: Blame) -> None:
    array = rows.array("reward_components")
    if not rows.num_rows:
        return
    offsets = array.offsets.to_numpy()
    counts = np.diff(offsets)
    blame(np.flatnonzero(counts > MAX_COMPONENTS), f"reward_components: accepted at most {MAX_COMPONENTS}")
    inside = slice(offsets[0], offsets[-1])
    row_of = np.repeat(np.arange(rows.num_rows), counts)
    values, keys = array.items[inside], array.keys[inside]
    blame(row_of[values.is_null().to_numpy(zero_copy_only=False)], "reward_components: null entry")
    blame(row_of[~np.isfinite(to_numpy(values))], "reward_components: not finite")
    too_long = to_numpy(pc.binary_length(keys)) > MAX_NAME_BYTES
    blame(row_of[too_long], f"reward_components: accepted names of at most {MAX_NAME_BYTES} bytes")
    control = to_numpy(pc.match_substring_regex(keys, _CONTROL))
    blame(row_of[control], "reward_components: a name has control characters")


def _sound(rows: ShardRows, faults: dict[int, str]) -> np.ndarray:
    """int64 [N']: the rows without a fault so far."""
    kept = np.ones(rows.num_rows, bool)
    kept[list(faults)] = False
    return np.flatnonzero(kept)


def _codes(rows: ShardRows, name: str) -> np.ndarray:
    """int64 [N]: equal where the texts are."""
    encoded = rows.array(name).fill_null("").dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64)


def _blame_repetitions(rows: ShardRows, faults: dict[int, str], blame: Blame) -> None:
    """All but the first sound row of an id: a writer that repeats one is broken, a second delivery has a shard of its own."""
    sound = _sound(rows, faults)
    _, first = np.unique(_codes(rows, "trajectory_id")[sound], return_index=True)
    blame(np.delete(sound, first), "trajectory_id: an earlier row of this shard has it")


def _blame_groups(rows: ShardRows, faults: dict[int, str], blame: Blame) -> None:
    """The sound rows of a group that does not agree on its size, or is larger: which of them lies cannot be told."""
    sound = _sound(rows, faults)
    if not len(sound):
        return
    groups, episodes = _codes(rows, "group_id")[sound], _codes(rows, "episode_id")[sound]
    sizes = rows.column("group_size")[sound].astype(np.int64)
    smallest, largest = np.full(groups.max() + 1, np.iinfo(np.int64).max), np.zeros(groups.max() + 1, np.int64)
    np.minimum.at(smallest, groups, sizes)
    np.maximum.at(largest, groups, sizes)
    blame(sound[(smallest != largest)[groups]], "group_size: differs within the group")
    pairs = np.unique(groups * rows.num_rows + episodes)
    num_episodes = np.bincount(pairs // rows.num_rows, minlength=len(largest))
    blame(sound[(num_episodes > smallest)[groups]], "group_size: below the episodes of the group")


def _blame_hashes(rows: ShardRows, faults: dict[int, str]) -> None:
    """About 5 us per row; only rows that are sound so far, others may not even align."""
    lists = [rows.ragged(name) for name in TOKEN_COLUMNS]
    rewards, hashes = rows.column("reward"), rows.column("content_hash")
    for row in range(rows.num_rows):
        if row not in faults:
            tokens, mask, logprobs, versions = (values[o[row] : o[row + 1]] for o, values in lists)
            if content_hash(tokens, mask, logprobs, versions, rewards[row]) != hashes[row]:
                faults[row] = "content_hash: differs from the content"
