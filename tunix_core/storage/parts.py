"""Tensors in parts: each host of a learner has those that it holds, a file some boxes, and nobody joins them unasked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tunix_core.errors import CorruptObject

Box = tuple[slice, ...]


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

    def read(self, boxes: Sequence[Box]) -> list[np.ndarray]:
        """New arrays; a part that several take is loaded once, and one part at a time is in memory beside them.

        Raises:
            CorruptObject: no part holds some of a box.
        """
        wanted = [[slice(*s.indices(size)[:2]) for s, size in zip(box, self.shape, strict=True)] for box in boxes]
        found = [np.empty([s.stop - s.start for s in box], self.dtype) for box in wanted]
        known = [0] * len(found)  # parts do not overlap
        for part in self.parts:
            common = [_common(box, part) for box in wanted]
            data = part.load() if any(common) else None
            for number, pair in enumerate(common):
                if pair is not None and data is not None:
                    target, source = pair
                    found[number][target] = data[source]
                    known[number] += math.prod(s.stop - s.start for s in target)
        for box, array, count in zip(wanted, found, known, strict=True):
            if count != array.size:
                share = count / array.size
                raise CorruptObject(f"a tensor of shape {list(self.shape)}: parts hold {share:.0%} of {box}")
        return found

    def __getitem__(self, index: Box) -> np.ndarray:
        """Raises as `read`."""
        return self.read([index])[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return self[(slice(None),) * len(self.shape)].astype(dtype or self.dtype, copy=False)

    def astype(self, dtype: Any) -> Parts:
        """In another type; converted as it is read."""

        def converted(part: Part) -> Part:
            return dataclasses.replace(part, load=lambda: part.load().astype(dtype))

        return Parts(self.shape, dtype, [converted(part) for part in self.parts])


def _common(box: Sequence[slice], part: Part) -> tuple[Box, Box] | None:
    """What a box and a part have in common, as slices of each; None where that is nothing."""
    target, source = [], []
    for wanted, begin, size in zip(box, part.offset, part.shape, strict=True):
        low, high = max(wanted.start, begin), min(wanted.stop, begin + size)
        if high <= low:
            return None
        target.append(slice(low - wanted.start, high - wanted.start))
        source.append(slice(low - begin, high - begin))
    return tuple(target), tuple(source)


Tensors = Mapping[str, "np.ndarray | Parts"]
"""Name -> the whole, or parts of it."""


def key_of(name: str, offset: Sequence[int]) -> str:
    """A part's name in a file: the tensor's, and where it begins."""
    return f"{name}@{','.join(map(str, offset))}"


def to_write(tensors: Tensors) -> tuple[dict[str, np.ndarray], dict[str, list[Any]]]:
    """Arrays by key (a whole tensor goes by its name), and of those that are parts `[name, shape of the whole, offset]`."""
    arrays: dict[str, np.ndarray] = {}
    table: dict[str, list[Any]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Parts):
            arrays[name] = tensor
            continue
        for part in tensor.parts:
            key = key_of(name, part.offset)
            arrays[key] = part.load()
            table[key] = [name, list(tensor.shape), list(part.offset)]
    return arrays, table
