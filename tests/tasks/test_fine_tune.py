"""Fine-tuning by its entry point: real files in, a run directory out that evaluation, export and RL can use."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import tasks.export_model
import tasks.fine_tune
import tasks.prepare
import tasks.warm_start
from tests.pretrained.support import gguf_file
from tests.support.quick_compiler import QUICK_FLAGS
from tests.support.run_factory import TINY
from tests.support.trajectories import make_trajectory
from tunix_core.distributed.compilation import CACHE_VARIABLE
from tunix_core.errors import EXIT_CONFIG, EXIT_DATA, EXIT_INTERRUPTED
from tunix_core.learner.weights import load_reference
from tunix_core.pretrained.importing import import_model
from tunix_core.storage import tensor_files
from tunix_core.storage.control import read_heartbeat
from tunix_core.storage.metrics_files import MetricReader
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.run_directory import read_run
from tunix_core.storage.store import ObjectStore, open_store
from tunix_core.storage.trajectory_writer import TrajectoryWriter

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    **TINY,
    "optimizer.learning_rate": 1e-2,
    "optimizer.warmup_steps": 2,
    "fine_tune.examples_per_step": 4,
    "fine_tune.evaluate_every_steps": 100,
}
WORDS = ("red", "blue", "green", "white", "black", "grey")


@pytest.fixture(scope="module", autouse=True)
def _own_compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of equal shapes share executables; the setting ends with the module."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("executables")))
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def settings(**options: Any) -> list[str]:
    """`section__field=value`, over the tiny ones."""
    named = {name.replace("__", "."): value for name, value in options.items()}
    return [part for k, v in {**OPTIONS, **named}.items() for part in ("--set", f"{k}={json.dumps(v)}")]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def chats(path: Path, extra: int = 0) -> str:
    """Six short ones, and so many that are longer than a window."""
    texts = [(f"Say {word}.", word) for word in WORDS] + [("x" * 200, "long")] * extra
    roles = ("user", "assistant")
    return write_lines(
        path,
        [{"messages": [{"role": r, "content": t} for r, t in zip(roles, pair, strict=True)]} for pair in texts],
    )


def pairs(path: Path) -> str:
    return write_lines(path, [{"prompt": f"Say {word}.", "chosen": word, "rejected": "no"} for word in WORDS])


def tensors(store: ObjectStore) -> dict[str, np.ndarray]:
    return PolicyStore(store).load(0)[0]


def metrics(store: ObjectStore) -> dict[str, np.ndarray]:
    return MetricReader(store, "fine_tune").poll()


def test_conversations_become_policy_version_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = str(tmp_path / "run")
    command = ["sft", "--data", chats(tmp_path / "chats.jsonl", extra=2), "--to", uri]
    options = settings(fine_tune__num_epochs=3, fine_tune__held_out_fraction=0.2, seed=3)
    assert tasks.fine_tune.main([*command, *options]) == 0
    assert "4 to train on, 2 held out, 2 over learner.window_tokens = 96 and left out" in capsys.readouterr().out
    store = open_store(uri)
    config, extra = read_run(store)
    assert (config.seed, config.fine_tune.num_epochs) == (3, 3)
    assert extra["fine_tune"]["data"][0]["num_examples"] == 8
    manifest = PolicyStore(store).manifest(0)
    assert (manifest["gate"]["num_overlong"], manifest["gate"]["num_steps"], manifest["base"]) == (2, 3, None)
    rows = metrics(store)
    assert rows["step"].tolist() == [1, 2, 3]
    assert rows["epoch"].tolist() == [0, 1, 2]
    assert rows["loss"][0] == pytest.approx(np.log(272), rel=0.05), "fresh parameters guess"
    assert rows["loss"][-1] < rows["loss"][0] - 0.2
    assert manifest["gate"]["held_out_loss"] == rows["held_out_loss"][-1] < 5.5
    heartbeat = read_heartbeat(store, "fine_tune")
    assert heartbeat is not None
    assert heartbeat.progress["num_steps"] == heartbeat.progress["total_steps"] == 3

    # The same again changes nothing; other data and other options need another directory.
    assert tasks.fine_tune.main([*command, *options]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert tasks.fine_tune.main([*command, *settings(seed=4)]) == EXIT_CONFIG
    chats(tmp_path / "chats.jsonl", extra=3)
    assert tasks.fine_tune.main([*command, *options]) == EXIT_CONFIG
    assert "Choose another run URI" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["sft", "--data", "none.jsonl"], EXIT_CONFIG, "--data: received 'none.jsonl'"),
        (["dpo", "--data", "chats.jsonl"], EXIT_DATA, "chats.jsonl:1: keys: received ['messages'], accepted"),
        (["sft", "--data", "pairs.jsonl"], EXIT_DATA, "pairs.jsonl:1: keys: received ['chosen', 'prompt', 'rejected']"),
        (["dpo", "--data", "shard.parquet"], EXIT_CONFIG, "Trajectories are no pairs of answers"),
        (
            ["sft", "--data", "chats.jsonl", "--min-reward", "1"],
            EXIT_CONFIG,
            "--min-reward: received 1.0, accepted none",
        ),
        (["sft", "--data", "chats.jsonl", "--set", "fine_tune.num_epochs=0"], EXIT_CONFIG, "fine_tune.num_epochs"),
        (["sft", "--data", "chats.jsonl", "--set", "learner.window_tokens=16"], EXIT_CONFIG, "actor.context_tokens"),
    ],
)
def test_mistakes_write_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    chats(tmp_path / "chats.jsonl")
    pairs(tmp_path / "pairs.jsonl")
    assert tasks.fine_tune.main([*arguments, "--to", "run"]) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_successes_of_a_run_are_distilled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = str(tmp_path / "teacher")
    assert tasks.prepare.main(["--run", teacher, *settings()]) == 0
    writer = TrajectoryWriter(open_store(teacher), actor_id="actor_0_0", incarnation="inc0")
    key = writer.write([make_trajectory(i, reward=i % 3 / 2) for i in range(9)])
    writer.close()
    options = settings(fine_tune__num_epochs=2, fine_tune__held_out_fraction=0)
    assert tasks.fine_tune.main(["sft", "--data", teacher, "--to", str(tmp_path / "a"), *options]) == 0
    assert "3 examples, 6 low_reward" in capsys.readouterr().out
    shard = str(next((tmp_path / "teacher" / "trajectories").rglob("*00000000.parquet")))
    assert shard.endswith(str(key).rsplit("/", 1)[-1])
    command = ["sft", "--data", shard, "--min-reward", "0.5", "--to", str(tmp_path / "b"), *options]
    assert tasks.fine_tune.main(command) == 0
    assert "6 examples, 3 low_reward" in capsys.readouterr().out
    rows = metrics(open_store(str(tmp_path / "b")))
    assert rows["policy_tokens"].sum() == 2 * sum(
        make_trajectory(i).loss_mask[1:].sum() for i in range(9) if i % 3 / 2 >= 0.5
    )
    assert "held_out_loss" not in rows

    other = gguf_model(tmp_path)
    command = ["sft", "--data", teacher, "--recipe", other, "--to", str(tmp_path / "c")]
    assert tasks.fine_tune.main(command) == EXIT_CONFIG
    assert "a run with this recipe's tokenizer" in capsys.readouterr().err


# ---- pretrained models and adapters -----------------------------------------------------------------


def gguf_model(folder: Path) -> str:
    """A recipe that starts from a small pretrained chat model."""
    from tunix_core.pretrained.model_folder import model_section

    path, _ = gguf_file(folder / "small.gguf")
    model = import_model(path, open_store(str(folder / "model")))
    recipe = folder / "pretrained.toml"
    recipe.write_text(
        f'{model_section(model.model_config())}pretrained_uri = "{folder / "model"}"\n'
        "[learner]\nwindow_tokens = 128\nwindows_per_microbatch = 1\n[fine_tune]\nexamples_per_step = 3\nheld_out_fraction = 0\n"
        "[optimizer]\nlearning_rate = 0.02\nwarmup_steps = 0\n"
    )
    return str(recipe)


def lora(**more: Any) -> list[str]:
    options = {"model.lora_rank": 4, "fine_tune.num_epochs": 2, **more}
    return [part for name, value in options.items() for part in ("--set", f"{name}={json.dumps(value)}")]


def test_adapters_on_a_pretrained_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = gguf_model(tmp_path)
    data, sft, dpo = chats(tmp_path / "chats.jsonl"), str(tmp_path / "sft"), str(tmp_path / "dpo")
    assert tasks.fine_tune.main(["sft", "--data", data, "--recipe", recipe, *lora(), "--to", sft]) == 0
    store = open_store(sft)
    assert {name.rsplit(".", 1)[1] for name in tensors(store)} == {"lora_a", "lora_b"}
    losses = metrics(store)["loss"]
    assert losses[-1] < losses[0]
    assert any(np.abs(t).max() > 0 for name, t in tensors(store).items() if name.endswith("lora_b"))

    assert tasks.export_model.main(["--run", sft, "--to", str(tmp_path / "hf")]) == 0
    merged = import_model(tmp_path / "hf", open_store(str(tmp_path / "merged"))).tensors()
    base = import_model(tmp_path / "small.gguf", open_store(str(tmp_path / "model"))).tensors()
    changed = {name for name, tensor in merged.items() if not np.array_equal(tensor, base[name])}
    assert changed == {name for name in base if name.startswith("blocks.") and "norm" not in name}

    # Of the base with its adapters off, DPO starts at log 2; from trained adapters it is refused.
    command = ["dpo", "--data", pairs(tmp_path / "pairs.jsonl"), "--recipe", recipe, "--to"]
    assert tasks.fine_tune.main([*command, dpo, *lora()]) == 0
    rows = metrics(open_store(dpo))
    assert rows["loss"][0] == pytest.approx(np.log(2), rel=1e-5)
    assert rows["loss"][-1] < rows["loss"][0]
    assert rows["pair_margin"][-1] > 0
    start = {"start_uri": f"{sft}/policies/00000000"}
    assert tasks.fine_tune.main([*command, str(tmp_path / "refused"), *lora(**start)]) == EXIT_CONFIG
    assert "none for dpo with model.lora_rank" in capsys.readouterr().err

    # Supervised training goes on from adapters, if they are the same ones.
    command = ["sft", "--data", data, "--recipe", recipe, "--to"]
    assert tasks.fine_tune.main([*command, str(tmp_path / "on"), *lora(**start)]) == 0
    assert metrics(open_store(str(tmp_path / "on")))["loss"][0] < losses[0]
    assert (
        tasks.fine_tune.main([*command, str(tmp_path / "r"), *lora(**start, **{"model.lora_alpha": 4})]) == EXIT_CONFIG
    )
    assert "lora_alpha: 16.0" in capsys.readouterr().err
    assert (
        tasks.fine_tune.main([*command, str(tmp_path / "f"), "--set", f"start_uri={start['start_uri']}"]) == EXIT_CONFIG
    )
    assert "another base" in capsys.readouterr().err


# ---- what comes after -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A supervised run with whole weights."""
    folder = tmp_path_factory.mktemp("fine_tuned")
    command = ["sft", "--data", chats(folder / "chats.jsonl"), "--to", str(folder / "run"), *settings()]
    assert tasks.fine_tune.main(command) == 0
    return str(folder / "run")


def test_preferences_start_from_it(tmp_path: Path, fine_tuned: str) -> None:
    start = f"{fine_tuned}/policies/00000000"
    command = ["dpo", "--data", pairs(tmp_path / "pairs.jsonl"), "--to", str(tmp_path / "dpo")]
    options = settings(fine_tune__num_steps=6, fine_tune__num_epochs=9, start_uri=start)
    assert tasks.fine_tune.main([*command, *options]) == 0
    store = open_store(str(tmp_path / "dpo"))
    rows = metrics(store)
    assert len(rows["loss"]) == 6
    assert rows["loss"][0] == pytest.approx(np.log(2), rel=1e-5)
    assert rows["loss"][-1] < 0.6
    assert rows["pair_accuracy"][-1] == 1
    assert rows["pair_margin"][-1] > rows["pair_margin"][1] > 0
    gap = rows["pair_chosen_logprob"] - rows["pair_rejected_logprob"]
    assert gap[-1] > gap[0]
    assert PolicyStore(store).manifest(0)["gate"]["held_out_pair_accuracy"] == 1
    assert tasks.export_model.main(["--run", str(tmp_path / "dpo"), "--to", str(tmp_path / "hf")]) == 0


def test_reinforcement_learning_starts_from_it(
    tmp_path: Path, fine_tuned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    uri, start = str(tmp_path / "rl"), f"{fine_tuned}/policies/00000000"
    assert tasks.prepare.main(["--run", uri, *settings(start_uri=start)]) == 0
    assert tasks.warm_start.main(["--run", uri]) == 0
    store, origin = open_store(uri), open_store(fine_tuned)
    expected = tensors(origin)
    assert expected.keys() == tensors(store).keys()
    assert all(np.array_equal(tensor, expected[name]) for name, tensor in tensors(store).items())
    gate = PolicyStore(store).manifest(0)["gate"]
    assert gate["start_uri"] == start
    assert gate["start_sha256"] == tensor_files.digest(PolicyStore(origin).manifest(0))
    assert 0 <= gate["held_out_success"] <= 1

    # It is the KL reference of this run, and can be that of another.
    other = open_store(str(tmp_path / "other"))
    assert tasks.prepare.main(["--run", str(tmp_path / "other"), *settings(reference_uri=start)]) == 0
    for run in (store, other):
        reference = load_reference(run, *read_run(run))
        assert all(np.array_equal(reference[name], tensor) for name, tensor in expected.items())

    for options, said in (
        ({"start_uri": f"{fine_tuned}/policies/0"}, "start_uri: received .*accepted <run URI>/policies/<eight digits>"),
        ({"start_uri": f"{uri}x/policies/00000000"}, "start_uri: received .*accepted a published policy version"),
        ({"start_uri": start, "model__mlp_width": 32}, "model: received 'mlp_width: 32, not 16'"),
    ):
        wrong = str(tmp_path / f"wrong{len(said)}")
        assert tasks.prepare.main(["--run", wrong, *settings(**options)]) == 0
        assert tasks.warm_start.main(["--run", wrong]) == EXIT_CONFIG
        assert re.search(said, capsys.readouterr().err)


# ---- processes --------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK_FLAGS,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        **more,
    }


def test_two_data_shards_train_as_one_does(tmp_path: Path) -> None:
    options = settings(fine_tune__num_steps=3, fine_tune__num_epochs=3, optimizer__learning_rate=1e-3)
    command = ["dpo", "--data", pairs(tmp_path / "data.jsonl"), *options, "--to"]
    assert tasks.fine_tune.main([*command, str(tmp_path / "one")]) == 0
    subprocess.run(
        [sys.executable, "-m", "tasks.fine_tune", *command, str(tmp_path / "two"), "--set", "mesh.data=2"],
        env=environment(XLA_FLAGS=f"--xla_force_host_platform_device_count=2 {QUICK_FLAGS}"),
        check=True,
        timeout=200,
    )
    stores = [open_store(str(tmp_path / name)) for name in ("one", "two")]
    one, two = map(metrics, stores)
    for name in ("loss", "gradient_norm", "held_out_loss"):
        np.testing.assert_allclose(one[name], two[name], rtol=2e-4, err_msg=name)
    gates = [PolicyStore(store).manifest(0)["gate"] for store in stores]
    assert gates[0]["held_out_loss"] == pytest.approx(gates[1]["held_out_loss"], rel=1e-4)


def test_a_signal_stops_it_before_anything_is_published(tmp_path: Path) -> None:
    uri = str(tmp_path / "run")
    command = ["sft", "--data", chats(tmp_path / "chats.jsonl"), *settings(fine_tune__num_epochs=2000), "--to", uri]
    process = subprocess.Popen([sys.executable, "-m", "tasks.fine_tune", *command], env=environment())
    try:
        deadline = time.monotonic() + 200
        while read_heartbeat(open_store(uri), "fine_tune") is None:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=200) == EXIT_INTERRUPTED
    finally:
        process.kill()
        process.wait()
    assert PolicyStore(open_store(uri)).current() is None


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    (block,) = [b for b in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "tasks.fine_tune" in b]
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    chat, preferred = (metrics(open_store(str(tmp_path / name))) for name in ("runs/chat", "runs/preferred"))
    assert chat["loss"][-1] < 0.5 * chat["loss"][0]
    assert preferred["loss"][0] == pytest.approx(np.log(2), rel=1e-5)
    assert preferred["pair_margin"][-1] > 0.5
    assert (tmp_path / "exported" / "model.safetensors").is_file()
