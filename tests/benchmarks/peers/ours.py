"""Our learner's compiled step, packing and transfer included: `python -m tests.benchmarks.peers.ours FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.peers.turns import serve
from tests.benchmarks.workload import Trajectories, run_config
from tunix_core.config_loading import config_from_dict
from tunix_core.distributed.compilation import enable_compilation_cache
from tunix_core.distributed.mesh import make_mesh
from tunix_core.learner.train_step import make_train_step
from tunix_core.models.decoder import unflatten_parameters


def main(folder: Path) -> None:
    enable_compilation_cache()
    settings = json.loads((folder / "work.json").read_text())
    arrays = dict(np.load(folder / "work.npz"))
    model = config_from_dict({"recipe": "benchmark", "model": settings["model"]}).model
    config = run_config(model, settings["num_trajectories"])
    trajectories = Trajectories(**{k.removeprefix("trajectory."): v for k, v in arrays.items() if "trajectory." in k})
    tensors = {
        owner: {k.removeprefix(owner): v for k, v in arrays.items() if k.startswith(owner)}
        for owner in ("policy.", "reference.")
    }
    step = make_train_step(config, make_mesh(config.mesh))
    num_windows = trajectories.fit().num_windows
    step.compile(num_windows)
    reference = step.put_reference(unflatten_parameters(model, tensors["reference."]))
    states = [step.init_state(unflatten_parameters(model, tensors["policy."]))]

    def update() -> dict[str, Any]:
        arrays = trajectories.pack(trajectories.fit())
        state, metrics = step(states.pop(), reference, step.put(arrays), float(arrays.loss_mask.sum()))
        states.append(state)
        return {"loss": float(metrics["loss"])}

    padded = num_windows * config.learner.window_tokens
    serve(
        update, {"layout": f"packed, {num_windows} windows of {config.learner.window_tokens}", "padded_tokens": padded}
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
