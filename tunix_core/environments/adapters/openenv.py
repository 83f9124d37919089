"""A session of an OpenEnv server: the environment runs there, one per connection.

A reset connects, again and again while the server refuses or is full, up to `connect_attempts`. After that
the connection is the episode: when it breaks, or an answer is late, the episode fails. (The package's own
client would connect anew without a word, and so step an environment that was never reset.) An action that
the server's schema refuses is told to the policy; an environment that raises is a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
from typing import Any, NoReturn

from tunix_core.environment_config import EnvironmentConfig, OpenEnvOptions
from tunix_core.environments.adapters.blocking import load_package
from tunix_core.environments.base import Observation, StepResult, ToolWeather
from tunix_core.errors import EnvironmentFailure
from tunix_core.validation import require_package

EXTRA = "openenv"
FIRST_PAUSE_SECONDS = 0.2
DROP_SECONDS = 1.0
_CODE = re.compile(r"\(code: (\w+)\)$")
_NOT_JSON = "Not an action. Write a JSON object."


class OpenEnvSession:
    """One episode over one connection.

    Raises:
        ConfigError: the package is missing.
    """

    name = "openenv"

    def __init__(self, config: EnvironmentConfig, *, latency: bool = True, weather_seed: int = 0) -> None:
        self._options = config.options_as(OpenEnvOptions)
        self._weather = ToolWeather(config, weather_seed, latency=latency)
        require_package("openenv", EXTRA)
        self._client_type = _client_type()
        self._client: Any = None
        self._return = 0.0
        self._actions = 0
        self._malformed = 0

    async def reset(self, seed: int) -> Observation:
        await self.close()
        self._return, self._actions, self._malformed = 0.0, 0, 0
        result = await self._connected({**self._options.reset, "seed": seed})
        if result.done:
            raise EnvironmentFailure("openenv: the episode is over before its first action")
        return Observation(self._text(result.observation), self._options.instructions)

    async def step(self, message: str) -> StepResult:
        if self._client is None:
            raise EnvironmentFailure("openenv: step before reset, or after the connection broke")
        action = self._action(message)
        if action is None:
            return self._refused(_NOT_JSON)
        await self._weather.call()
        try:
            result = await self._client.step(action)
        except TimeoutError as error:
            await self._fail(f"no answer within {self._options.step_seconds} s", error)
        except RuntimeError as error:  # what the server answers with
            if _code(error) == "VALIDATION_ERROR":
                return self._refused("The environment does not accept this action.")
            raise EnvironmentFailure(f"openenv: {error}") from error
        except Exception as error:
            await self._fail(f"the connection broke: {error!r}", error)
        reward = float(result.reward or 0.0)
        self._return += reward
        self._actions += 1
        text = "" if result.done else self._text(result.observation)
        return StepResult(text, reward, bool(result.done), components=self._components(), role="user")

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _fail(self, why: str, error: Exception) -> NoReturn:
        client, self._client = self._client, None
        await _drop(client)
        raise EnvironmentFailure(f"openenv: {why}") from error

    async def _connected(self, arguments: dict[str, Any]) -> Any:
        """A fresh session's answer to the reset."""
        pause, options = FIRST_PAUSE_SECONDS, self._options
        for attempt in range(options.connect_attempts):
            if attempt:
                await asyncio.sleep(pause)
                pause *= 2
            client = self._client_type(
                base_url=options.url,
                connect_timeout_s=options.connect_seconds,
                message_timeout_s=options.step_seconds,
                mode="simulation",
            )
            try:
                await client.connect()
                client.keeps_connection = True
                result = await client.reset(**arguments)
            except Exception as error:
                await _drop(client)
                failure = error
                if not isinstance(error, ConnectionError) and _code(error) != "CAPACITY_REACHED":
                    break
            except BaseException:
                await _drop(client)
                raise
            else:
                self._client = client
                return result
        raise EnvironmentFailure(f"openenv: no session at {options.url}: {failure!r}") from failure

    def _action(self, message: str) -> dict[str, Any] | None:
        """The action as the server's schema has it; None where the message is no JSON object and has to be."""
        if self._options.action_field:
            return {**self._options.action, self._options.action_field: message}
        try:
            value = json.loads(message)
        except (ValueError, RecursionError):
            return None
        return {**self._options.action, **value} if isinstance(value, dict) else None

    def _refused(self, text: str) -> StepResult:
        self._malformed += 1
        return StepResult(text, 0.0, False, components=self._components(), role="user")

    def _text(self, observation: dict[str, Any]) -> str:
        field = self._options.observation_field
        if not field:
            return json.dumps(observation, ensure_ascii=False)
        if field not in observation:
            raise EnvironmentFailure(
                f"openenv: environment.options.observation_field: received {field!r}, accepted {', '.join(observation)}. "
                "Name a field of the observation."
            )
        value = observation[field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def _components(self) -> dict[str, float]:
        return {
            "return": self._return,
            "actions": float(self._actions),
            "malformed_calls": float(self._malformed),
        }


@functools.cache
def _client_type() -> Any:
    """The package's client that takes and gives plain values, made to keep to one connection."""
    generic = load_package("openenv.core.generic_client", EXTRA).GenericEnvClient
    state = load_package("websockets.protocol", EXTRA).State

    class OneSessionClient(generic):  # type: ignore[misc,valid-type]
        keeps_connection = False

        async def _ensure_connected(self) -> None:
            if self.keeps_connection and (self._ws is None or self._ws.state is not state.OPEN):
                raise ConnectionError("the server closed it")
            await super()._ensure_connected()

    return OneSessionClient


async def _drop(client: Any) -> None:
    """Close what has failed already, at most for so long; the server ends a session whose connection goes."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(DROP_SECONDS):
            await client.close()


def _code(error: BaseException) -> str:
    found = _CODE.search(str(error))
    return found[1] if found else ""
