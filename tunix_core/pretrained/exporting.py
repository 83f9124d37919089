"""Export: weights as a Hugging Face folder that any of its readers loads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tunix_core.errors import ConfigError
from tunix_core.model_config import ModelConfig
from tunix_core.models import huggingface
from tunix_core.models.parameters import flatten_parameters
from tunix_core.pretrained.importing import INDEX
from tunix_core.pretrained.loading import PolicyLoader, open_pretrained
from tunix_core.storage import multifile
from tunix_core.storage.multifile import CONFIG

ExportDtype = Literal["float32", "bfloat16"]


def export_model(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    hf_config: Mapping[str, Any],
    texts: Mapping[str, str],
    dtype: ExportDtype = "float32",
    max_shard_bytes: int = 5 * 2**30,
) -> list[str]:
    """Write config.json, safetensors and tokenizer files; returns the files' names.

    Args:
        folder: missing or empty.
        tensors: ours; adapters are merged into the weights here, and nowhere else.
        hf_config: the imported model's config.json, or `huggingface.hf_config`.
        texts: tokenizer files by name.
        dtype: of the weights; rounded to nearest even.
        max_shard_bytes: a larger model is split, with an index.

    Raises:
        ConfigError: the folder holds something.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError("folder", str(folder), "a missing or an empty folder", "Name another one.")
    folder.mkdir(parents=True, exist_ok=True)
    whole = huggingface.merged(config, tensors)
    typed = ((name, _rounded(tensor, dtype)) for name, tensor in huggingface.to_hf(config.base(), whole))
    shards = list(_sharded(typed, max_shard_bytes))
    names = [_shard_name(number, len(shards)) for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        (folder / name).write_bytes(multifile.encode_tensors(shard, {"format": "pt"}))
    if len(shards) > 1:
        where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        names.append(INDEX)
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=1))
    # Both names of the field: readers know one or the other.
    values = {**hf_config, "torch_dtype": dtype, "dtype": dtype}
    for name, text in {CONFIG: json.dumps(values, indent=2), **texts}.items():
        (folder / name).write_text(text)
        names.append(name)
    return names


def export_version(
    folder: Path,
    loader: PolicyLoader,
    model: ModelConfig,
    version: int,
    *,
    context_tokens: int,
    dtype: ExportDtype = "float32",
    max_shard_bytes: int = 5 * 2**30,
) -> list[str]:
    """A published policy version as `export_model` writes it, with configuration and tokenizer of the run's model.

    Args:
        context_tokens: what config.json states where there is no pretrained model to take it from.
    """
    imported = open_pretrained(model)
    return export_model(
        folder,
        model,
        flatten_parameters(loader.load(version)),
        hf_config=imported.hf_config() if imported else huggingface.hf_config(model, context_tokens=context_tokens),
        texts=imported.texts() if imported else {},
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )


def _rounded(tensor: np.ndarray, dtype: ExportDtype) -> np.ndarray:
    if dtype == "float32":
        return tensor
    import ml_dtypes

    return tensor.astype(ml_dtypes.bfloat16)


def _sharded(tensors: Iterable[tuple[str, np.ndarray]], max_shard_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
