"""Environments with the Gymnasium API, text in and out.

Each message is one action, which `codecs` reads; what is no action changes nothing, is told so and counted.
Rewards stay with the message that earned them, and an episode's reward is their sum: those that are not
1 for a success make success rates, which look for 1, meaningless. `terminated` ends an episode as
completed, `truncated` (a time limit) as truncated.
"""

from __future__ import annotations

import functools
from typing import Any

from tunix_core.environment_config import (
    GYMNASIUM_ENTRY_POINTS,
    EnvironmentConfig,
    GymnasiumOptions,
    installed,
    load_installed,
)
from tunix_core.environments.adapters.blocking import BlockingEnvironment, load_package
from tunix_core.environments.adapters.codecs import NotAnAction, action_codec, observation_codec, render_mode, rules
from tunix_core.environments.adapters.messages import extract, how_to
from tunix_core.environments.base import MAX_DRAWS, Observation, StepResult, draw_instance
from tunix_core.errors import ConfigError


class GymnasiumText(BlockingEnvironment):
    """One episode of `gymnasium.make(env_id, **arguments)`.

    Raises:
        ConfigError: the package is missing, does not know the environment, or its spaces do not fit the codecs.
    """

    name = "gymnasium"

    def __init__(self, config: EnvironmentConfig, *, latency: bool = True, weather_seed: int = 0) -> None:
        super().__init__(config, latency=latency, weather_seed=weather_seed)
        self._options = config.options_as(GymnasiumOptions)
        self._package = load_package("gymnasium", "gymnasium")
        _check_environment(self._options)
        self._environment: Any = None
        self._return = 0.0
        self._actions = 0
        self._malformed = 0

    def _reset(self, seed: int) -> Observation:
        self._environment, self._encode, self._decode, what = make(self._package, self._options)
        self._return, self._actions, self._malformed = 0.0, 0, 0
        own = f"{rules(self._options.env_id)} {how_to(self._options.extract, 'action', what)}".strip()
        instructions = self._options.instructions or own
        if self._options.splits == "seed":
            return Observation(self._open(seed), instructions)
        opening = draw_instance(
            seed,
            lambda rng: self._open(rng.getrandbits(63)),
            max_draws=MAX_DRAWS,
            too_few=f"gymnasium: openings of {self._options.env_id}. Set splits to seed.",
        )
        return Observation(opening, instructions)

    def _open(self, seed: int) -> str:
        observation, _ = self._environment.reset(seed=seed)
        return self._encode(observation)

    def _step(self, message: str) -> StepResult:
        text = extract(message, self._options.extract, "action")
        try:
            action = self._decode("" if text is None else text)
        except NotAnAction as error:
            self._malformed += 1
            return StepResult(str(error), 0.0, False, components=self._components(), role="user")
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        self._return += float(reward)
        self._actions += 1
        done = bool(terminated or truncated)
        return StepResult(
            "" if done else self._encode(observation),
            float(reward),
            done,
            components=self._components(),
            truncated=done and not terminated,
            role="user",
        )

    def _components(self) -> dict[str, float]:
        return {
            "return": self._return,
            "actions": float(self._actions),
            "malformed_calls": float(self._malformed),
        }

    def _release(self) -> None:
        if self._environment is not None:
            self._environment.close()


def make(package: Any, options: GymnasiumOptions) -> tuple[Any, Any, Any, str]:
    """The environment, its observation and action codecs, and what an action is."""
    if options.env_id not in package.registry:
        for name in installed(GYMNASIUM_ENTRY_POINTS):
            load_installed(GYMNASIUM_ENTRY_POINTS, name, "environment.options.env_id")
    try:
        creator = package.spec(options.env_id).entry_point
        kind = package.envs.registration.load_env_creator(creator) if isinstance(creator, str) else creator
        mode = render_mode(options, getattr(kind, "metadata", {}).get("render_modes", ()))
        arguments = {"disable_env_checker": True, **options.arguments}  # it is for authors, and checks each step
        environment = package.make(options.env_id, render_mode=mode, **arguments)
    except (package.error.Error, TypeError) as error:
        raise ConfigError(
            "environment.options.env_id",
            options.env_id,
            "an environment that gymnasium.make takes with these arguments",
            f"{error}.",
        ) from error
    decode, what = action_codec(options, environment.action_space)
    return environment, observation_codec(options, environment), decode, what


@functools.cache
def _check_environment(options: GymnasiumOptions) -> None:
    """Once per process: make it and throw it away, so that what does not fit is refused at the start."""
    make(load_package("gymnasium", "gymnasium"), options)[0].close()
