"""Deletion of objects of several files, in two phases.

`retire` marks an object: from then on nobody chooses it, and a lease on it is refused. `delete_retired` removes what was
marked long enough ago, after it has looked again what is held. A deletion that died half way is found by its mark.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection

from tunix_core import paths
from tunix_core.errors import ObjectExists
from tunix_core.storage import multifile
from tunix_core.storage.leases import is_held, read_leases
from tunix_core.storage.store import ObjectStore, read_json_or_none, write_json_if_absent


def retire(store: ObjectStore, folder: str, *, reason: str, clock: Callable[[], float] = time.time) -> None:
    """First half; fine to repeat (the first mark's time counts)."""
    with contextlib.suppress(ObjectExists):
        write_json_if_absent(store, folder + paths.RETIRED, {"reason": reason, "retired_at": clock()})


def retired(store: ObjectStore, prefix: str) -> dict[str, float]:
    """Folder -> when it was retired (seconds since the epoch), for those under `prefix` not deleted yet."""
    found: dict[str, float] = {}
    for key in store.list_after(prefix):
        if key.endswith("/" + paths.RETIRED):
            mark = read_json_or_none(store, key)
            if mark is not None:
                found[key.removesuffix(paths.RETIRED)] = float(mark["retired_at"])
    return found


def delete_retired(
    store: ObjectStore,
    prefix: str,
    *,
    grace_seconds: float,
    protected: Collection[str] = (),
    clock: Callable[[], float] = time.time,
) -> list[str]:
    """Second half: delete what was retired at least `grace_seconds` ago; returns the folders deleted.

    Args:
        protected: folders that stay, whatever their mark says, beside those that a lease holds.
    """
    due = [folder for folder, marked in retired(store, prefix).items() if clock() - marked >= grace_seconds]
    if not due:
        return []
    leases = read_leases(store, clock=clock)
    deleted = [folder for folder in sorted(due) if folder not in protected and not is_held(folder, leases)]
    for folder in deleted:
        multifile.delete_object(store, folder)
    return deleted
