"""The command, from its options to its text, JSON and exit code; nothing is compiled."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tasks.plan import EXIT_DOES_NOT_FIT, main
from tests.planning.test_budget import small
from tunix_core.console import cli
from tunix_core.errors import EXIT_CONFIG, CompilationFailed
from tunix_core.planning.chips import GIB, parse_topology
from tunix_core.planning.compiling import Compiled, read_answer
from tunix_core.planning.hlo import Array, Collective
from tunix_core.planning.plan import as_text, make_plan

LLAMA = ["--model", "llama3-70b", "--window", "8192", "--no-compile"]
COMPILED = Compiled(
    peak_bytes=3 * GIB,
    argument_bytes=GIB,
    temporary_bytes=2 * GIB,
    num_kernels=5,
    collectives=(Collective("all-gather", ("fsdp",), (Array("bf16", (256, 512)),), 1000, 4, "microbatch"),),
    wall_seconds=12,
    cpu_seconds=20,
    host_bytes=GIB,
)


def test_a_run_that_fits_says_so_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    mesh = ["--topology", "v5p:4x4x8", "--mesh", "fsdp=4,stage=4,tensor=8"]
    assert main([*LLAMA, *mesh, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert "128 chips, mesh fsdp=4,stage=4,tensor=8" in text
    assert "\nfits: " in text
    written = json.loads(file.read_text())
    assert written["fits"] is True
    assert written["peak_bytes"] == written["estimate"]["total"]
    # 70.6 billion parameters, embedding and head once per stage; float32, and twice that in moments.
    num_parameters = 70.55e9 + 3 * 2 * 128256 * 8192
    assert written["estimate"]["parameters"] * 128 == pytest.approx(num_parameters * 4, rel=0.01)
    assert written["estimate"]["optimizer"] * 128 == pytest.approx(num_parameters * 8, rel=0.01)
    assert written["work"]["bubble"] == 3 / (written["work"]["num_microbatches"] + 3)
    assert written["config"]["learner"]["window_tokens"] == 8192


def test_one_that_does_not_ends_with_3_and_says_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    code = main([*LLAMA, "--topology", "v5e:8x8", "--mesh", "fsdp=8,tensor=8"])
    text = capsys.readouterr().out
    assert code == EXIT_DOES_NOT_FIT
    assert "does NOT fit" in text
    assert "model.lora_rank=16" in text
    assert "then fits" in text


def test_search_lists_meshes_and_plans_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert main([*LLAMA, "--topology", "v5p:4x4x8", "--search", "--limit", "3", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    written = json.loads(file.read_text())
    assert [line.split()[0] for line in lines[1:4]] == [one["mesh"] for one in written["search"][:3]]
    assert written["mesh"] == written["search"][0]["mesh"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "v5e:8"], "--topology: received 'v5e:8', accepted 2 extents"),
        (["--topology", "v5e:8x8", "--mesh", "fsdp=8"], "--mesh: received 8, accepted axes whose product is the 64"),
        (
            ["--topology", "v5e:8x8", "--mesh", "tensor=64"],
            "mesh.tensor: received 64, accepted a divisor of model.num_kv",
        ),
        (["--topology", "v5e:8x8", "--set", "model.depth=2"], "model.depth: received 2, accepted .*num_layers"),
        (["--topology", "v5e:2x2", "--mesh", "fsdp=4", "--windows", "2"], "learner.max_windows: received 2"),
    ],
)
def test_a_wrong_option_is_refused_with_field_value_and_range(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*LLAMA, *options]) == EXIT_CONFIG
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: ")
    assert re.search(message, error), error


def test_tunixctl_hands_plan_on_and_keeps_jax_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(cli, "_task", lambda module, *rest: asked.append((module, *rest)) or 3)
    assert cli.main(["plan", "--model", "llama3-8b", "--help"]) == 3
    assert asked == [("plan", "--model", "llama3-8b", "--help")]


def test_the_compilers_figure_stands_beside_the_estimate() -> None:
    plan = make_plan(small(mesh__fsdp=2), parse_topology("v5e:1x2"), COMPILED)
    text = as_text(plan)
    assert plan.fits
    assert plan.peak_bytes == 3 * GIB
    assert "12 s (20 CPU-s), host memory 1.00 GiB, 5 kernels" in text
    num = plan.work.num_microbatches
    assert plan.to_dict()["compiled"]["collectives"] == [
        {"kind": "all-gather", "axes": ("fsdp",), "times": 4 * num, "sent_bytes": 4000 * num}
    ]


def test_a_gather_that_should_not_be_is_named() -> None:
    compiled = dataclasses.replace(COMPILED, misplaced=("all-gather over fsdp gives bf16[4, 256, 512]",))
    assert "gathers what it should not: all-gather over fsdp gives bf16[4, 256, 512]" in as_text(
        make_plan(small(mesh__fsdp=2), parse_topology("v5e:1x2"), compiled)
    )


def answered(refusal: str) -> Compiled:
    return read_answer(json.dumps({"refusal": refusal, "wall_seconds": 6.0, "cpu_seconds": 9.0, "host_bytes": GIB}))


@pytest.mark.parametrize(
    "refusal",
    [
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
        "Used 23.00G of 15.75G hbm. Exceeded hbm capacity by 7.25G.",
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (23.00G) exceeds "
        "available HBM (15.75G).",
    ],
)
def test_a_refusal_for_memory_gives_its_figures(refusal: str) -> None:
    compiled = answered(refusal)
    assert (compiled.peak_bytes, compiled.limit_bytes) == (23 * GIB, int(15.75 * GIB))
    plan = make_plan(small(mesh__fsdp=2), parse_topology("v5e:1x2"), compiled)
    assert not plan.fits
    assert "does NOT fit: 23.00 GiB of 15.75 GiB" in as_text(plan)


def test_another_refusal_is_an_error() -> None:
    with pytest.raises(CompilationFailed, match="Mosaic failed"):
        answered("INTERNAL: Mosaic failed to compile TPU kernel")
