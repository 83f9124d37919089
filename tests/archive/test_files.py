import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.run_factory import make_run
from tests.support.trajectories import make_group, make_trajectory, same_trajectory
from tunix_core.archive import importing
from tunix_core.archive.dictionary import COLUMNS
from tunix_core.archive.files import from_record, read_dataset, read_jsonl, to_record, write_dataset, write_jsonl
from tunix_core.archive.importing import import_trajectories
from tunix_core.archive.selection import Selection, select
from tunix_core.errors import ConfigError, DataError
from tunix_core.storage.shards import SCHEMA
from tunix_core.storage.store import open_store
from tunix_core.storage.trajectory_reader import TrajectoryReader
from tunix_core.types import Trajectory

TRAJECTORIES = [*make_group(0), *make_group(1, num_tokens=40), make_trajectory(8, group_size=1, reward=1 / 3)]


def test_json_lines_come_back_to_the_bit(tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    assert write_jsonl(path, TRAJECTORIES) == 9
    assert all(same_trajectory(*pair) for pair in zip(TRAJECTORIES, read_jsonl(path), strict=True))
    with pytest.raises(ConfigError, match="--to"):
        write_jsonl(path, TRAJECTORIES)


def test_a_dataset_comes_back_to_the_bit(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunix_core.archive.files.ROWS_PER_FILE", 4)
    folder = tmp_path / "dataset"
    assert write_dataset(folder, TRAJECTORIES, split="train", source="run") == 9
    assert all(same_trajectory(*pair) for pair in zip(TRAJECTORIES, read_dataset(folder), strict=True))
    assert sorted(path.name for path in (folder / "data").iterdir()) == [f"train-0000{i}.parquet" for i in range(3)]
    card = (folder / "README.md").read_text()
    assert "path: data/train-*.parquet" in card
    first = pq.read_table(folder / "data" / "train-00000.parquet").to_pylist()[0]
    assert first["messages"] == [{"role": "user", "content": "…"}]
    with pytest.raises(ConfigError, match="--to"):
        write_dataset(folder, TRAJECTORIES, split="train", source="run")


def test_files_of_a_dataset_have_one_schema(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunix_core.archive.files.ROWS_PER_FILE", 1)
    bare = make_trajectory(0, turns=[], reward_components={}, messages="[]")
    write_dataset(tmp_path / "dataset", [bare, make_trajectory(1)], split="train", source="run")
    first, second = (pq.read_schema(path) for path in sorted((tmp_path / "dataset" / "data").iterdir()))
    assert first.equals(second)
    assert all(map(same_trajectory, [bare, make_trajectory(1)], read_dataset(tmp_path / "dataset")))


def test_an_export_that_breaks_off_can_be_repeated(tmp_path) -> None:
    def broken():
        yield make_trajectory(0)
        raise OSError("the store is away")

    path = tmp_path / "out.jsonl"
    with pytest.raises(OSError, match="away"):
        write_jsonl(path, broken())
    assert not path.exists()
    assert write_jsonl(path, TRAJECTORIES) == 9


def test_an_import_is_what_the_learner_reads(tmp_path) -> None:
    whole = make_run(open_store(str(tmp_path / "run"))).store
    exported = [found.trajectory for found in select(whole, Selection())]
    write_jsonl(tmp_path / "out.jsonl", sorted(exported, key=lambda t: t.group_id))
    store = open_store(str(tmp_path / "other"))
    imported = import_trajectories(store, lambda: read_jsonl(tmp_path / "out.jsonl"))
    assert imported.num_trajectories == len(exported)
    reader = TrajectoryReader(store)
    read = [shard.rows.trajectory(i) for shard in reader.poll() if shard.rows for i in range(shard.rows.num_rows)]
    key = {t.trajectory_id: t for t in exported}
    assert len(read) == len(exported)
    assert all(same_trajectory(key[t.trajectory_id], t) for t in read)
    reader.poll()
    assert reader.live_incarnations() == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loss_mask": None}, "without"),
        ({"colour": "red"}, "colour"),
        ({"tokens": [1, 2]}, "lengths"),
        ({"tokens": ["x"] * 12}, "line 1"),
        ({"tokens": [2**40] * 12}, "line 1"),
        ({"tokens": [1.7] * 12}, "tokens"),
        ({"tokens": ["7"] * 12}, "tokens"),
        ({"loss_mask": ["false"] * 12}, "loss_mask"),
        ({"loss_mask": [None] * 12}, "loss_mask"),
        ({"token_policy_version": [0.9] * 12}, "token_policy_version"),
        ({"behavior_logprobs": ["-1"] * 12}, "behavior_logprobs"),
        ({"reward": "1"}, "reward"),
        ({"reward": None}, "reward"),
        ({"reward_components": {"answer": "1"}}, "reward_components"),
        ({"group_size": 2**40}, "group_size"),
        ({"group_size": True}, "group_size"),
        ({"group_size": 4.5}, "group_size"),
        ({"trajectory_id": 3}, "trajectory_id"),
        ({"trajectory_id": "\ud800"}, "surrogates"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogates"),
        ({"turns": [{"role": "policy", "start": "0", "end": 12}]}, "turns"),
        ({"turns": [{"role": "policy"}]}, "line 1"),
        ({"reward_components": [1]}, "line 1"),
    ],
)
def test_a_line_that_is_no_trajectory_is_refused_by_its_number(tmp_path, change: dict, said: str) -> None:
    record = {**to_record(make_trajectory(0)), **change}
    if change.get("loss_mask", 1) is None:
        del record["loss_mask"]
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match="line 1") as error:
        list(read_jsonl(path))
    assert said in str(error.value)


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_line_that_is_no_object_is_refused(tmp_path, text: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(to_record(make_trajectory(0))) + "\n" + text + "\n")
    with pytest.raises(DataError, match="line 2"):
        list(read_jsonl(path))


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ([make_trajectory(9, temperature=-1.0)], "00000009-é: temperature"),
        ([make_trajectory(9), make_trajectory(9)], "twice"),
        ([make_trajectory(9), make_trajectory(0)], "two places"),
    ],
)
def test_an_import_refuses_what_the_learner_would(
    tmp_path, monkeypatch: pytest.MonkeyPatch, last: list[Trajectory], reason: str
) -> None:
    """Before it writes anything, however far behind the fault is."""
    monkeypatch.setattr(importing, "GROUPS_PER_SHARD", 1)
    store = open_store(str(tmp_path / "run"))
    with pytest.raises(DataError, match=reason):
        import_trajectories(store, lambda: [*make_group(0), *make_group(1), *last])
    assert store.list_after("") == []
    with pytest.raises(ConfigError, match="--from"):
        list(read_dataset(tmp_path))


def test_an_import_that_breaks_off_leaves_no_open_writer(tmp_path) -> None:
    store = open_store(str(tmp_path / "run"))
    times = iter([make_group(0), [*make_group(0), *make_group(0)]])  # the file has changed in between
    with pytest.raises(DataError, match="twice"):
        import_trajectories(store, lambda: next(times))
    reader = TrajectoryReader(store)
    for _ in range(2):
        reader.poll()
    assert reader.live_incarnations() == [], "whoever broke off still gets a share of what actors may begin"


@pytest.mark.parametrize("limit", ["GROUPS_PER_SHARD", "TOKENS_PER_SHARD"])
def test_an_import_cuts_shards_by_groups_and_by_tokens(tmp_path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(importing, limit, 2 if limit == "GROUPS_PER_SHARD" else 2 * 4 * 12)
    store = open_store(str(tmp_path / "run"))
    imported = import_trajectories(store, lambda: [t for i in range(5) for t in make_group(i)])
    assert (imported.num_trajectories, imported.num_shards) == (20, 3)


def test_the_dictionary_explains_every_column() -> None:
    assert list(COLUMNS) == SCHEMA.names
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert all(f"| `{name}` | {meaning} |" in readme for name, meaning in COLUMNS.items())
    assert from_record(to_record(make_trajectory(0)), "here").trajectory_id == make_trajectory(0).trajectory_id
