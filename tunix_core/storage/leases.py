"""Leases: what a reader is reading, so that nothing under it is deleted meanwhile.

A reader writes its lease first and then looks whether the object is retired; whoever deletes retires first
and then reads the leases. So one of the two always sees the other, and no lock is needed. A lease is renewed
while its reader lives and lapses when it does not, by the reader's clock and with a margin for the other's.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tunix_core import paths
from tunix_core.errors import CorruptObject, ObjectMissing, StoreError
from tunix_core.storage.store import ObjectStore, map_requests, read_json_or_none, write_json

LEASE_SECONDS = 600.0
"""How long a reader that died holds things up."""
CLOCK_MARGIN_SECONDS = 120.0
"""By so much clocks may differ."""


@contextlib.contextmanager
def leased(store: ObjectStore, keys: Iterable[str], *, reader: str, seconds: float = LEASE_SECONDS) -> Iterator[None]:
    """Hold objects while the block runs.

    Args:
        keys: keys, or prefixes that end in `/`, such as `policies/00000004/`.
        reader: who reads, for people; each call has a lease of its own.
        seconds: after which a lease that is not renewed lapses.

    Raises:
        ObjectMissing: one of the objects is retired, and may be gone any moment: choose another.
    """
    held = sorted(keys)
    key = paths.lease(f"{paths.name('reader', reader)}-{uuid.uuid4().hex[:12]}")
    value: dict[str, Any] = {"reader": reader, "keys": held}
    _renew(store, key, value, seconds)
    over = threading.Event()
    renewing = threading.Thread(
        target=_renew_until, args=(over, store, key, value, seconds), name=f"lease-{reader}", daemon=True
    )
    try:
        retired = [folder for folder in held if folder.endswith("/") and store.exists(folder + paths.RETIRED)]
        if retired:
            raise ObjectMissing(f"{store.uri}: {retired[0]} is retired")
        renewing.start()
        yield
    finally:
        over.set()
        if renewing.ident is not None:
            renewing.join()
        with contextlib.suppress(StoreError):  # it lapses by itself
            store.delete(key)


def _renew(store: ObjectStore, key: str, value: dict[str, Any], seconds: float) -> None:
    write_json(store, key, {**value, "expires_at": time.time() + seconds})


def _renew_until(over: threading.Event, store: ObjectStore, key: str, value: dict[str, Any], seconds: float) -> None:
    while not over.wait(seconds / 4):
        with contextlib.suppress(StoreError):  # there are three more tries before it lapses
            _renew(store, key, value, seconds)


def read_leases(store: ObjectStore, *, clock: Callable[[], float] = time.time) -> frozenset[str]:
    """The keys and prefixes that somebody holds now.

    Raises:
        CorruptObject: a lease says nothing that can be read; a person has to look before anything is deleted.
    """
    found: set[str] = set()
    keys = store.list_after(paths.LEASES)
    for key, value in zip(keys, map_requests(store, lambda key: read_json_or_none(store, key), keys), strict=True):
        if value is None:
            continue  # ended meanwhile
        try:
            if float(value["expires_at"]) + CLOCK_MARGIN_SECONDS > clock():
                found.update(str(held) for held in value["keys"])
            else:
                store.delete(key)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptObject(f"{key}: {error!r}; remove it if nobody reads") from error
    return frozenset(found)


def is_held(key: str, leases: frozenset[str]) -> bool:
    """Whether a lease covers the key, or something under it where it is a folder's."""
    return any(key.startswith(held) if held.endswith("/") else held == key for held in leases) or (
        key.endswith("/") and any(held.startswith(key) for held in leases)
    )
