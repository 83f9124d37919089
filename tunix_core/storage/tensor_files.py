"""Tensors in the files of a multi-file object: safetensors of bounded size, read whole or box by box.

A large tensor is cut: a stacked one (three axes or more) into eighths of its first axis, its layers, and what is still
above BOX_BYTES along its longest axis in halves. So a device's part, on a mesh of powers of two, is whole boxes or nearly
so, whichever axis it is split along. The manifest says under `tensors` which boxes lie where in a file, each with a
SHA-256 of its own: who needs some of them reads and verifies those alone, and no file is ever too large to hold.

In a file a whole tensor goes by its name; a box by its name and where it begins, `name@0,128`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunix_core.errors import CorruptObject, DataError, ObjectMissing
from tunix_core.storage import multifile
from tunix_core.storage.multifile import FileEntry
from tunix_core.storage.parts import Part, Parts, Tensors, key_of
from tunix_core.storage.store import ObjectStore

FILE_BYTES = 256 * 2**20
"""What whoever writes or copies tensors holds of them at a time, since an object is put in one piece."""
BOX_BYTES = 64 * 2**20
"""What whoever reads some of them holds beside these."""
_STAGES = 8
"""Into so many parts the layers are cut."""

FIELD = "tensors"
"""Of a manifest: file -> its boxes."""


class StoredBox(NamedTuple):
    """A box of a tensor in a file; a manifest has it as a list."""

    name: str
    shape: Sequence[int]
    """Of the whole."""
    dtype: str
    """As safetensors names it."""
    offset: Sequence[int]
    sizes: Sequence[int]
    begin: int
    """Its first byte in the file."""
    sha256: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * multifile.tensor_type(self.dtype).itemsize

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.sizes, strict=True))

    def array(self, data: bytes | memoryview) -> np.ndarray:
        """From its bytes."""
        return np.frombuffer(data, multifile.tensor_type(self.dtype)).reshape(self.sizes)


class TensorFile(NamedTuple):
    """A file in memory."""

    name: str
    data: bytes
    boxes: list[StoredBox]

    def arrays(self) -> Iterator[tuple[StoredBox, np.ndarray]]:
        """Views of its data.

        Raises:
            CorruptObject: the file ends before one.
        """
        view = memoryview(self.data)
        for box in self.boxes:
            if box.begin + box.num_bytes > len(view):
                raise CorruptObject(f"{self.name}: {box.name} is to end behind byte {len(view)}, the file's last")
            yield box, box.array(view[box.begin : box.begin + box.num_bytes])


# ---- writing ------------------------------------------------------------------------------------


def encoded(tensors: Tensors, *, prefix: str = "") -> Iterator[TensorFile]:
    """The files that hold `tensors`, one at a time.

    Args:
        prefix: of the files' names.

    Raises:
        DataError: something is no array.
    """
    plan = _files(piece for name in sorted(tensors) for piece in _pieces(name, tensors[name]))
    for number, wanted in enumerate(plan):
        arrays, places = {}, {}
        for piece in wanted:
            whole = tensors[piece.name].shape
            array = np.asarray(piece.part.load()[piece.slices])  # a scalar stays an array
            offset = [begin + s.start for begin, s in zip(piece.part.offset, piece.slices, strict=True)]
            key = piece.name if array.shape == whole else key_of(piece.name, offset)
            arrays[key], places[key] = array, (piece.name, whole, offset)
        data = multifile.encode_tensors(arrays)
        del arrays
        stem = multifile.WEIGHTS if len(plan) == 1 else f"model-{number + 1:05d}-of-{len(plan):05d}.safetensors"
        yield TensorFile(prefix + stem, data, boxes_of(data, places))
        del data


def boxes_of(
    data: bytes, places: Mapping[str, tuple[str, Sequence[int], Sequence[int]]] | None = None
) -> list[StoredBox]:
    """What a safetensors file holds.

    Args:
        places: key -> name, shape of the whole and offset; None: every key names a whole tensor.

    Raises:
        DataError: it is none.
    """
    found = []
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        for key, entry in json.loads(data[8:start]).items():
            if key == "__metadata__":
                continue
            shape, (begin, end) = entry["shape"], entry["data_offsets"]
            name, whole, offset = places[key] if places is not None else (key, shape, [0] * len(shape))
            digest = hashlib.sha256(memoryview(data)[start + begin : start + end]).hexdigest()
            found.append(StoredBox(name, list(whole), entry["dtype"], list(offset), shape, start + begin, digest))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"weights: no safetensors file ({error!r})") from error
    return found


class _Piece(NamedTuple):
    """A box that is to be written."""

    name: str
    part: Part
    slices: tuple[slice, ...]
    """Of the part."""
    num_bytes: int


def _pieces(name: str, tensor: np.ndarray | Parts) -> Iterator[_Piece]:
    if not isinstance(tensor, np.ndarray | Parts):
        raise DataError(f"tensor {name}: received a {type(tensor).__name__}, accepted a NumPy array")
    parts = tensor.parts if isinstance(tensor, Parts) else [Part.of(tensor, (0,) * tensor.ndim)]
    itemsize = tensor.dtype.itemsize
    for part in parts:
        for box in _cut([(0, size) for size in part.shape], itemsize, _STAGES if len(part.shape) > 2 else 1):
            size = math.prod(high - low for low, high in box) * itemsize
            yield _Piece(name, part, tuple(slice(low, high) for low, high in box), size)


def _cut(box: list[tuple[int, int]], itemsize: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    sizes = [high - low for low, high in box]
    if math.prod(sizes) * itemsize <= BOX_BYTES or max(sizes, default=1) == 1:
        yield box
        return
    by_layers = stages > 1 and sizes[0] > 1
    axis = 0 if by_layers else sizes.index(max(sizes))
    low, high = box[axis]
    middle = low + (high - low) // 2
    for half in ((low, middle), (middle, high)):
        yield from _cut([*box[:axis], half, *box[axis + 1 :]], itemsize, stages // 2 if by_layers else 1)


def _files(pieces: Iterable[_Piece]) -> list[list[_Piece]]:
    files: list[list[_Piece]] = [[]]
    size = 0
    for piece in pieces:
        if files[-1] and size + piece.num_bytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(piece)
        size += piece.num_bytes
    return files


def put(
    store: ObjectStore, folder: str, attempt: str, files: Iterable[TensorFile]
) -> tuple[dict[str, FileEntry], dict[str, list[Any]]]:
    """Write them, one in memory at a time; returns their entries, and what a manifest says under FIELD."""
    rows: dict[str, list[Any]] = {}

    def noted() -> Iterator[tuple[str, bytes]]:
        for file in files:
            rows[file.name] = [list(box) for box in file.boxes]
            yield file.name, file.data
            del file  # before the next one is made

    return multifile.put_files(store, folder, attempt, noted()), rows


# ---- reading ------------------------------------------------------------------------------------


def boxes(manifest: Mapping[str, Any]) -> dict[str, list[StoredBox]]:
    """File -> what lies in it.

    Raises:
        CorruptObject: the manifest does not say, or its boxes do not make up whole tensors.
    """
    try:
        found = {name: [_checked(StoredBox(*row)) for row in rows] for name, rows in manifest[FIELD].items()}
        unknown = sorted(found.keys() - manifest["files"].keys())
        kinds = {box.name: (tuple(box.shape), box.dtype) for rows in found.values() for box in rows}
        sizes = dict.fromkeys(kinds, 0)
        for box in (box for rows in found.values() for box in rows):
            if (tuple(box.shape), box.dtype) != kinds[box.name]:
                raise ValueError(f"{box.name} has two shapes or types")
            sizes[box.name] += math.prod(box.sizes)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptObject(f"manifest: {FIELD} is missing or malformed ({error!r})") from error
    if unknown or not found:
        raise CorruptObject(f"manifest: {FIELD} names {unknown or 'no file'}, accepted names of its files")
    for name, (shape, _) in kinds.items():
        if sizes[name] != math.prod(shape):
            raise CorruptObject(f"{name}: received parts of {sizes[name]} numbers, accepted {math.prod(shape)} in all")
    return found


def _checked(box: StoredBox) -> StoredBox:
    inside = all(
        begin >= 0 and size >= 0 and begin + size <= whole
        for begin, size, whole in zip(box.offset, box.sizes, box.shape, strict=True)
    )
    if not inside or box.begin < 0:
        raise ValueError(f"{box.name}: a box outside the tensor or the file")
    multifile.tensor_type(box.dtype)
    return box


def digest(manifest: Mapping[str, Any]) -> str:
    """Of the weights: names, shapes, types and all bytes. Raises as `boxes`."""
    rows = sorted(json.dumps([*box[:5], box.sha256]) for rows in boxes(manifest).values() for box in rows)
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def read_files(store: ObjectStore, manifest: Mapping[str, Any]) -> Iterator[TensorFile]:
    """All files, verified, one in memory at a time. Raises CorruptObject."""
    for name, rows in boxes(manifest).items():
        yield TensorFile(name, multifile.read_file(store, manifest, name), rows)


def load(store: ObjectStore, manifest: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Whole tensors. Raises CorruptObject."""
    whole: dict[str, np.ndarray] = {}
    for file in read_files(store, manifest):
        for box, array in file.arrays():
            if box.name not in whole:
                whole[box.name] = np.empty(box.shape, array.dtype)
            whole[box.name][box.slices] = array
    return whole


def opened(store: ObjectStore, manifest: Mapping[str, Any]) -> dict[str, Parts]:
    """Tensors of which nothing is read yet; a box is read, alone, and verified where it is needed.

    Raises:
        CorruptObject: see `boxes`; and while reading, bytes that are not the manifest's.
    """
    found: dict[str, Parts] = {}
    for file, rows in boxes(manifest).items():
        key = multifile.file_entry(manifest, file).key
        for box in rows:
            tensor = found.setdefault(box.name, Parts(box.shape, multifile.tensor_type(box.dtype), []))
            load = functools.partial(_read, store, key, box)
            tensor.parts.append(Part(offset=tuple(box.offset), shape=tuple(box.sizes), load=load))
    return found


def _read(store: ObjectStore, key: str, box: StoredBox) -> np.ndarray:
    try:
        data = store.get_range(key, box.begin, box.begin + box.num_bytes)
    except ObjectMissing as error:
        raise CorruptObject(f"{key}: named by its manifest but missing") from error
    if hashlib.sha256(data).hexdigest() != box.sha256:
        raise CorruptObject(f"{key}: {box.name} at {list(box.offset)} has other bytes than its manifest promises")
    return box.array(data)
