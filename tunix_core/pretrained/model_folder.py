"""A model folder in a store: a Hugging Face folder's files, verified once and pinned by SHA-256.

`MANIFEST.json` names config.json, the safetensors files and the tokenizer's files. Everything that
trains or serves the model reads it here, so a file that changed is found out before it is used.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tunix_core.errors import ConfigError, CorruptObject, ObjectMissing
from tunix_core.model_config import ModelConfig
from tunix_core.models import huggingface
from tunix_core.models.parameters import abstract_parameters, named_leaves
from tunix_core.storage import multifile, tensor_files
from tunix_core.storage.multifile import CONFIG
from tunix_core.storage.parts import Part, Parts
from tunix_core.storage.store import ObjectStore, from_json, open_store
from tunix_core.storage.tensor_files import StoredBox

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

    def parts(self) -> dict[str, Parts]:
        """The same, of which nothing is read yet: their tensors are read one by one, where a layer or expert is needed.

        Raises:
            CorruptObject: while reading, bytes that are not the manifest's.
        """
        theirs = tensor_files.opened(self.store, self.manifest)
        config = self.model_config()
        shapes = named_leaves(abstract_parameters(config))
        found = {}
        for name, place in huggingface.places(config).items():
            whole = shapes[name].shape
            parts = []
            for index, key in huggingface.their_names(config, place):
                shape = (1,) * len(index) + whole[len(index) :]
                offset = index + (0,) * (len(whole) - len(index))
                load = functools.partial(_ours, theirs[key], place.transposed, shape)
                parts.append(Part(offset=offset, shape=shape, load=load))
            found[name] = Parts(whole, np.float32, parts)
        return found


def _ours(theirs: Parts, transposed: bool, shape: tuple[int, ...]) -> np.ndarray:
    tensor = np.asarray(theirs)
    return (tensor.T if transposed else tensor).reshape(shape).astype(np.float32)


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
    boxes: dict[str, list[StoredBox]] = {}

    def noted() -> Iterator[tuple[str, bytes]]:
        for name, data in files:
            if name.endswith(".safetensors"):
                boxes[name] = tensor_files.boxes_of(data)
            yield name, data

    entries = multifile.put_files(store, "", attempt, noted())
    fields = {"kind": _KIND, "source": source, tensor_files.FIELD: boxes}
    multifile.put_manifest(store, "", attempt, entries, fields)
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
