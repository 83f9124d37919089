"""The run that a plan is about."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tunix_core.errors import ConfigError, DataError
from tunix_core.models.parameters import abstract_parameters, named_leaves
from tunix_core.planning.presets import PRESETS, parse_mesh, planned_config


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.55),
        ("qwen2.5-7b", 7.62),
        ("qwen2.5-32b", 32.76),
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.76),
        ("gemma2-9b", 9.24),
        ("gemma2-27b", 27.23),
    ],
)
def test_a_preset_has_its_models_parameters(model: str, billions: float) -> None:
    """As the model cards count them."""
    shapes = named_leaves(abstract_parameters(planned_config(model, {}).model))
    assert sum(math.prod(leaf.shape) for leaf in shapes.values()) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_a_preset_trains_all_weights_in_bfloat16_and_takes_every_option() -> None:
    config = planned_config(
        "llama3-8b", {"learner.window_tokens": 4096, "model.lora_rank": 8, "model.remat": "matmuls"}
    )
    assert (config.model.compute_dtype, config.model.remat, config.model.lora_rank) == ("bfloat16", "matmuls", 8)
    assert config.learner.window_tokens == 4096
    assert planned_config("llama3-8b", {}).model.lora_rank == 0


def test_a_folder_counts_as_its_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["qwen3-8b"]))
    preset, folder = (planned_config(model, {}).model for model in ("qwen3-8b", str(tmp_path)))
    assert vars(folder) | {"pretrained_uri": ""} == vars(preset) | {"pretrained_uri": ""}


def test_a_recipe_is_taken_as_it_is() -> None:
    config = planned_config("lookup", {"mesh.data": 2})
    assert (config.recipe, config.mesh.data, config.model.compute_dtype) == ("lookup", 2, "float32")


def test_an_unknown_model_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--model: received 'llama9', accepted one of llama3-8b, .*lookup"):
        planned_config("llama9", {})


def test_a_model_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PRESETS["llama3-8b"], "model_type": "mamba"}))
    with pytest.raises(DataError, match="model_type: received 'mamba'"):
        planned_config(str(tmp_path), {})


def test_a_mesh_as_a_person_writes_it() -> None:
    assert parse_mesh("fsdp=4,stage=4,tensor=8") == {"data": 1, "fsdp": 4, "stage": 4, "tensor": 8}


@pytest.mark.parametrize("text", ["", "fsdp", "fsdp=0", "fsdp=-1", "expert=2", "fsdp=2,fsdp=2", "fsdp=two"])
def test_a_wrong_mesh_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--mesh: received .*, accepted AXIS=COUNT.*data, fsdp, stage, tensor"):
        parse_mesh(text)
