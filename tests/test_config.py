"""Configuration: bad input names field, value, accepted range and remedy; a resolved config round-trips."""

import dataclasses
import json
import math

import pytest

from tunix_core import config_loading as c
from tunix_core.errors import ConfigError


@pytest.mark.parametrize("recipe", c.recipe_names())
def test_recipe_resolves_and_round_trips(recipe: str) -> None:
    resolved = c.load_recipe(recipe)
    values = json.loads(json.dumps(c.config_to_dict(resolved)))
    assert c.config_from_dict(values) == resolved
    assert set(values) == {f.name for f in dataclasses.fields(c.RunConfig)}


def test_overrides_reach_nested_and_top_level_fields() -> None:
    overrides = c.parse_overrides(
        ["learner.num_steps=7", "seed=3", "launcher.learner_cpus=[1]", "environment.name=calculator"]
    )
    resolved = c.load_recipe("lookup", overrides)
    assert (resolved.learner.num_steps, resolved.seed) == (7, 3)
    assert resolved.launcher.learner_cpus == (1,)
    assert resolved.environment.name == "calculator"


def test_toml_file_is_a_recipe(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[algorithm]\ngroup_size = 4\n")
    resolved = c.load_recipe(str(path))
    assert resolved.recipe == "mine"
    assert resolved.batch_trajectories == resolved.learner.groups_per_batch * 4


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"learner.num_step": 7}, "learner.num_step"),
        ({"nothing.at_all": 7}, "nothing"),
        ({"learner.num_steps": "many"}, "learner.num_steps"),
        ({"learner.num_steps": True}, "learner.num_steps"),
        ({"learner.num_steps": 0}, "learner.num_steps"),
        ({"seed.deep": 1}, "seed"),
        ({"environment.name": "chess"}, "environment.name"),
        ({"launcher.learner_cpus": 1}, "launcher.learner_cpus"),
        ({"launcher.learner_cpus": [-1]}, "launcher.learner_cpus"),
        ({"model.num_kv_heads": 3}, "model.num_kv_heads"),
        ({"mesh.tensor": 3}, "mesh.tensor"),
        ({"mesh.fsdp": 0}, "mesh.fsdp"),
        ({"learner.shorter_windows": [64, 32]}, "learner.shorter_windows"),
        ({"learner.shorter_windows": [256]}, "learner.shorter_windows"),
        ({"learner.shorter_windows": [128], "model.num_layers": 2, "mesh.stage": 2}, "learner.shorter_windows"),
        ({"mesh.schedule": "zigzag"}, "mesh.schedule"),
        ({"optimizer.first_moment_dtype": "int8"}, "optimizer.first_moment_dtype"),
        ({"actor.swap_policy": "never"}, "actor.swap_policy"),
        ({"actor.max_resident_versions": 1}, "actor.max_resident_versions"),
        ({"actor.stop_strings": [""]}, "actor.stop_strings"),
        ({"actor.context_sizes": 0}, "actor.context_sizes"),
        ({"evaluation.top_k": 5}, "evaluation.top_k"),
        ({"evaluation.temperature": 0.7}, "evaluation.temperature"),
        ({"evaluation.greedy": False, "evaluation.top_p": 1.1}, "evaluation.top_p"),
        ({"evaluation.greedy": False, "evaluation.temperature": 0}, "evaluation.temperature"),
        ({"staleness.max_staleness": 2, "learner.snapshot_interval_steps": 3}, "learner.snapshot_interval_steps"),
        ({"staleness.max_staleness": 0, "learner.snapshot_interval_steps": 2}, "learner.snapshot_interval_steps"),
        ({"algorithm.group_size": 999}, "actor.num_slots"),
        ({"actor.context_tokens": 4096}, "actor.context_tokens"),
        ({"actor.min_actors": 99}, "actor.min_actors"),
        ({"environment.timeout_seconds": 700}, "actor.episode_timeout_seconds"),
        ({"actor.episode_timeout_seconds": 1300}, "actor.group_timeout_seconds"),
        ({"actor.max_forks": 4}, "actor.max_forks"),
        ({"actor.drain_seconds": 9}, "actor.drain_seconds"),
        ({"actor.max_observation_bytes": 10}, "actor.max_observation_bytes"),
        ({"fine_tune.held_out_fraction": 0.95}, "fine_tune.held_out_fraction"),
        ({"preferences.beta": 0}, "preferences.beta"),
        ({"start_uri": "runs/a/policies/00000012"}, "reference_uri"),
        ({"observability.sinks": ["prometheus"]}, "observability.sinks[0]"),
        ({"observability.sinks": ["wandb", "wandb"]}, "observability.sinks"),
        ({"observability.local_folder": "here"}, "observability.local_folder"),
        ({"observability.local_folder": "/a/../b"}, "observability.local_folder"),
        ({"observability.peak_flops_per_second": -1}, "observability.peak_flops_per_second"),
        ({"observability.peak_flops_per_second": math.inf}, "observability.peak_flops_per_second"),
        (
            {
                "algorithm.advantage": "gae",
                "algorithm.loss": "vtrace",
                "algorithm.correction": "none",
                "learner.updates_per_batch": 2,
            },
            "learner.updates_per_batch",
        ),
        ({"algorithm.overlong_limit_tokens": 9}, "algorithm.overlong_limit_tokens"),
        ({"algorithm.overlong_buffer_tokens": 9}, "algorithm.overlong_buffer_tokens"),
        ({"algorithm.overlong_penalty": 1.0}, "algorithm.overlong_limit_tokens"),
        ({"algorithm.overlong_penalty": -1.0}, "algorithm.overlong_penalty"),
        (
            {"algorithm.overlong_penalty": 1.0, "algorithm.overlong_limit_tokens": 9},
            "algorithm.overlong_buffer_tokens",
        ),
        (
            {
                "algorithm.overlong_penalty": 1.0,
                "algorithm.overlong_limit_tokens": 9,
                "algorithm.overlong_buffer_tokens": 10,
            },
            "algorithm.overlong_buffer_tokens",
        ),
        (  # 4 turns of at most 16 tokens
            {
                "algorithm.overlong_penalty": 1.0,
                "algorithm.overlong_limit_tokens": 68,
                "algorithm.overlong_buffer_tokens": 4,
                "actor.max_turns": 4,
                "actor.max_turn_tokens": 16,
            },
            "algorithm.overlong_limit_tokens",
        ),
    ],
)
def test_bad_values_are_refused_by_field(overrides: dict, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        c.load_recipe("lookup", overrides)
    assert caught.value.field == field
    message = str(caught.value)
    assert "received" in message
    assert "accepted" in message


def test_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="lookup"):
        c.load_recipe("nonesuch")


def test_malformed_toml_is_a_config_error(tmp_path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("[algorithm\n")
    with pytest.raises(ConfigError, match="valid TOML"):
        c.load_recipe(str(path))


@pytest.mark.parametrize("pair", ["no-separator", "=3"])
def test_malformed_override_is_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.field=value"):
        c.parse_overrides([pair])
