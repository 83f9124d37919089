"""A store that fails by script, around a real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunix_core.errors import StoreError
from tunix_core.storage.store import ObjectStore

_VERBS = (
    "put_if_absent", "get_with_version", "put_if_version", "list_after", "get", "get_range", "put", "exists", "delete",
)  # fmt: skip


class ScriptedStore:
    """Forwards to `inner`; `script(verb, key)` returns `pass`, `fail` (not done) or `lose` (done, then an error).

    `calls` lists what was asked for, as `(verb, key)`.
    """

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.parallel_requests = inner.parallel_requests
        self.counts = inner.counts
        self.script: Callable[[str, str], str] = lambda _verb, _key: "pass"
        self.calls: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        if name not in _VERBS:
            raise AttributeError(name)
        verb = getattr(self.inner, name)

        def call(key: str, *arguments: Any) -> Any:
            self.calls.append((name, key))
            action = self.script(name, key)
            if action == "fail":
                raise StoreError(f"scripted failure of {name} {key}")
            result = verb(key, *arguments)
            if action == "lose":
                raise StoreError(f"scripted loss of the answer to {name} {key}")
            return result

        return call
