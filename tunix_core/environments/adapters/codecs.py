"""Text for the observations of a Gymnasium environment, and actions from text.

A space decides which codecs fit; one that does not fit is refused when the environment is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunix_core.environment_config import GymnasiumOptions
from tunix_core.errors import ConfigError
from tunix_core.validation import require

ACTION_NAMES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
"""Of the environments that ship with Gymnasium, by the name before the version."""

RULES = {
    "FrozenLake": "Walk from S to G over F; H is a hole, which ends the walk. You stand at the marked letter.",
    "CliffWalking": "You are x. Walk to T; stepping on C, the cliff, costs 100 and takes you back to the start.",
    "Taxi": (
        "You drive the taxi, marked yellow, or green with the passenger in it. Pick the passenger up at the blue letter "
        "and drop them off at the magenta one. You pass : but not |."
    ),
    "Blackjack": "Come closer to 21 than the dealer without going over. Hit takes a card, stick ends your turn.",
}
"""Of the same environments, in words: their observations do not explain themselves."""

OBSERVATION_NAMES = {"Blackjack": ("your sum", "dealer shows", "usable ace")}

_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_CONTROL = re.compile(r"\x1b\[([\d;]*)([A-Za-z])")


class NotAnAction(ValueError):
    """The text names no action; its message tells the policy what would."""


Encode = Callable[[Any], str]
Decode = Callable[[str], Any]


def observation_codec(options: GymnasiumOptions, environment: Any) -> Encode:
    """Observation -> text.

    Args:
        environment: made with the render mode of `render_mode`.

    Raises:
        ConfigError: the environment has no such text.
    """
    kind: str = options.observation
    is_text = type(environment.observation_space).__name__ == "Text"
    if kind == "auto":
        kind = "text" if is_text else "ansi" if environment.render_mode == "ansi" else "json"
    if kind == "text":
        require(is_text, "environment.options.observation", kind, "ansi, json", "Its observations are no text.")
        return str
    if kind == "ansi":
        require(
            environment.render_mode == "ansi",
            "environment.options.observation",
            kind,
            "text, json",
            "It has no text rendering.",
        )
        return lambda _observation: visible_colours(str(environment.render())).strip("\n")
    names = options.observation_names or OBSERVATION_NAMES.get(_family(options.env_id), ())
    return lambda observation: observation_as_json(observation, names)


def rules(env_id: str) -> str:
    """What the policy reads before how actions are written; empty for environments that Gymnasium does not ship."""
    return RULES.get(_family(env_id), "")


def render_mode(options: GymnasiumOptions, supported: Sequence[str]) -> str | None:
    """What `gymnasium.make` is asked for."""
    return "ansi" if options.observation in ("auto", "ansi") and "ansi" in supported else None


def visible_colours(text: str) -> str:
    """Terminal colours as `{yellow:x}`: where a player stands is often said by colour alone.

    Nested ones, such as a player on a coloured field, come out as `{yellow blue:x}`.
    """
    parts: list[str] = []
    active: list[str] = []
    end = 0
    for match in [*_CONTROL.finditer(text), None]:
        run = text[end : match.start() if match else None]
        parts.append(f"{{{' '.join(active)}:{run}}}" if run and active else run)
        if match is None:
            break
        end = match.end()
        if match[2] == "m":
            codes = [int(code) for code in match[1].split(";") if code] or [0]
            active = [] if 0 in codes else [*active, _colour(codes)]
    return "".join(parts)


def _colour(codes: Sequence[int]) -> str:
    """Of a text or its ground; the dim and the bright ones alike."""
    return next((_COLOURS[code % 10] for code in codes if code // 10 in (3, 4, 9, 10) and code % 10 < 8), "marked")


def observation_as_json(observation: Any, names: Sequence[str] = ()) -> str:
    """The value; a tuple's parts by `names`, if there are as many."""
    value = _plain(observation)
    if names and isinstance(value, list) and len(value) == len(names):
        value = dict(zip(names, value, strict=True))
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value


def action_codec(options: GymnasiumOptions, space: Any) -> tuple[Decode, str]:
    """Text -> action, raising `NotAnAction`; and what to write, as the instructions put it.

    Raises:
        ConfigError: the space has no such actions.
    """
    kind: str = options.action
    shape = type(space).__name__
    names = options.action_names or ACTION_NAMES.get(_family(options.env_id), ())
    if kind == "auto":
        discrete = "names" if names else "number"
        kind = "text" if shape == "Text" else discrete if shape == "Discrete" else "json"
    fits = {"text": shape == "Text", "names": shape == "Discrete", "number": shape == "Discrete", "json": True}
    if not fits[kind]:
        accepted = [other for other, good in fits.items() if good]
        raise ConfigError("environment.options.action", kind, ", ".join(accepted), f"Its actions are {space}.")
    if kind == "text":
        return _checked(space, str, "a text of the action space"), "your action"
    if kind == "json":
        what = f"an action as JSON, of {space}"
        return _checked(space, lambda text: _from_json(space, text), what), what
    first, count = int(space.start), int(space.n)
    if kind == "number":
        what = f"one number from {first} to {first + count - 1}"
        return _checked(space, int, what), what
    require(
        len(names) == count,
        "environment.options.action_names",
        names,
        f"{count} names, the action {first} first",
        "Name each action, or write them as numbers.",
    )
    by_name = {name.casefold(): first + place for place, name in enumerate(names)}
    what = f"one of {', '.join(names)}"
    return _checked(space, lambda text: by_name[text.casefold()], what), what


def _checked(space: Any, decode: Decode, what: str) -> Decode:
    def checked(text: str) -> Any:
        try:
            action = decode(text)
            valid = space.contains(action)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            valid = False
        if not valid:
            raise NotAnAction(f"Not an action. Write {what}.")
        return action

    return checked


def _from_json(space: Any, text: str) -> Any:
    return _typed(space, json.loads(text))


def _typed(space: Any, value: Any) -> Any:
    """JSON as the space's own types."""
    shape = type(space).__name__
    if shape in ("Box", "MultiDiscrete", "MultiBinary"):
        return np.asarray(value, dtype=space.dtype)
    if shape == "Tuple":
        return tuple(_typed(part, item) for part, item in zip(space.spaces, value, strict=True))
    if shape == "Dict":
        return {key: _typed(space.spaces[key], item) for key, item in value.items()}
    return value


def _family(env_id: str) -> str:
    return env_id.rpartition("/")[2].partition("-")[0]
