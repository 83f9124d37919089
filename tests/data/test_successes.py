"""What a run is distilled from."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.trajectories import make_trajectory
from tunix_core.data.successes import read_successes, shards_of_file, shards_of_run
from tunix_core.errors import ConfigError, CorruptObject
from tunix_core.storage.memory_store import MemoryStore
from tunix_core.storage.shard_archive import as_read
from tunix_core.storage.shards import encode
from tunix_core.storage.trajectory_writer import TrajectoryWriter


def test_successes_are_chosen_and_the_rest_counted() -> None:
    rows = [
        make_trajectory(0, reward=1.0),
        make_trajectory(1, reward=0.99),
        make_trajectory(2, reward=2.0, split="held_out"),
        make_trajectory(3, reward=float("nan")),
        make_trajectory(4, reward=1.5, tokens=np.full(12, 300, np.int32)),
        make_trajectory(5, reward=1.5),
    ]
    shards = [as_read(name, encode(part), vocab_size=272) for name, part in (("a", rows[:3]), ("b", rows[3:]))]
    found = read_successes(shards, min_reward=1.0)
    assert [tokens.tolist() for tokens, _ in found.rows] == [rows[0].tokens.tolist(), rows[5].tokens.tolist()]
    assert [mask.tolist() for _, mask in found.rows] == [rows[0].loss_mask.tolist(), rows[5].loss_mask.tolist()]
    assert found.left_out == {"faulty": 2, "held_out": 1, "low_reward": 1}
    other = read_successes(shards[:1], min_reward=1.0)
    assert other.sha256 != found.sha256


def test_shards_of_a_run_and_of_a_file(tmp_path) -> None:
    store = MemoryStore("distilled")
    writer = TrajectoryWriter(store, actor_id="actor_0_0", incarnation="inc0")
    for index in range(2):
        writer.write([make_trajectory(index, reward=1.0)])
    writer.close()
    shards = list(shards_of_run(store, vocab_size=272))
    assert len(shards) == 3, "the last one only says that the writer has ended"
    assert len(read_successes(shards, min_reward=1).rows) == 2

    path = tmp_path / "one.parquet"
    path.write_bytes(store.get(shards[0].key))
    (alone,) = shards_of_file(path, vocab_size=272)
    assert alone.sha256 == shards[0].sha256
    path.write_bytes(b"PAR1")
    with pytest.raises(CorruptObject, match=r"one\.parquet: "):
        read_successes(shards_of_file(path, vocab_size=272), min_reward=1)
    with pytest.raises(ConfigError, match="--data"):
        shards_of_file(tmp_path / "none.parquet", vocab_size=272)
