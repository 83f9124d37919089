"""Who generates an actor's tokens: its own decoder, or servers that speak an OpenAI-compatible API."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from tunix_core.validation import require, require_choice, require_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """`kind = "jax"` needs nothing else; the rest is of `kind = "openai"`."""

    kind: Literal["jax", "openai"] = "jax"
    dialect: Literal["vllm", "sglang"] = "vllm"
    base_urls: tuple[str, ...] = ()
    """One per server, such as `http://127.0.0.1:8000`. They are dealt to the actors in turn, and each belongs to one actor,
    which alone changes its weights: so there are at least as many as actors."""
    model_name: str = "policy"
    """As the server calls it (`--served-model-name`); vLLM wants it in each request."""
    api_key_variable: str = ""
    """Name of the environment variable that holds the servers' key, `TUNIX_ENGINE_KEY` or with more behind it: a run's
    configuration must not be able to send any other secret of the environment to an address. Empty: none is sent."""
    weights_folder: str = ""
    """Absolute path of a folder that actors and servers see under the same name; versions are handed over in it."""
    weights_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the handed over weights; what the servers compute in is theirs to say."""
    max_concurrent_requests: int = 256
    """To one server; an overloaded one is asked less at a time until it keeps up again."""
    connect_timeout_seconds: float = 5.0
    request_timeout_seconds: float = 300.0
    """Of one turn's generation."""
    reload_timeout_seconds: float = 900.0
    max_retries: int = 6
    """Of a request that a server could not serve; then it costs its rollout."""
    first_retry_seconds: float = 0.25
    """The pause before a retry is drawn between half of it and all of it, and doubles each time."""
    last_retry_seconds: float = 15.0
    gone_after_seconds: float = 300.0
    """Without an answer from any server for so long the actor ends, to be started again."""
    max_logprob_error: float = 0.05
    """By how much, in nats, a probe may miss the distribution at the run's temperature."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in ("kind", "dialect", "weights_dtype"):
            require_choice(f"engine.{field}", getattr(self, field), hints[field])
        require_range("engine.max_concurrent_requests", self.max_concurrent_requests, 1, 65_536)
        require_range("engine.max_retries", self.max_retries, 0, 100)
        require_range("engine.max_logprob_error", self.max_logprob_error, 1e-6, 1)
        for field in (
            "connect_timeout_seconds",
            "request_timeout_seconds",
            "reload_timeout_seconds",
            "first_retry_seconds",
            "gone_after_seconds",
        ):
            require_range(f"engine.{field}", getattr(self, field), 0.001, 86_400)
        require_range("engine.last_retry_seconds", self.last_retry_seconds, self.first_retry_seconds, 86_400)
        require(
            re.fullmatch(r"(TUNIX_ENGINE_KEY(_[A-Z0-9_]+)?)?", self.api_key_variable) is not None,
            "engine.api_key_variable",
            # What stands there by mistake may be the key.
            "something else",
            "TUNIX_ENGINE_KEY or TUNIX_ENGINE_KEY_…, the NAME of an environment variable",
            "Put the key into that variable of the actors' environment, never into the configuration.",
        )
        if self.kind == "jax":
            given = [name for name in ("base_urls", "weights_folder") if getattr(self, name)]
            require(not given, "engine.kind", self.kind, "openai with engine." + ", ".join(given), "Say which one.")
            return
        for url in self.base_urls:
            parts = urlsplit(url)
            require(
                parts.scheme in ("http", "https")
                and bool(parts.hostname)
                and not (parts.username or parts.password or parts.query or parts.fragment or parts.path.strip("/")),
                "engine.base_urls",
                f"{parts.scheme}://…@{parts.hostname}" if "@" in url else url,  # credentials are not repeated
                "http(s)://host:port",
                "Leave out path and credentials; a key goes into engine.api_key_variable.",
            )
        require(
            0 < len(self.base_urls) == len({url.rstrip("/") for url in self.base_urls}),
            "engine.base_urls",
            list(self.base_urls),
            "one or more different servers",
            "Name the address of each server once.",
        )
        path = Path(self.weights_folder)
        require(
            path.is_absolute() and ".." not in path.parts and len(path.parts) > 1,
            "engine.weights_folder",
            self.weights_folder,
            "an absolute path without '..'",
            "Name a folder that actors and servers share.",
        )
