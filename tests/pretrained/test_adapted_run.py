"""A run that trains adapters: version 0, a step, publication, and what actors and evaluations load."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from tasks import export_model, prepare, warm_start
from tests.pretrained.support import gguf_file
from tunix_core.config import RunConfig
from tunix_core.data.publication import Publisher
from tunix_core.environments.demonstrations import Demonstration
from tunix_core.errors import EXIT_CONFIG, ConfigError, CorruptObject
from tunix_core.learner.decoder_trainer import DecoderTrainer
from tunix_core.learner.examples import pack_examples
from tunix_core.learner.weights import load_reference
from tunix_core.models.parameters import base_parameters, flatten_parameters, trained_parameters
from tunix_core.pretrained.importing import import_model
from tunix_core.pretrained.loading import PolicyLoader, load_base, load_tokenizer
from tunix_core.pretrained.model_folder import model_section, open_model
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.run_directory import read_run
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.store import ObjectStore, open_store


@pytest.fixture
def run(tmp_path: Path) -> tuple[ObjectStore, RunConfig]:
    """A run directory with version 0: adapters on a small Llama with a tokenizer and a chat template."""
    model = import_model(gguf_file(tmp_path / "small.gguf")[0], open_store(str(tmp_path / "model")))
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        model_section(model.model_config()) + f'pretrained_uri = "{tmp_path}/model"\nlora_rank = 2\n'
        "[warm_start]\ntarget_success_low = 0.0\n"
        "[actor]\nnum_slots = 8\ncontext_tokens = 640\nmax_turns = 1\nmax_turn_tokens = 4\nprefill_tokens = 128\n"
        "[learner]\nwindow_tokens = 640\nwindows_per_microbatch = 1\nmax_windows = 2\ngroups_per_batch = 1\n"
        "[evaluation]\nnum_tasks = 2\n"
    )
    uri = str(tmp_path / "run")
    assert prepare.main(["--run", uri, "--recipe", str(recipe)]) == 0
    assert warm_start.main(["--run", uri]) == 0
    store = open_store(uri)
    return store, read_run(store)[0]


def test_only_adapters_are_trained_and_published(run: tuple[ObjectStore, RunConfig], tmp_path: Path) -> None:
    store, config = run
    policies, base = PolicyStore(store), load_base(config.model)
    first, manifest = policies.load(0)
    names = set(flatten_parameters(trained_parameters(config.model)))
    assert set(first) == names
    assert manifest["base"] == {"uri": f"file://{tmp_path}/model", "sha256": open_model(f"{tmp_path}/model").sha256}
    assert manifest["gate"]["num_steps"] == 0, "a pretrained model that is good enough is not trained"

    trainer = DecoderTrainer(config)
    trainer.compile(2, config.learner.window_tokens)
    state = trainer.initial_state(first)
    reference = trainer.reference(load_reference(store, config, {}))
    tokenizer = load_tokenizer(config.model)
    ids = np.array([*tokenizer.opening("a", "b"), *tokenizer.encode("c"), tokenizer.end_of_turn], np.int32)
    example = Demonstration(ids, np.arange(len(ids)) >= len(ids) - 2)
    batch = pack_examples([(example,)], 2, 640)
    batch = batch._replace(advantages=np.ones_like(batch.advantages))
    state, metrics = trainer.step(state, reference, trainer.put(batch), np.array([2.0], np.float32))
    assert float(metrics["kl_reference"]) == 0.0, "fresh adapters are the reference"
    assert float(metrics["gradient_norm"]) > 0
    trained = trainer.tensors(state)
    assert set(trained) == names
    moved = [name for name in names if not np.array_equal(trained[name], first[name])]
    assert moved
    assert all(name.endswith("lora_b") for name in moved), "A has no gradient while B is zero"

    SnapshotStore(store).write(1, trained, incarnation="i")
    assert Publisher(store, config, process="sync").publish_newest()
    assert policies.manifest(1)["base"] == manifest["base"]

    loaded = PolicyLoader(policies, config.model).load(1)
    jax.tree.map(np.testing.assert_array_equal, base_parameters(loaded), base)
    for name, leaf in flatten_parameters(loaded).items():
        if name in names:
            np.testing.assert_array_equal(leaf, trained[name])

    out = tmp_path / "out"
    assert export_model.main(["--run", store.uri, "--version", "1", "--to", str(out)]) == 0
    exported = import_model(out, open_store(str(tmp_path / "again"))).tensors()
    assert exported.keys() == flatten_parameters(base).keys()
    assert export_model.main(["--run", store.uri, "--version", "1", "--to", str(out)]) == EXIT_CONFIG


def test_adapters_of_another_base_are_refused(run: tuple[ObjectStore, RunConfig]) -> None:
    store, config = run
    policies = PolicyStore(store)
    tensors, manifest = policies.load(0)
    loader = PolicyLoader(policies, config.model)
    with pytest.raises(CorruptObject, match="received adapters of the base 0000"):
        loader.adapted(tensors, {**manifest, "base": {"uri": "x", "sha256": "0000"}})
    with pytest.raises(CorruptObject, match="received adapters of the base None"):
        loader.adapted(tensors, {**manifest, "base": None})


def test_settings_that_do_not_belong_together_are_refused(run: tuple[ObjectStore, RunConfig]) -> None:
    _, config = run
    with pytest.raises(ConfigError, match="Adapters need a trained base"):
        dataclasses.replace(config, model=dataclasses.replace(config.model, pretrained_uri=""))
    with pytest.raises(ConfigError, match="reference of adapters is their base"):
        dataclasses.replace(config, reference_uri="file:///x/policies/00000000")
    other = dataclasses.replace(config.model, num_layers=3)
    with pytest.raises(ConfigError, match="num_layers: 3, not 2"):
        load_base(other)
