"""The policy server as a process of its own, and the folders that it loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.actor.support import ACTOR, MODEL, weights
from tests.support.quick_compiler import QUICK_FLAGS
from tunix_core.actor.openai_server import ServedWeights
from tunix_core.models import huggingface
from tunix_core.models.parameters import flatten_parameters
from tunix_core.pretrained.exporting import export_model
from tunix_core.processes import free_port

ROOT = Path(__file__).parents[2]
START_SECONDS = 240.0

FIRST_SEED = 9
"""Of the weights that the session's server starts with: those of no version."""


def export(folder: Path, seed: int) -> Path:
    """The weights of `tests.actor.support` as a Hugging Face folder."""
    hf_config = huggingface.hf_config(MODEL, context_tokens=ACTOR.context_tokens)
    export_model(folder, MODEL, flatten_parameters(weights(seed)), hf_config=hf_config, texts={})
    return folder


def served(root: Path, seed: int, version: int) -> ServedWeights:
    folder = root / f"{version}-of-seed-{seed}"
    if not folder.exists():
        export(folder, seed)
    return ServedWeights(folder=folder, version=version, digest=f"{seed:064x}")


class ServerProcess:
    """Started at once; `wait` until it serves."""

    def __init__(self, folder: Path, *, port: int = 0, context: int = ACTOR.context_tokens) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "tests.support.policy_server", "--folder", str(folder)]
        self._command += ["--port", str(self.port), "--context", str(context)]
        self._log = (folder.parent / f"server-{self.port}.log").open("w+")
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS},
            stdout=self._log,
            stderr=self._log,
        )

    def wait(self) -> ServerProcess:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self._process.poll() is None, Path(self._log.name).read_text()[-3000:]
            try:
                self.faults()
                return self
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"no server after {START_SECONDS} s")

    def faults(self, **faults: Any) -> dict[str, int]:
        """Replace what goes wrong from now on; returns how often each path was asked for so far."""
        request = urllib.request.Request(f"{self.url}/faults", json.dumps(faults).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=120) as response:
            found: dict[str, int] = json.load(response)["seen"]
            return found

    def left(self, fault: str) -> Any:
        """What is left of a fault."""
        with urllib.request.urlopen(f"{self.url}/faults", timeout=120) as response:
            return json.load(response).get(fault)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._log.close()
