"""An OpenEnv server as its users write one: guess a number. `python -m … PORT [MAX_SESSIONS]`."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field


class Guess(Action):
    message: str = Field(max_length=40)


class Hint(Observation):
    text: str = ""


class GuessEnvironment(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number: int | None = None
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, largest: int = 20, **_: Any) -> Hint:
        self._number = random.Random(seed).randint(1, largest)
        self._state = State(episode_id=episode_id)
        return Hint(text=f"A number from 1 to {largest}; task {seed}.")

    def step(self, action: Guess, **_: Any) -> Hint:
        assert self._number is not None, "never reset"
        self._state.step_count += 1
        if action.message == "sleep":
            time.sleep(5)
        if action.message == "crash":
            raise ZeroDivisionError("scripted")
        if action.message == "die":
            os._exit(1)
        if not action.message.isdigit():
            return Hint(text="digits!", reward=0.0)
        guess = int(action.message)
        if guess == self._number:
            return Hint(text="right", reward=1.0, done=True)
        return Hint(text="higher" if guess < self._number else "lower", reward=0.0)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    port, sessions = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 128
    app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
