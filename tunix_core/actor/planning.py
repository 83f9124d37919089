"""Which rows go into a dispatch, and which of the compiled sizes it takes. Pure: numbers in, numbers out.

A dispatch costs about a constant and its rows (in prefill: their tokens), full or not. The constant,
in rows, is `overhead`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FULL = 0.9
"""Rows that may not fill a dispatch wait for others, unless they are so large a share of it."""

MAX_WAITS = 2
"""… but are not passed over more often than this."""


def sizes(largest: int, num: int, factor: int = 2, smallest: int = 1) -> tuple[int, ...]:
    """Rising: `largest`, its `factor`-th part rounded up, and so on, up to `num` of them, none below `smallest`."""
    found = [max(largest, smallest)]
    while len(found) < num and found[-1] > smallest:
        found.append(max(-(-found[-1] // factor), smallest))
    return tuple(found[::-1])


def fitting(need: int, of: Sequence[int]) -> int:
    """Position of the smallest size that holds `need`, among rising ones."""
    return next(i for i, size in enumerate(of) if size >= need)


def best_rows(num_rows: int, row_sizes: Sequence[int], overhead: float) -> int:
    """The size at which a row costs least when `num_rows` want a place."""
    return min(row_sizes, key=lambda size: ((overhead + size) / min(num_rows, size), size))


class DecodeDispatch(NamedTuple):
    rows: list[int]
    """Positions in what the plan was made of."""
    num_rows: int
    context: int
    """Position of the context size that all of them fit."""


def decode_plan(
    contexts: Sequence[int], waits: Sequence[int], row_sizes: Sequence[int], overhead: float
) -> list[DecodeDispatch]:
    """Dispatches for some of R rows that want to decode, at least one of them if R > 0.

    Rows of short contexts go together; what does not fill a dispatch joins the next longer ones, or
    waits.

    Args:
        contexts: per row, position of the smallest context size that it fits.
        waits: per row, how often it was passed over since it last decoded.
        row_sizes: compiled numbers of rows, rising.
        overhead: see the module.
    """
    plan: list[DecodeDispatch] = []
    left: list[int] = []
    for context in sorted(set(contexts)):
        left += [row for row, own in enumerate(contexts) if own == context]
        left.sort(key=lambda row: -waits[row])
        while left:
            size = best_rows(len(left), row_sizes, overhead)
            if len(left) < FULL * size:
                break
            plan.append(DecodeDispatch(left[:size], size, context))
            left = left[size:]
    while left and (not plan or any(waits[row] >= MAX_WAITS for row in left)):
        size = best_rows(len(left), row_sizes, overhead)
        plan.append(DecodeDispatch(left[:size], size, max(contexts[row] for row in left[:size])))
        left = left[size:]
    return plan


def prefill_shape(remaining: Sequence[int], shapes: Sequence[tuple[int, int]], overhead: float) -> tuple[int, int]:
    """The shape `(rows, tokens)` at which a token read costs least.

    Args:
        remaining: tokens that each waiting slot has to read, first come first.
        shapes: compiled ones.
        overhead: see the module.
    """

    def cost(shape: tuple[int, int]) -> tuple[float, int]:
        rows, chunk = shape
        useful = sum(min(tokens, chunk) for tokens in remaining[:rows])
        return (overhead + rows * chunk) / useful, rows * chunk

    return min(shapes, key=cost)
