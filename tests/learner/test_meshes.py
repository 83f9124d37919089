"""Every mesh gives what one device gives: loss, gradients, and parameters after three batches."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.learner.mesh_cases import DEVICES, STEPS, Case
from tests.support.quick_compiler import QUICK_FLAGS
from tunix_core.errors import ConfigError
from tunix_core.mesh_config import MeshConfig
from tunix_core.model_config import ModelConfig
from tunix_core.planning.search import factorisations

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES} {QUICK_FLAGS}",
}

SOME = [
    Case((2, 1, 2, 2), model="switches"),
    Case((1, 2, 2, 2), model="lora", schedule="gpipe"),
    Case((1, 2, 1, 4), updates=2, remat="layer", algorithm={"advantage": "gae"}),
]
"""Every axis beside every other, every family's switches, both schedules, K = 2, a value head."""


SHAPES = list(factorisations(DEVICES, 4))
"""Of 8 devices over (data, fsdp, stage, tensor)."""


def run(cases: Iterable[Case], path: Path, *, alone: bool = True) -> dict[str, np.ndarray]:
    """All of them in one process.

    Args:
        alone: and what they are compared with.
    """
    wanted = {case.name: case for given in cases for case in ((given, given.on_one_device) if alone else (given,))}
    texts = [json.dumps(dataclasses.asdict(case)) for case in wanted.values()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.learner.mesh_cases", str(path), *texts],
        env={**os.environ, **ENVIRONMENT},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    with np.load(path) as arrays:
        return dict(arrays)


def check(found: dict[str, np.ndarray], case: Case) -> None:
    own = {key.removeprefix(f"{case.name}/"): value for key, value in found.items() if key.startswith(f"{case.name}/")}
    alone = f"{case.on_one_device.name}/"
    expected = {key.removeprefix(alone): value for key, value in found.items() if key.startswith(alone)}
    assert own.keys() == expected.keys()
    for alone in (own, expected):
        assert alone.pop("compilations") == 0, "after warm-up nothing compiles"
        assert alone.pop("repeats"), "the same inputs give the same bits"
    for name, value in expected.items():
        kind = name.split("/")[0]
        scale = np.abs(value).max()
        if kind == "metrics":
            # The loss is a small difference of large terms.
            tolerance = 1e-4 * max(scale, 0.1)
        else:
            # Post-norms of tensor-parallel sums round most, 2e-5; Adam magnifies it where a gradient is next to nothing.
            tolerance = {"gradient": 1e-4, "params": 5e-4, "held_out": 1e-4}[kind] * scale
        if case.compute == "bfloat16":  # 8 bits of mantissa, summed in another order
            tolerance = 0.05 * max(scale, 0.1)
        np.testing.assert_allclose(own[name], value, atol=tolerance, rtol=0, err_msg=name)
    assert expected["metrics/0/gradient_norm"] > 0
    assert all(expected[f"metrics/{number}/nonfinite"] == 0 for number in range(STEPS))


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return run(SOME, tmp_path_factory.mktemp("meshes") / "some.npz")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_a_mesh_gives_what_one_device_gives(some: dict[str, np.ndarray], case: Case) -> None:
    check(some, case)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return run([Case(model=model) for model in ("dense", "lora")], tmp_path_factory.mktemp("meshes") / "alone.npz")


@pytest.mark.meshes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_every_mesh_gives_what_one_device_gives(
    tmp_path: Path, alone: dict[str, np.ndarray], shape: tuple[int, int, int, int]
) -> None:
    schedules = ("1f1b", "gpipe") if shape[2] > 1 else ("1f1b",)
    cases = [Case(shape, model=model, schedule=schedule) for model in ("dense", "lora") for schedule in schedules]
    found = {**alone, **run(cases, tmp_path / "meshes.npz", alone=False)}
    for case in cases:
        check(found, case)


OTHERS = [
    Case((1, 2, 2, 2), model="lora", objective="sft"),
    Case((2, 1, 1, 4), model="dense", objective="dpo"),
    Case((2, 2, 2, 1), model="dense", updates=2, algorithm={"loss": "gspo", "correction": "none"}),
    Case((1, 2, 1, 4), algorithm={"loss": "vtrace", "advantage": "gae", "correction": "none"}),
    Case((1, 2, 2, 2), compute="bfloat16", remat="matmuls"),
]


@pytest.mark.meshes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_other_objectives_and_types_on_a_mesh(tmp_path: Path, case: Case) -> None:
    check(run([case], tmp_path / "meshes.npz"), case)


def test_the_meshes_are_all_factorisations() -> None:
    assert len(set(SHAPES)) == 20


MODEL = ModelConfig(num_layers=6, num_heads=4, num_kv_heads=2, model_width=64, mlp_width=96, vocab_size=300)


@pytest.mark.parametrize(
    ("axis", "devices", "field"),
    [
        ("tensor", 8, r"model\.num_heads = 4"),
        ("tensor", 4, r"model\.num_kv_heads = 2"),
        ("stage", 4, r"model\.num_layers = 6, which it splits: 1, 2, 3, 6"),
        ("fsdp", 3, r"model\.model_width = 64"),
    ],
)
def test_a_mesh_that_divides_nothing_evenly_is_refused(axis: str, devices: int, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"mesh\.{axis}: received {devices}, accepted a divisor of {field}"):
        MeshConfig(**{axis: devices}).check(MODEL, 256)


def test_a_schedule_without_stages_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.schedule: received 'gpipe', accepted 1f1b .* without stages"):
        MeshConfig(schedule="gpipe")


def test_windows_that_a_tensor_axis_does_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.window_tokens = 255"):
        MeshConfig(tensor=2).check(MODEL, 255)
    with pytest.raises(ConfigError, match=r"learner\.shorter_windows = 33"):
        MeshConfig(tensor=2).check(MODEL, 33, "learner.shorter_windows")
