"""Tensors in parts: what several hosts wrote reads like what one had."""

from __future__ import annotations

import numpy as np
import pytest

from tunix_core.errors import CorruptObject
from tunix_core.storage.memory_store import MemoryStore
from tunix_core.storage.parts import Part, Parts
from tunix_core.storage.snapshots import SnapshotStore

WHOLE = np.arange(48, dtype=np.float32).reshape(6, 8)


def quarter(row: int, column: int) -> Part:
    return Part.of(WHOLE[row : row + 3, column : column + 4], (row, column))


def parts(*chosen: tuple[int, int]) -> Parts:
    return Parts(WHOLE.shape, WHOLE.dtype, [quarter(*place) for place in chosen])


def test_any_box_reads_from_the_parts_that_it_touches() -> None:
    tensor = parts((0, 0), (0, 4), (3, 0), (3, 4))
    for rows in (slice(None), slice(1, 5), slice(2, 3)):
        for columns in (slice(None), slice(3, 6), slice(4, 8)):
            np.testing.assert_array_equal(tensor[rows, columns], WHOLE[rows, columns])
    np.testing.assert_array_equal(np.asarray(tensor), WHOLE)
    scalar = Parts((), np.int32, [Part.of(np.array(5, np.int32), ())])
    assert scalar[()] == 5


def test_a_hole_is_noticed() -> None:
    tensor = parts((0, 0), (3, 4))
    np.testing.assert_array_equal(tensor[:3, :4], WHOLE[:3, :4])
    with pytest.raises(CorruptObject, match="hold 75%"):
        tensor[:4, :4]


def test_several_boxes_take_each_part_once() -> None:
    loaded = []

    def counted(part: Part) -> Part:
        def load() -> np.ndarray:
            loaded.append(part.offset)
            return part.load()

        return Part(offset=part.offset, shape=part.shape, load=load)

    tensor = Parts(WHOLE.shape, WHOLE.dtype, [counted(part) for part in parts((0, 0), (0, 4), (3, 0), (3, 4)).parts])
    boxes = [(slice(0, 3), slice(0, 5)), (slice(0, 1), slice(2, 4))]
    for box, found in zip(boxes, tensor.astype(np.float64).read(boxes), strict=True):
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, WHOLE[box])
    assert sorted(loaded) == [(0, 0), (0, 4)]


def test_a_snapshot_of_two_hosts() -> None:
    """Complete with the manifest, and not before."""
    snapshots = SnapshotStore(MemoryStore("parts"))
    own = [
        snapshots.write_part(3, {"w": parts((0, 0), (3, 4)), "b": np.ones(2, np.float32)}, incarnation="l0"),
        snapshots.write_part(3, {"w": parts((0, 4), (3, 0))}, incarnation="l0", host=1),
    ]
    assert snapshots.versions() == []
    snapshots.complete(3, own, incarnation="l0")
    found = snapshots.load(3)
    np.testing.assert_array_equal(found["w"], WHOLE)
    np.testing.assert_array_equal(found["b"], np.ones(2))
    half = MemoryStore("half-a-snapshot")
    first = SnapshotStore(half).write_part(3, {"w": parts((0, 0), (3, 4))}, incarnation="l0")
    SnapshotStore(half).complete(3, [first], incarnation="l0")
    with pytest.raises(CorruptObject, match="w: received parts of 24 numbers, accepted 48"):
        SnapshotStore(half).load(3)
    again = snapshots.write_part(3, {"w": WHOLE}, incarnation="l1")
    assert again == {}
    snapshots.complete(3, [again], incarnation="l1")
