"""Models in and out: what is stored, what is refused, and that nothing changes on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.models.test_huggingface import model
from tests.pretrained.support import gguf_file, hf_folder
from tunix_core.errors import ConfigError, CorruptObject, DataError
from tunix_core.models import huggingface
from tunix_core.models.parameters import flatten_parameters, unflatten_parameters
from tunix_core.pretrained.exporting import export_model
from tunix_core.pretrained.importing import import_model
from tunix_core.pretrained.model_folder import check_model, model_section, open_model
from tunix_core.storage import multifile
from tunix_core.storage.store import open_store


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        found |= multifile.decode_tensors(path.read_bytes(), path.name)
    return found


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_in_and_out_gives_the_same_bits(tmp_path: Path, dtype: Any, num_shards: int) -> None:
    source = hf_folder(tmp_path / "source", "qwen3_moe", dtype=dtype, num_shards=num_shards)
    folder = import_model(source, open_store(str(tmp_path / "store")))
    names = export_model(
        tmp_path / "out",
        folder.model_config(),
        folder.tensors(),
        hf_config=folder.hf_config(),
        texts=folder.texts(),
        dtype=np.dtype(dtype).name,  # type: ignore[arg-type]
        max_shard_bytes=2**30 if num_shards == 1 else 20_000,
    )
    assert ("model.safetensors.index.json" in names) == (num_shards > 1)
    before, after = tensors_in(source), tensors_in(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert tensor.tobytes() == after[name].tobytes(), name
    # What came out goes in again: index, shards and configuration are whole.
    again = import_model(tmp_path / "out", open_store(str(tmp_path / "again")))
    assert not huggingface.differences(again.model_config(), folder.model_config())


def test_the_same_model_again_is_fine_and_another_is_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    first = import_model(hf_folder(tmp_path / "a"), store)
    assert import_model(tmp_path / "a", store).sha256 == first.sha256
    with pytest.raises(ConfigError, match="an empty folder"):
        import_model(hf_folder(tmp_path / "b", "llama3"), store)


def test_a_changed_file_is_found_out(tmp_path: Path) -> None:
    folder = import_model(hf_folder(tmp_path / "a"), open_store(str(tmp_path / "store")))
    key = multifile.file_entry(folder.manifest, "model.safetensors").key
    path = tmp_path / "store" / key
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(CorruptObject, match="sha256"):
        open_model(str(tmp_path / "store")).tensors()


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    with pytest.raises(ConfigError, match=r"config\.json, or a \.gguf"):
        import_model(tmp_path / "nothing", store)

    folder = hf_folder(tmp_path / "truncated")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(DataError, match="no safetensors file"):
        import_model(folder, store)

    folder = hf_folder(tmp_path / "shard_gone", num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(DataError, match=r"names the shard 'model-00002-of-00003.safetensors'"):
        import_model(folder, store)

    folder = hf_folder(tmp_path / "index_lies", num_shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"other tensors than .*model.norm.weight"):
        import_model(folder, store)

    folder = hf_folder(tmp_path / "two", num_shards=2)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(DataError, match="received 2 safetensors files"):
        import_model(folder, store)
    assert not store.list_after("")


def test_the_model_section_describes_the_model(tmp_path: Path) -> None:
    import tomllib

    from tunix_core.config_loading import config_from_dict

    folder = import_model(hf_folder(tmp_path / "a", "gemma3"), open_store(str(tmp_path / "store")))
    section = tomllib.loads(model_section(folder.model_config()))
    config = config_from_dict({"recipe": "x", **section}).model
    assert config == folder.model_config()
    check_model(config, folder)
    with pytest.raises(ConfigError, match="num_layers: 3, not 7"):
        check_model(config_from_dict({"recipe": "x", "model": {**section["model"], "num_layers": 3}}).model, folder)


def test_a_gguf_file_is_the_model_it_was_made_of(tmp_path: Path) -> None:
    path, theirs = gguf_file(tmp_path / "small.gguf")
    folder = import_model(path, open_store(str(tmp_path / "store")))
    config = folder.model_config()
    assert (config.num_layers, config.norm_epsilon, config.tied_embeddings) == (2, 1e-5, True)
    expected = huggingface.from_hf(config, theirs, theirs.__getitem__)
    for name, tensor in folder.tensors().items():
        np.testing.assert_array_equal(tensor, expected[name], err_msg=name)
    assert set(folder.texts()) == {"tokenizer.json", "tokenizer_config.json"}


def test_other_gguf_files_are_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    with pytest.raises(DataError, match="architecture: received 'qwen2'"):
        import_model(gguf_file(tmp_path / "a.gguf", architecture="qwen2")[0], store)
    with pytest.raises(DataError, match=r"missing model.layers.1.self_attn.q_proj.weight"):
        import_model(gguf_file(tmp_path / "b.gguf", drop="blk.1.attn_q.weight")[0], store)
    (tmp_path / "c.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(DataError, match="no GGUF file"):
        import_model(tmp_path / "c.gguf", store)


def test_export_needs_an_empty_folder(tmp_path: Path) -> None:
    config, theirs = model("llama3")
    tensors = flatten_parameters(unflatten_parameters(config, huggingface.from_hf(config, theirs, theirs.__getitem__)))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="empty folder"):
        export_model(tmp_path, config, tensors, hf_config={}, texts={})
    assert (tmp_path / "file").read_text() == "mine"
