"""Import: a Hugging Face folder or a GGUF file becomes a model folder, verified tensor by tensor."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tunix_core.errors import ConfigError, DataError, ObjectExists
from tunix_core.models import huggingface
from tunix_core.pretrained import gguf_file
from tunix_core.pretrained.model_folder import TEXT_FILES, ModelFolder, open_model, write_model
from tunix_core.storage.multifile import CONFIG
from tunix_core.storage.store import ObjectStore

INDEX = "model.safetensors.index.json"


def import_model(source: Path, store: ObjectStore) -> ModelFolder:
    """Verify the model at `source` and store it; the same model again is fine.

    Args:
        source: a folder with config.json, safetensors (one file, or shards with their index) and
            tokenizer.json; or a .gguf file.

    Raises:
        ConfigError: `source` is neither; or another model lies in the store.
        DataError: an architecture the decoder does not compute, missing or surplus tensors, a broken file.
    """
    if source.is_file() and source.suffix == ".gguf":
        files = gguf_file.converted(source)
    elif (source / CONFIG).is_file():
        files = _verified_folder(source)
    else:
        raise ConfigError("source", str(source), "a folder with config.json, or a .gguf file", "Check the path.")
    try:
        return write_model(store, files, source=source.name)
    except ObjectExists:
        found, wanted = open_model(store.uri), _digest(source)
        if found.sha256 != wanted:
            raise ConfigError(
                "target", store.uri, f"an empty folder, or the model {wanted[:12]}", "Import into another folder."
            ) from None
        return found


def _digest(source: Path) -> str:
    """Of the model as it would be stored."""
    from tunix_core.storage.memory_store import MemoryStore

    return import_model(source, MemoryStore(f"digest-{uuid.uuid4().hex}")).sha256


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path.name}: no readable JSON ({error})") from error


def _verified_folder(folder: Path) -> Iterator[tuple[str, bytes]]:
    config = huggingface.model_config(_read_json(folder / CONFIG))
    where = _weight_files(folder)
    with contextlib.ExitStack() as opened:
        huggingface.from_hf(config, where, _reader(folder, where, opened))
    return _files(folder, sorted(set(where.values())))


def _files(folder: Path, weights: list[str]) -> Iterator[tuple[str, bytes]]:
    yield CONFIG, (folder / CONFIG).read_bytes()
    for name in weights:
        yield name, (folder / name).read_bytes()
    for name in TEXT_FILES:
        if (folder / name).is_file():
            yield name, (folder / name).read_bytes()


def _weight_files(folder: Path) -> dict[str, str]:
    """Tensor name -> the file that holds it; an index and its shards must agree."""
    if (folder / INDEX).is_file():
        index = _read_json(folder / INDEX)
        where = {str(tensor): str(name) for tensor, name in index.get("weight_map", {}).items()}
        for name in sorted(set(where.values())):
            if Path(name).name != name or not (folder / name).is_file():
                raise DataError(f"{INDEX}: names the shard {name!r}, which is not in the folder")
            held = set(_names(folder / name))
            listed = {tensor for tensor, place in where.items() if place == name}
            if held != listed:
                raise DataError(f"{name}: holds other tensors than {INDEX} lists: {sorted(held ^ listed)[:4]}")
        return where
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise DataError(
            f"weights: received {len(files)} safetensors files without {INDEX}, accepted one, or shards with their index"
        )
    return dict.fromkeys(_names(files[0]), files[0].name)


def _open(path: Path) -> Any:
    import safetensors

    try:
        return safetensors.safe_open(path, "np")
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(f"{path.name}: no safetensors file ({error})") from error


def _names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


def _reader(folder: Path, where: dict[str, str], opened: contextlib.ExitStack) -> Callable[[str], np.ndarray]:
    files = {name: opened.enter_context(_open(folder / name)) for name in set(where.values())}

    def read(tensor: str) -> np.ndarray:
        return files[where[tensor]].get_tensor(tensor)

    return read
