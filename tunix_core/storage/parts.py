"""Tensors in parts: each host of a learner writes those that it holds, and nobody joins them unasked.

In a file a whole tensor goes by its name; a part by its name and where it begins, `name@0,128`. A table beside the
files says what is whose part: key -> [name, shape of the whole, offset].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tunix_core.errors import CorruptObject

Table = Mapping[str, Sequence[Any]]
"""Key in a file -> [name, shape of the whole, offset]; whole tensors are not in it."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A box of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]

    @classmethod
    def of(cls, data: np.ndarray, offset: tuple[int, ...]) -> Part:
        """One that is here."""
        return cls(offset=offset, shape=data.shape, load=lambda: data)


class Parts:
    """A tensor of which boxes are known. Reads like an array, `parts[slices]`, from the boxes that this takes."""

    def __init__(self, shape: Sequence[int], dtype: Any, parts: Sequence[Part]) -> None:
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.parts = list(parts)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """
        Raises:
            CorruptObject: no part holds some of it.
        """
        bounds = [slice(*s.indices(size)[:2]) for s, size in zip(index, self.shape, strict=True)]
        found = np.empty([b.stop - b.start for b in bounds], self.dtype)
        known = np.zeros(found.shape, np.bool_)
        for part in self.parts:
            target, source = [], []
            for b, begin, size in zip(bounds, part.offset, part.shape, strict=True):
                low, high = max(b.start, begin), min(b.stop, begin + size)
                target.append(slice(low - b.start, max(low, high) - b.start))
                source.append(slice(low - begin, max(low, high) - begin))
            if all(s.stop > s.start for s in source):
                found[tuple(target)] = part.load()[tuple(source)]
                known[tuple(target)] = True
        if not known.all():
            raise CorruptObject(f"a tensor of shape {list(self.shape)}: parts hold {known.mean():.0%} of {bounds}")
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return self[(slice(None),) * len(self.shape)].astype(dtype or self.dtype, copy=False)


Tensors = Mapping[str, "np.ndarray | Parts"]
"""Name -> the whole, or this host's parts of it."""


def to_write(tensors: Tensors) -> tuple[dict[str, np.ndarray], dict[str, list[Any]]]:
    """Arrays by key, and the table of those that are parts."""
    arrays: dict[str, np.ndarray] = {}
    table: dict[str, list[Any]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Parts):
            arrays[name] = tensor
            continue
        for part in tensor.parts:
            key = f"{name}@{','.join(map(str, part.offset))}"
            arrays[key] = part.load()
            table[key] = [name, list(tensor.shape), list(part.offset)]
    return arrays, table


def joined(files: Sequence[tuple[Mapping[str, np.ndarray], Table]]) -> dict[str, np.ndarray]:
    """Whole tensors from the files of all hosts.

    Raises:
        CorruptObject: parts are missing.
    """
    whole: dict[str, np.ndarray] = {}
    known: dict[str, int] = {}
    for arrays, table in files:
        for key, array in arrays.items():
            name, shape, offset = table.get(key, (key, array.shape, (0,) * array.ndim))
            if key not in table:
                whole[name] = array
            else:
                target = whole.setdefault(name, np.empty(shape, array.dtype))
                target[tuple(slice(o, o + n) for o, n in zip(offset, array.shape, strict=True))] = array
            known[name] = known.get(name, 0) + array.size
    for name, tensor in whole.items():
        if known[name] != tensor.size:
            raise CorruptObject(f"{name}: received parts of {known[name]} numbers, accepted {tensor.size} in all")
    return whole
