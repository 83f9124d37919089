"""Where the weights of the KL reference come from, and those of a start from another run's policy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tunix_core.config import RunConfig
from tunix_core.config_loading import config_from_dict
from tunix_core.errors import ConfigError, CorruptObject, ObjectMissing
from tunix_core.models import huggingface
from tunix_core.models.parameters import Params, trained_parameters, unflatten_parameters
from tunix_core.pretrained.loading import base_entry, open_base, same_tokenizer
from tunix_core.storage import tensor_files
from tunix_core.storage.parts import Parts
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.store import ObjectStore, open_store


def load_reference(store: ObjectStore, config: RunConfig, extra: Mapping[str, Any]) -> dict[str, Parts]:
    """Policy 0 of this run, or the policy folder that `reference_uri` names; read, and verified by SHA-256, where it is used.

    Of a run that trains adapters it is their base: the adapted model with its adapters off.

    Args:
        extra: of `run.json`; `reference_sha256`, where given, is what the weights must have.

    Raises:
        ConfigError: the URI names no policy folder.
        CorruptObject: the weights are not those of `reference_sha256`.
    """
    if config.model.lora_rank:
        return open_base(config.model).parts()
    policies, version = PolicyStore(store), 0
    if config.reference_uri:
        policies, version = policy_folder("reference_uri", config.reference_uri)
    tensors, manifest = policies.open(version)
    expected, found = extra.get("reference_sha256"), tensor_files.digest(manifest)
    if expected and expected != found:
        raise CorruptObject(f"reference weights: received sha256 {found}, accepted {expected}, as run.json pins it")
    return tensors


def policy_folder(field: str, uri: str) -> tuple[PolicyStore, int]:
    """The policy version that `<run URI>/policies/<eight digits>` names.

    Raises:
        ConfigError: the option `field` names something else.
    """
    match = re.fullmatch(r"(.+)/policies/(\d{8})/?", uri)
    if match is None:
        raise ConfigError(
            field, uri, "<run URI>/policies/<eight digits>", "Name the folder of a published policy version."
        )
    return PolicyStore(open_store(match[1])), int(match[2])


def load_start(config: RunConfig) -> tuple[Params, str]:
    """What the policy of `start_uri` has for this run to train on, whole weights or adapters, and its SHA-256.

    Raises:
        ConfigError: it is none, or one of another model, tokenizer or base.
    """
    policies, version = policy_folder("start_uri", config.start_uri)
    try:
        tensors, manifest = policies.load(version)
    except ObjectMissing:
        raise ConfigError("start_uri", config.start_uri, "a published policy version", "Check the URI.") from None
    ours, theirs = config.model, config_from_dict(policies.config(version)).model
    different = huggingface.differences(ours, theirs)
    if not different and not same_tokenizer(ours, theirs):
        different = ["the tokenizer"]
    if different:
        raise ConfigError(
            "model", "; ".join(different), f"the model of {config.start_uri}", "Take the [model] section of its run."
        )
    base = base_entry(ours)
    names = ("lora_rank", "lora_alpha", "lora_targets") if ours.lora_rank or theirs.lora_rank else ()
    unlike = [f"{name}: {getattr(theirs, name)!r}" for name in names if getattr(ours, name) != getattr(theirs, name)]
    if (manifest["base"] or {}).get("sha256") != (base or {}).get("sha256"):
        unlike.append("another base")
    if unlike:
        raise ConfigError(
            "start_uri",
            f"{config.start_uri} ({'; '.join(unlike)})",
            "whole weights for a run without adapters, or else the same adapters of the same base",
            "Merge adapters into a model of their own with tunixctl export-model and import-model.",
        )
    return unflatten_parameters(ours, tensors, trained_parameters(ours)), tensor_files.digest(manifest)
