"""Where the weights of the KL reference come from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tunix_core.config import RunConfig
from tunix_core.errors import ConfigError, CorruptObject
from tunix_core.models.parameters import flatten_parameters
from tunix_core.pretrained.loading import load_base
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.store import ObjectStore, open_store

WEIGHTS = "model.safetensors"


def load_reference(store: ObjectStore, config: RunConfig, extra: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Policy 0 of this run, or the policy folder that `reference_uri` names, verified by SHA-256.

    Of a run that trains adapters it is their base: the adapted model with its adapters off.

    Args:
        extra: of `run.json`; `reference_sha256`, where given, is what the weights must have.

    Raises:
        ConfigError: the URI names no policy folder.
        CorruptObject: the weights are not those of the manifest, or not those of `reference_sha256`.
    """
    if config.model.lora_rank:
        return flatten_parameters(load_base(config.model))
    version = 0
    if config.reference_uri:
        match = re.fullmatch(r"(.+)/policies/(\d{8})/?", config.reference_uri)
        if match is None:
            raise ConfigError(
                "reference_uri",
                config.reference_uri,
                "<run URI>/policies/<eight digits>",
                "Name the folder of a published policy version.",
            )
        store, version = open_store(match[1]), int(match[2])
    tensors, manifest = PolicyStore(store).load(version)
    expected, found = extra.get("reference_sha256"), manifest["files"][WEIGHTS]["sha256"]
    if expected and expected != found:
        raise CorruptObject(f"reference weights: received sha256 {found}, accepted {expected}, as run.json pins it")
    return tensors
