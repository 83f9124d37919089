"""Text games of `textarena` and `gem-llm`: the message is the move, what the game says back is the observation.

Both draw from Python's process-wide generators, so sessions take turns in them, see `GlobalRandomness`. The
rules are the games': how a move is written, what an invalid one costs, how many there may be.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

from tunix_core.environment_config import EnvironmentConfig, GemOptions, TextArenaOptions
from tunix_core.environments.adapters.blocking import BlockingEnvironment, GlobalRandomness, load_package
from tunix_core.environments.base import Observation, StepResult
from tunix_core.errors import ConfigError


class Moved(NamedTuple):
    """What a move led to."""

    text: str
    reward: float
    done: bool
    truncated: bool
    valid: bool


class TextGame(BlockingEnvironment):
    """A game whose calls draw from the process-wide generators."""

    def __init__(self, config: EnvironmentConfig, *, latency: bool = True, weather_seed: int = 0) -> None:
        super().__init__(config, latency=latency, weather_seed=weather_seed)
        self._return = 0.0
        self._moves = 0
        self._invalid = 0

    def _reset(self, seed: int) -> Observation:
        self._randomness = GlobalRandomness(seed)
        self._return, self._moves, self._invalid = 0.0, 0, 0
        with self._randomness.installed():
            return Observation(self._open(seed))

    def _step(self, message: str) -> StepResult:
        with self._randomness.installed():
            moved = self._move(message)
        self._return += moved.reward
        self._moves += 1
        self._invalid += not moved.valid
        components = {
            "return": self._return,
            "actions": float(self._moves),
            "malformed_calls": float(self._invalid),
        }
        text = "" if moved.done else moved.text
        return StepResult(text, moved.reward, moved.done, components=components, truncated=moved.truncated, role="user")

    @abc.abstractmethod
    def _open(self, seed: int) -> str:
        """Start a game; what the player reads first."""

    @abc.abstractmethod
    def _move(self, message: str) -> Moved:
        """Play a move."""


class TextArenaGame(TextGame):
    """A single-player game of `textarena`, without its wrappers: they repeat the whole conversation at each turn.

    Its reward comes with the end. Games that fetch word lists (Wordle, Hangman and their like) fail offline.

    Raises:
        ConfigError: the package is missing, or does not know the game.
    """

    name = "textarena"

    def __init__(self, config: EnvironmentConfig, *, latency: bool = True, weather_seed: int = 0) -> None:
        super().__init__(config, latency=latency, weather_seed=weather_seed)
        self._options = config.options_as(TextArenaOptions)
        self._package = load_package("textarena", "textarena")
        self._raw_id = self._options.env_id.removesuffix("-raw") + "-raw"
        _check_known("textarena", self._options.env_id, self._raw_id in self._package.envs.registration.ENV_REGISTRY)

    def _open(self, seed: int) -> str:
        self._game = self._package.make(self._raw_id, **self._options.arguments)
        self._game.reset(num_players=1, seed=seed % 2**32)
        if not isinstance(self._game.state, self._package.SinglePlayerState):
            raise ConfigError(
                "environment.options.env_id",
                self._options.env_id,
                "a single-player game",
                "Games against others need other players.",
            )
        if self._options.max_invalid_moves:
            self._game.state.error_allowance = self._options.max_invalid_moves
        return self._said()

    def _move(self, message: str) -> Moved:
        state = self._game.state
        errors = state.error_count
        done, _ = self._game.step(message)
        reward = float((state.rewards or {}).get(0, 0.0)) if done else 0.0
        valid = not (state.error_count > errors or state.game_info[0]["invalid_move"])
        return Moved("" if done else self._said(), reward, bool(done), False, valid)

    def _said(self) -> str:
        """What the game says since the last time; the player's own words are in the conversation already."""
        _, messages = self._game.get_observation()
        own = self._package.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in messages if kind != own)


class GemGame(TextGame):
    """A game of `gem-llm`; its reward may be below 0 for what it cannot read, which ends most games.

    Raises:
        ConfigError: the package is missing, or does not know the game.
    """

    name = "gem"

    def __init__(self, config: EnvironmentConfig, *, latency: bool = True, weather_seed: int = 0) -> None:
        super().__init__(config, latency=latency, weather_seed=weather_seed)
        self._options = config.options_as(GemOptions)
        self._package = load_package("gem", "gem")
        self._registration = load_package("gem.envs.registration", "gem")
        load_package("gem.envs", "gem")
        _check_known("gem", self._options.env_id, self._options.env_id in self._registration.ENV_REGISTRY)

    def _open(self, seed: int) -> str:
        self._game = self._registration.make(self._options.env_id, **self._options.arguments)
        observation, info = self._game.reset(seed=seed)
        return _with_suffix(observation, info)

    def _move(self, message: str) -> Moved:
        observation, reward, terminated, truncated, info = self._game.step(message)
        done = bool(terminated or truncated)
        # Below 0 is what the package gives for a move that it cannot read.
        return Moved(_with_suffix(observation, info), float(reward), done, done and bool(truncated), reward >= 0)


def _with_suffix(observation: str, info: dict[str, Any]) -> str:
    return "\n".join(part for part in (observation.strip("\n"), info.get("suffix", "")) if part)


def _check_known(package: str, env_id: str, known: bool) -> None:
    if not known:
        raise ConfigError("environment.options.env_id", env_id, f"a game of {package}", "See its registry.")
