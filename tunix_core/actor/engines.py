"""Which engine a run's configuration names, and how that kind takes the weights of a policy version."""

from __future__ import annotations

import hashlib
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tunix_core.actor.dispatch import device_parameters
from tunix_core.actor.engine import Engine
from tunix_core.actor.openai_engine import OpenAIEngine
from tunix_core.actor.openai_server import ServedWeights
from tunix_core.actor.policy_engine import PolicyEngine
from tunix_core.config import RunConfig
from tunix_core.pretrained.exporting import export_version
from tunix_core.pretrained.loading import PolicyLoader
from tunix_core.storage.policies import PolicyStore
from tunix_core.tokenizer import Tokenizer


class WeightLoader(Protocol):
    """Policy versions in the form that an engine's `swap` takes; used by one thread."""

    def load(self, version: int) -> Any:
        """
        Raises:
            ObjectMissing: the version is not complete.
            CorruptObject: other bytes than its manifest says.
        """
        ...


class FolderLoader:
    """Policy versions as Hugging Face folders that servers read, in a folder of this process's own.

    Adapters are merged into the weights. What no server has, or may be given next, is removed again.

    Args:
        process: name of the process; what an earlier life of it left is removed.
    """

    KEPT = 2
    """Newest versions that stay although nothing uses them yet: the loop may be about to take one."""

    def __init__(self, policies: PolicyStore, config: RunConfig, process: str) -> None:
        self._loader = PolicyLoader(policies, config.model)
        self._config = config
        self._root = Path(config.engine.weights_folder) / re.sub(r"[^A-Za-z0-9_.-]", "_", process)
        shutil.rmtree(self._root, ignore_errors=True)
        self._root.mkdir(parents=True)
        self._loaded: list[ServedWeights] = []

    def load(self, version: int) -> ServedWeights:
        # A name that no server has seen: some remember what they read from a path.
        folder = self._root / f"{version:08d}-{uuid.uuid4().hex[:8]}"
        partial = folder.with_suffix(".partial")
        try:
            digest = self._write(partial, version)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        weights = ServedWeights(folder=folder, version=version, digest=digest)
        self._loaded.append(weights)
        for old in [w for w in self._loaded[: -self.KEPT] if not w.in_use]:
            shutil.rmtree(old.folder, ignore_errors=True)
            self._loaded.remove(old)
        return weights

    def _write(self, folder: Path, version: int) -> str:
        """The folder; returns the SHA-256 of its safetensors files."""
        names = export_version(
            folder,
            self._loader,
            self._config.model,
            version,
            context_tokens=self._config.actor.context_tokens,
            dtype=self._config.engine.weights_dtype,
        )
        digest = hashlib.sha256()
        for name in sorted(n for n in names if n.endswith(".safetensors")):
            with (folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def weight_loader(policies: PolicyStore, config: RunConfig, process: str) -> WeightLoader:
    """The loader of the configured kind."""
    if config.engine.kind == "jax":
        return PolicyLoader(policies, config.model, device_parameters)
    return FolderLoader(policies, config, process)


def make_engine(
    config: RunConfig, weights: Any, version: int, tokenizer: Tokenizer, *, process: str, log: Callable[[str], None]
) -> PolicyEngine:
    """The engine of an actor.

    Args:
        weights: as the loader of the same configuration gave them.
        process: name of the actor, `actor-<group>-<replica>`: it says which servers are its own.
    """
    if config.engine.kind == "jax":
        return Engine(
            config.model, config.actor, weights, version, end_of_turn=tokenizer.end_of_turn, decode=tokenizer.decode
        )
    return OpenAIEngine(
        config.engine,
        own_urls(config, process),
        config.actor,
        weights,
        vocab_size=config.model.vocab_size,
        temperature=config.algorithm.temperature,
        end_of_turn=tokenizer.end_of_turn,
        decode=tokenizer.decode,
        name=process,
        log=log,
    )


def own_urls(config: RunConfig, process: str) -> list[str]:
    """The servers of an actor: dealt to all actors of the run in turn, none to two of them."""
    found = re.search(r"(\d+)-(\d+)$", process)
    group, replica = (int(found[1]), int(found[2])) if found else (0, 0)
    number = config.actor.num_groups * config.actor.replicas
    return list(config.engine.base_urls[(group * config.actor.replicas + replica) % number :: number])
