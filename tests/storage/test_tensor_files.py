"""Tensors in files: cut, read whole, and read box by box."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.support.stores import ScriptedStore
from tunix_core.errors import CorruptObject, DataError
from tunix_core.storage import multifile, tensor_files
from tunix_core.storage.local_store import LocalStore
from tunix_core.storage.memory_store import MemoryStore
from tunix_core.storage.store import ObjectStore

TENSORS = {
    "blocks.w": np.arange(16 * 64 * 64, dtype=np.float32).reshape(16, 64, 64),
    "embedding": np.arange(256 * 16, dtype=np.float32).reshape(256, 16),
    "half": np.arange(40).reshape(40).astype(ml_dtypes.bfloat16),
    "scalar": np.array(3, np.float32),
    "empty": np.zeros((0, 2), np.int32),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "BOX_BYTES", 4096)
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 20_000)


def stored(store: ObjectStore) -> dict:
    entries, rows = tensor_files.put(store, "x/", "a", tensor_files.encoded(TENSORS))
    multifile.put_manifest(store, "x/", "a", entries, {tensor_files.FIELD: rows})
    return multifile.read_manifest(store, "x/")


def test_files_are_bounded_and_read_back(store: ObjectStore) -> None:
    manifest = stored(store)
    sizes = [entry["num_bytes"] for entry in manifest["files"].values()]
    assert len(sizes) > 5
    assert max(sizes) < 23_000
    assert f"model-00001-of-{len(sizes):05d}.safetensors" in manifest["files"]
    for found in (tensor_files.load(store, manifest), tensor_files.opened(store, manifest)):
        assert found.keys() == TENSORS.keys()
        for name, expected in TENSORS.items():
            assert found[name].dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(found[name]), expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_half_of_a_tensor_is_half_of_the_bytes(axis: int) -> None:
    """Whichever axis a mesh splits, and each box once."""
    store = ScriptedStore(MemoryStore(f"half-{axis}"))
    found = tensor_files.opened(store, stored(store))["blocks.w"]
    half = [slice(None)] * 3
    half[axis] = slice(0, TENSORS["blocks.w"].shape[axis] // 2)
    store.calls.clear()
    np.testing.assert_array_equal(found[tuple(half)], TENSORS["blocks.w"][tuple(half)])
    boxes = {part.offset for part in found.parts}
    assert {verb for verb, _ in store.calls} == {"get_range"}
    assert len(store.calls) == len(boxes) / 2 == 32


def test_no_more_than_a_box_is_held_beside_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "BOX_BYTES", 2**16)
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 2**18)
    store, whole = LocalStore(tmp_path), np.ones((8, 512, 512), np.float32)
    entries, rows = tensor_files.put(store, "x/", "a", tensor_files.encoded({"w": whole}))
    found = tensor_files.opened(store, multifile.put_manifest(store, "x/", "a", entries, {tensor_files.FIELD: rows}))
    tracemalloc.start()
    try:
        part = found["w"][:, 256:, :]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert part.nbytes == whole.nbytes / 2
    assert peak < part.nbytes + 4 * 2**16, f"{peak - part.nbytes} bytes beside it"


def test_a_damaged_box_is_noticed_by_who_reads_it() -> None:
    store = MemoryStore("damaged")
    manifest = stored(store)
    found = tensor_files.opened(store, manifest)
    file, rows = next(
        (file, rows) for file, rows in tensor_files.boxes(manifest).items() if rows[0].name == "embedding"
    )
    key = multifile.file_entry(manifest, file).key
    data = bytearray(store.get(key))
    data[rows[0].begin] ^= 1
    store.put(key, bytes(data))
    hurt = rows[0].slices
    with pytest.raises(CorruptObject, match="embedding"):
        found["embedding"][hurt]
    np.asarray(found["blocks.w"])
    with pytest.raises(CorruptObject, match="sha256"):
        tensor_files.load(store, manifest)
    store.delete(key)
    with pytest.raises(CorruptObject, match="missing"):
        found["embedding"][hurt]


def test_the_digest_is_of_the_weights_and_not_of_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = stored(MemoryStore("digest"))
    first = tensor_files.digest(manifest)
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 50_000)
    again = stored(MemoryStore("digest-again"))
    assert len(again["files"]) < len(manifest["files"])
    assert tensor_files.digest(again) == first
    rows = next(iter(manifest[tensor_files.FIELD].values()))
    rows[0][-1] = "0" * 64
    assert tensor_files.digest(manifest) != first


@pytest.mark.parametrize(
    "damage",
    [
        lambda manifest: manifest.pop("tensors"),
        lambda manifest: manifest["tensors"].clear(),
        lambda manifest: manifest["tensors"].pop(next(iter(manifest["tensors"]))),
        lambda manifest: manifest["tensors"].update({"other": []}),
        lambda manifest: next(iter(manifest["tensors"].values()))[0].pop(),
        lambda manifest: next(iter(manifest["tensors"].values()))[0].__setitem__(5, -1),
        lambda manifest: next(iter(manifest["tensors"].values()))[0].__setitem__(3, [16, 0, 0]),
        lambda manifest: next(iter(manifest["tensors"].values()))[0].__setitem__(2, "F63"),
        lambda manifest: next(iter(manifest["tensors"].values()))[0].__setitem__(1, [1, 1, 1]),
    ],
)
def test_hostile_tables_are_refused(damage) -> None:
    store = MemoryStore("hostile-tables")
    for key in store.list_after("x/"):
        store.delete(key)
    manifest = stored(store)
    damage(manifest)
    with pytest.raises(CorruptObject):
        tensor_files.opened(store, manifest)


def test_a_box_behind_the_end_of_its_file_is_refused() -> None:
    store = MemoryStore("behind-the-end")
    manifest = stored(store)
    rows = next(iter(manifest["tensors"].values()))
    rows[0][5] = 10**6
    with pytest.raises(CorruptObject, match="to end behind"):
        tensor_files.load(store, manifest)
    with pytest.raises(CorruptObject, match="other bytes"):
        np.asarray(tensor_files.opened(store, manifest)[rows[0][0]])


def test_what_is_no_safetensors_file_has_no_boxes() -> None:
    with pytest.raises(DataError, match="no safetensors"):
        tensor_files.boxes_of(b"12345678{}x")
