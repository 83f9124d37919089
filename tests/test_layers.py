"""Imports point downwards only: the layers of the project, read from the source of every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SCIENCE = {"numpy"}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}
STORAGE = {"pyarrow", "fsspec", "gcsfs", "google", "google_crc32c", "safetensors", "ml_dtypes", "aiohttp", "requests"}
MODEL_FILES = {"gguf", "tokenizers", "jinja2"}

BASE = {
    "types",
    "errors",
    "config",
    "actor_config",
    "retention_config",
    "algorithm_config",
    "model_config",
    "mesh_config",
    "engine_config",
    "config_loading",
    "environment_config",
    "validation",
    "paths",
    "meeting",
    "metrics",
    "tokenizer",
    "processes",
    "threads",
}
"""Modules directly in tunix_core: standard library and NumPy."""

# Package -> (third-party modules, packages of the project) that it may import. A package may always
# import itself and BASE. The layers follow CONTRIBUTING's table.
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "tunix_core": (SCIENCE, set()),
    "tunix_core.tools": (set(), set()),
    "tunix_core.sandbox": (set(), set()),
    "tunix_core.environments": (SCIENCE, {"tools", "sandbox"}),
    "tunix_core.rl": (SCIENCE | JAX, set()),
    "tunix_core.distributed": (SCIENCE | JAX, set()),
    "tunix_core.models": (SCIENCE | JAX, {"rl", "distributed"}),
    "tunix_core.storage": (SCIENCE | STORAGE, set()),
    "tunix_core.sinks": (SCIENCE, {"storage"}),
    "tunix_core.simulation": (SCIENCE, {"rl"}),
    "tunix_core.data": (SCIENCE | STORAGE, {"storage", "rl"}),
    "tunix_core.pretrained": (SCIENCE | STORAGE | MODEL_FILES, {"models", "storage"}),
    "tunix_core.learner": (
        SCIENCE | STORAGE | JAX,
        {"rl", "distributed", "models", "pretrained", "storage", "data", "environments", "tools", "sinks"},
    ),
    "tunix_core.planning": (SCIENCE | JAX, {"distributed", "models", "learner"}),
    "tunix_core.actor": (
        SCIENCE | STORAGE | JAX,
        {"rl", "distributed", "models", "pretrained", "storage", "data", "environments", "tools"},
    ),
    "tunix_core.evaluation": (
        SCIENCE | STORAGE | JAX,
        {"rl", "distributed", "models", "storage", "data", "environments"},
    ),
    "tunix_core.archive": (SCIENCE | STORAGE | {"duckdb"}, {"storage"}),
    "tunix_core.console": (
        SCIENCE | STORAGE | {"rich"},
        {"archive", "storage", "evaluation", "environments", "rl", "simulation"},
    ),
    "tasks": (
        SCIENCE | STORAGE | JAX,
        {
            "rl",
            "distributed",
            "models",
            "pretrained",
            "storage",
            "data",
            "environments",
            "learner",
            "planning",
            "actor",
            "evaluation",
            "console",
        },
    ),
    "plugins": ({"airflow", "fastapi", "starlette"}, {"storage"}),
    "dags": ({"airflow", "pendulum", "plugins"}, set()),
}

WITHOUT_JAX = {"tunix_core.rl.staleness", "tunix_core.rl.pacing", "tunix_core.rl.batching"}
"""Modules of a JAX layer that processes without JAX use."""

INSIDE_A_SANDBOX = "tunix_core.sandbox.inside"
"""Runs where nothing else of the project is."""

DATA_USES_OF_RL = {"tunix_core.rl"} | WITHOUT_JAX
"""All that `data`, `simulation` and `console` may take from `rl`."""


def modules() -> dict[str, Path]:
    """Dotted name -> file, of everything the project ships."""
    found = {}
    for top in ("tunix_core", "tasks", "plugins", "dags"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> list[tuple[str, int]]:
    """Every imported module with its line, wherever in the file the import stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            assert node.module is not None
            # `from package import module` imports the module too.
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def layer_of(module: str) -> str:
    parts = module.split(".")
    if parts[0] == "tunix_core":
        return f"tunix_core.{parts[1]}" if len(parts) > 1 and f"tunix_core.{parts[1]}" in LAYERS else "tunix_core"
    return parts[0]


def violations(module: str, path: Path) -> list[str]:
    layer = layer_of(module)
    third_party, packages = LAYERS[layer]
    if module in WITHOUT_JAX or layer == "tunix_core.data":
        third_party = third_party - JAX
    wrong = []
    for name, line in imports(path):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names:
            continue
        if top == layer.split(".")[0] == "tunix_core" or top == "tunix_core":
            target = name.split(".")[1] if "." in name else ""
            allowed = target in packages | BASE or layer == f"tunix_core.{target}"
            if layer in ("tunix_core.data", "tunix_core.simulation", "tunix_core.console") and target == "rl":
                allowed = any(name == m or name.startswith(f"{m}.") for m in DATA_USES_OF_RL - {"tunix_core.rl"})
            if module.startswith(INSIDE_A_SANDBOX):
                allowed = name.startswith(INSIDE_A_SANDBOX)
        elif top in ("tasks", "plugins", "dags"):
            allowed = top == layer or top in third_party
        else:
            allowed = top in third_party
        if not allowed:
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {module} ({layer}) must not import {name}")
    return wrong


def test_imports_point_downwards() -> None:
    wrong = [line for module, path in modules().items() for line in violations(module, path)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("tunix_core.storage.store", "import jax"),
        ("tunix_core.data.buffer", "from tunix_core.rl import losses"),
        ("tunix_core.learner.loop", "from tunix_core.actor.engine import Engine"),
        ("tunix_core.errors", "from tunix_core.storage import store"),
        ("tunix_core.sandbox.pool", "import numpy"),
        ("tunix_core.sandbox.inside.wire", "from tunix_core.errors import ConfigError"),
        ("tunix_core.console.live", "import airflow"),
        ("plugins.operators", "    import jax.numpy"),
        ("plugins.operators", "from tasks import supervise"),
        ("dags.post_training", "from tunix_core.storage.store import open_store"),
    ],
)
def test_the_check_sees_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, line: str) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(f"def f():\n    {line.strip()}\n")
    assert len(violations(module, path)) == 1


HEAVY = ["jax", "flax", "optax", "orbax", "gcsfs", "matplotlib", "pyarrow", "pandas", "torch", "rich.live"]


def test_nothing_heavy_is_imported_when_dags_are_parsed(tmp_path: Path) -> None:
    """What Airflow itself imports is not ours to judge, so the difference counts."""
    modules = ["dags.post_training", "dags.evaluate_trajectories", "plugins.plugin"]
    code = (
        "import sys, airflow.sdk, airflow.plugins_manager, airflow.triggers.base\n"
        "before = set(sys.modules)\n"
        f"import {', '.join(modules)}\n"
        "print('\\n'.join(sorted(set(sys.modules) - before)))\n"
    )
    environment = {
        "PATH": "/usr/bin:/bin",
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "TUNIX_STORE_ROOTS": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(modules) <= set(output)
    heavy = [name for name in output if name in HEAVY or name.split(".")[0] in HEAVY]
    assert not heavy
