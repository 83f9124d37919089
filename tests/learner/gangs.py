"""The learner as several real processes over loopback, each with some CPU devices: started, killed, run to its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.learner.processes import ROOT, tiny_config
from tests.learner.support import VOCAB, write_shards
from tests.support.quick_compiler import QUICK_FLAGS
from tunix_core import paths
from tunix_core.config import RunConfig
from tunix_core.config_loading import config_from_dict, config_to_dict
from tunix_core.models.decoder import flatten_parameters, init_parameters
from tunix_core.processes import free_port
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.run_directory import create_run
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.store import open_store

PEER_TIMEOUT_SECONDS = 10
_LIMIT_SECONDS = 240


def gang_config(num_steps: int, mesh: dict[str, int], **overrides: Any) -> RunConfig:
    """Four groups a batch, so that up to four feeds have whole ones."""
    values = config_to_dict(tiny_config(num_steps))
    for name, value in {
        "learner.groups_per_batch": 4,
        "learner.max_windows": 8,
        "model.num_layers": 2,
        "model.num_kv_heads": 2,
        **{f"mesh.{axis}": size for axis, size in mesh.items()},
        **overrides,
    }.items():
        section, field = name.split(".")
        values[section][field] = value
    return config_from_dict(values)


def create(folder: Path, config: RunConfig, num_groups: int) -> None:
    """A run with its policy 0 and so many groups, two to a shard."""
    store = open_store(str(folder))
    create_run(store, config, run_id="gang")
    tensors = flatten_parameters(init_parameters(config.model, 0))
    SnapshotStore(store).write(0, tensors, incarnation="w0")
    PolicyStore(store).publish(0, tensors, config=config_to_dict(config), parent=None, publisher="warm_start", gate={})
    write_shards(store, num_groups)
    assert config.model.vocab_size == VOCAB


class Gang:
    """One attempt of all hosts."""

    def __init__(
        self,
        folder: Path,
        cache: Path,
        num_hosts: int,
        devices_per_host: int,
        step_seconds: float = 0.0,
        module: str = "watched_learner",
    ) -> None:
        self.folder = folder
        port = free_port()
        self.processes: list[subprocess.Popen[str]] = []
        self.logs: list[Path] = []
        for host in range(num_hosts):
            environment = {
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices_per_host} {QUICK_FLAGS}",
                "TUNIX_COMPILATION_CACHE": str(cache),  # JAX's serves host 0 alone
                "WATCHED_STEP_SECONDS": str(step_seconds),
            }
            if num_hosts > 1:
                environment |= {
                    "TUNIX_COORDINATOR": f"127.0.0.1:{port}",
                    "TUNIX_NUM_HOSTS": str(num_hosts),
                    "TUNIX_HOST_INDEX": str(host),
                    "TUNIX_PEER_TIMEOUT_SECONDS": str(PEER_TIMEOUT_SECONDS),
                }
            log = folder.parent / f"{folder.name}-{port}-{host}.log"
            command = [sys.executable, "-m", f"tests.learner.{module}", "--run", str(folder)]
            with log.open("w") as output:
                self.processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
                )
            self.logs.append(log)

    def output(self) -> str:
        return "\n".join(f"--- host {host}\n{log.read_text()}" for host, log in enumerate(self.logs))

    def wait(self, seconds: float = _LIMIT_SECONDS) -> list[int]:
        """Exit codes, in host order."""
        deadline = time.monotonic() + seconds
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        finally:
            self.end()

    def run_to_end(self) -> str:
        codes = self.wait()
        assert codes == [0] * len(codes), self.output()
        return self.output()

    def until_step(self, clock: int) -> None:
        """Returns as soon as the record of that step is there."""
        self.until(self.folder / paths.step(clock))

    def until(self, path: Path) -> None:
        """Returns as soon as that file of the run is there."""
        deadline = time.monotonic() + _LIMIT_SECONDS
        while not path.exists():
            assert all(process.poll() is None for process in self.processes), self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.002)

    def kill(self, host: int) -> tuple[list[int], float]:
        """With SIGKILL; returns all exit codes, and the seconds until the last survivor had left."""
        killed = time.monotonic()
        self.processes[host].kill()
        return self.wait(), time.monotonic() - killed

    def lines(self, host: int, word: str) -> set[str]:
        """What followed that word in lines of `watched_learner`."""
        found = re.findall(rf"^{word} (.+)$", self.logs[host].read_text(), re.MULTILINE)
        return set(found)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def weights(folder: Path, version: int) -> dict[str, np.ndarray]:
    return SnapshotStore(open_store(str(folder))).load(version)


def difference(received: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Largest, relative to the largest entry of its tensor."""
    assert received.keys() == expected.keys()
    return max(float(np.abs(received[n] - expected[n]).max() / np.abs(expected[n]).max()) for n in expected)
