import dataclasses
from typing import Any

import pytest

from tunix_core.config import ActorConfig, RunConfig
from tunix_core.config_loading import config_from_dict, config_to_dict
from tunix_core.engine_config import EngineConfig
from tunix_core.errors import ConfigError

SERVED: dict[str, Any] = {
    "kind": "openai",
    "base_urls": ("http://127.0.0.1:8000", "https://gpu-1:8000/"),
    "weights_folder": "/mnt/weights",
}


def test_it_is_saved_with_the_run_and_read_again() -> None:
    config = RunConfig(recipe="test", engine=EngineConfig(**SERVED))
    assert config_from_dict(config_to_dict(config)) == config


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"base_urls": ()}, "engine.base_urls"),
        ({"base_urls": ("127.0.0.1:8000",)}, "engine.base_urls"),
        ({"base_urls": ("http://a:1", "http://a:1/")}, "engine.base_urls"),
        ({"base_urls": ("http://a:1/v1",)}, "engine.base_urls"),
        ({"weights_folder": "weights"}, "engine.weights_folder"),
        ({"weights_folder": "/mnt/../etc"}, "engine.weights_folder"),
        ({"weights_folder": "/"}, "engine.weights_folder"),
        ({"kind": "jax"}, "engine.kind"),
        ({"kind": "grpc"}, "engine.kind"),
        ({"dialect": "tgi"}, "engine.dialect"),
        ({"last_retry_seconds": 0.1}, "engine.last_retry_seconds"),
    ],
)
def test_what_cannot_work_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{**SERVED, **fields})
    assert error.value.field == named


@pytest.mark.parametrize(
    "fields",
    [
        {"base_urls": ("http://me:hunter2@gpu-1:8000",)},
        {"api_key_variable": "sk-hunter2"},
        {"api_key_variable": "SECRET_HUNTER2"},
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{**SERVED, **fields})
    assert "hunter2" not in str(error.value).lower()


def test_each_actor_needs_a_server_of_its_own() -> None:
    engine = EngineConfig(**SERVED)
    RunConfig(recipe="test", engine=engine, actor=ActorConfig(num_groups=2))
    with pytest.raises(ConfigError, match="at least 3"):
        RunConfig(recipe="test", engine=engine, actor=ActorConfig(num_groups=3))


def test_the_decoder_needs_none_of_it() -> None:
    assert dataclasses.asdict(RunConfig(recipe="test"))["engine"]["kind"] == "jax"


def test_a_server_cannot_keep_old_weights_to_the_end_of_an_episode() -> None:
    with pytest.raises(ConfigError, match="one version") as error:
        RunConfig(recipe="test", engine=EngineConfig(**SERVED), actor=ActorConfig(swap_policy="finish"))
    assert error.value.field == "actor.swap_policy"
