"""A model folder in a store: a Hugging Face folder's files, verified once and pinned by SHA-256.

`MANIFEST.json` names config.json, the safetensors files and the tokenizer's files. Everything that
trains or serves the model reads it here, so a file that changed is found out before it is used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tunix_core.errors import ConfigError, CorruptObject, ObjectMissing
from tunix_core.model_config import ModelConfig
from tunix_core.models import huggingface
from tunix_core.storage import multifile
from tunix_core.storage.multifile import CONFIG
from tunix_core.storage.store import ObjectStore, from_json, open_store

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""What else of a Hugging Face folder belongs to the model; all but the first may be missing."""

_KIND = "model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """An imported model."""

    store: ObjectStore
    manifest: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        """Of what decides the model's numbers: configuration and weights."""
        names = sorted(name for name in self.manifest["files"] if name not in TEXT_FILES)
        text = "".join(f"{name} {self.manifest['files'][name]['sha256']}\n" for name in names)
        return hashlib.sha256(text.encode()).hexdigest()

    def hf_config(self) -> dict[str, Any]:
        """The model's `config.json`."""
        return from_json(CONFIG, multifile.read_file(self.store, self.manifest, CONFIG))

    def model_config(self) -> ModelConfig:
        return huggingface.model_config(self.hf_config())

    def texts(self) -> dict[str, str]:
        """The tokenizer's files, by name."""
        names = [name for name in TEXT_FILES if name in self.manifest["files"]]
        return {name: multifile.read_file(self.store, self.manifest, name).decode() for name in names}

    def tensors(self) -> dict[str, np.ndarray]:
        """Our tensors, float32; raises CorruptObject for bytes that are not the manifest's."""
        theirs: dict[str, np.ndarray] = {}
        for name in self.manifest["files"]:
            if name.endswith(".safetensors"):
                theirs |= multifile.decode_tensors(multifile.read_file(self.store, self.manifest, name), name)
        return huggingface.from_hf(self.model_config(), theirs, theirs.__getitem__)


def open_model(uri: str) -> ModelFolder:
    """The folder that `tunixctl import-model` wrote to `uri`.

    Raises:
        ConfigError: there is none.
    """
    store = open_store(uri)
    try:
        manifest = multifile.read_manifest(store, "")
    except ObjectMissing:
        raise ConfigError(
            "model.pretrained_uri", uri, "the URI of an imported model", "Import one: tunixctl import-model."
        ) from None
    if manifest.get("kind") != _KIND:
        raise CorruptObject(f"{store.uri}: the manifest is of a {manifest.get('kind')!r}, accepted a {_KIND!r}")
    return ModelFolder(store=store, manifest=manifest)


def write_model(store: ObjectStore, files: Iterable[tuple[str, bytes]], *, source: str) -> ModelFolder:
    """Store the files of a verified model; complete once, never changed.

    Raises:
        ObjectExists: there is a model already.
    """
    attempt = multifile.attempt_name("import")
    entries = multifile.put_files(store, "", attempt, files)
    multifile.put_manifest(store, "", attempt, entries, {"kind": _KIND, "source": source})
    return ModelFolder(store=store, manifest=multifile.read_manifest(store, ""))


def check_model(config: ModelConfig, folder: ModelFolder) -> None:
    """Raises ConfigError unless the run's model section describes the folder's model."""
    if different := huggingface.differences(config, folder.model_config()):
        raise ConfigError(
            "model",
            "; ".join(different),
            f"the model of {folder.store.uri}",
            "Take the [model] section that tunixctl import-model printed.",
        )


def model_section(config: ModelConfig) -> str:
    """The `[model]` table of a recipe, with what differs from the defaults."""
    lines = ["[model]"]
    for field in dataclasses.fields(ModelConfig):
        value = getattr(config, field.name)
        if value != field.default:
            lines.append(f"{field.name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"
