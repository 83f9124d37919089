"""Several hosts in one process: the coordination service's store in memory, and a call on all of them at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax

from tunix_core.distributed.hosts import Hosts


class Service:
    """The coordination service's key-value store, as far as `Hosts` uses it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        with self._changed:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: nothing came")
            return self.values[key]

    def key_value_try_get_bytes(self, key: str) -> bytes:
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: no such key")
        return self.values[key]

    def key_value_delete(self, key: str) -> None:
        self.values.pop(key, None)


def on_all(hosts: list[Hosts], call: Callable[[Hosts], Any]) -> list[Any]:
    """The call on every host at once; results or what they raised."""
    results: list[Any] = [None] * len(hosts)

    def run(host: Hosts) -> None:
        try:
            results[host.index] = call(host)
        except Exception as error:
            results[host.index] = error

    threads = [threading.Thread(target=run, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    return results
