"""What a run takes from its pretrained model: the tokenizer, the frozen base, policy version 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tunix_core.errors import CorruptObject, DataError
from tunix_core.model_config import ModelConfig
from tunix_core.models.parameters import (
    Params,
    adapted,
    trained_parameters,
    unflatten_parameters,
)
from tunix_core.pretrained.chat import ChatTokenizer
from tunix_core.pretrained.model_folder import ModelFolder, check_model, open_model
from tunix_core.storage.policies import PolicyStore
from tunix_core.tokenizer import ByteTokenizer, Tokenizer


def load_tokenizer(model: ModelConfig) -> Tokenizer:
    """That of the pretrained model, or the byte tokenizer where there is none."""
    if not model.pretrained_uri:
        return ByteTokenizer()
    return ChatTokenizer(open_model(model.pretrained_uri).texts(), model.vocab_size)


def same_tokenizer(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether the ids of the two mean the same."""
    if one.pretrained_uri == other.pretrained_uri:
        return True
    if not (one.pretrained_uri and other.pretrained_uri):
        return False
    first, second = (open_model(model.pretrained_uri).texts() for model in (one, other))
    return first["tokenizer.json"] == second["tokenizer.json"]


def open_pretrained(model: ModelConfig) -> ModelFolder | None:
    """The run's pretrained model, checked against its configuration; None where it starts from scratch."""
    if not model.pretrained_uri:
        return None
    folder = open_model(model.pretrained_uri)
    check_model(model, folder)
    return folder


def pretrained_parameters(model: ModelConfig) -> Params | None:
    """Whole weights of the run's pretrained model; None where it starts from scratch."""
    folder = open_pretrained(model)
    return None if folder is None else unflatten_parameters(model.base(), folder.tensors())


def open_base(model: ModelConfig) -> ModelFolder:
    """The model that a run's adapters lie on."""
    folder = open_pretrained(model)
    if folder is None:
        raise DataError("model.pretrained_uri: received none, accepted the base of model.lora_rank")
    return folder


def base_entry(model: ModelConfig) -> dict[str, str] | None:
    """What the manifest of a policy version says of the base its adapters belong to; None for full weights."""
    if not model.lora_rank:
        return None
    folder = open_base(model)
    return {"uri": folder.store.uri, "sha256": folder.sha256}


def load_base(model: ModelConfig) -> Params:
    """The frozen weights under a run's adapters."""
    return unflatten_parameters(model.base(), open_base(model).tensors())


class PolicyLoader:
    """Whole weights of published versions; the base under adapters is read once and shared.

    Args:
        prepare: applied once to the base and to each version's own weights; say, puts them on the device.
    """

    def __init__(self, policies: PolicyStore, model: ModelConfig, prepare: Any = lambda params: params) -> None:
        self._policies = policies
        self._model = model
        self._prepare = prepare
        self._base: Params = prepare(load_base(model)) if model.lora_rank else {}
        self._base_sha256 = (base_entry(model) or {}).get("sha256")

    def load(self, version: int) -> Params:
        """
        Raises:
            ObjectMissing: the version is not complete.
            CorruptObject: other bytes than its manifest says, or adapters of another base.
        """
        tensors, manifest = self._policies.load(version)
        return self.adapted(tensors, manifest)

    def adapted(self, tensors: Mapping[str, np.ndarray], manifest: Mapping[str, Any]) -> Params:
        """The whole weights from a version's own."""
        found = (manifest.get("base") or {}).get("sha256")
        if found != self._base_sha256:
            raise CorruptObject(
                f"policy {manifest.get('version')}: received adapters of the base {found}, accepted {self._base_sha256}"
            )
        own = self._prepare(unflatten_parameters(self._model, tensors, trained_parameters(self._model)))
        return adapted(self._model, own, self._base)
