"""google-tunix's GRPO update on the same work: `python -m tests.benchmarks.peers.tunix_grpo FOLDER`.

Through its public classes: `RLCluster` around its own `Llama3` of the same sizes (untied head, so the
same number of parameters), `GRPOLearner`, the reference's log probabilities by
`get_ref_per_token_logps`, the update by `update_actor` with gradient accumulation over the batch. Our
trajectories stand where its rollout would deliver: prompts padded on the left, completions on the
right, both to the longest of the batch (its own rollout pads to the configured maximum, which is
longer). The weights are ours; its Llama3 turns positions with theta 1,000,000 whatever its
configuration says, and GRPO has no correction, so losses are not compared.

Its sequence packing (`max_seq_token_per_tpu`) is no choice on a CPU: with it `process_ids` drops the
attention mask and leaves causality to the TPU's splash kernel; Llama3 then masks nothing at all, and
Qwen2 without that kernel masks other segments but not the future (0.1.7).
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.models.llama3.model import Llama3
from tunix.rl.common import TrainExample
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from tests.benchmarks.peers.padding import even_rows, prompts_and_completions
from tests.benchmarks.peers.tunix_model import EOS, PAD, IdsAsText, make_model
from tests.benchmarks.peers.turns import serve

MAX_MICROBATCH_TOKENS = 4096
"""Padded, in one micro-batch."""


def make_cluster(settings: dict[str, Any], arrays: dict[str, np.ndarray], rows: int) -> RLCluster:
    optimizer = settings["optimizer"]
    mesh = Mesh(np.array(jax.devices()).reshape(1, 1), ("fsdp", "tp"))

    def model(owner: str) -> Llama3:
        tensors = {k.removeprefix(owner): v for k, v in arrays.items() if k.startswith(owner)}
        with mesh:
            return make_model(settings["model"], tensors)

    return RLCluster(
        actor=model("policy."),
        reference=model("reference."),
        tokenizer=IdsAsText(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            training_config=RLTrainingConfig(
                actor_optimizer=optax.chain(
                    optax.clip_by_global_norm(optimizer["gradient_clip_norm"]),
                    optax.adamw(
                        optimizer["learning_rate"],
                        b1=optimizer["beta1"],
                        b2=optimizer["beta2"],
                        weight_decay=optimizer["weight_decay"],
                    ),
                ),
                eval_every_n_steps=10**9,
                mini_batch_size=settings["num_trajectories"],
                train_micro_batch_size=rows,
            ),
            rollout_config=RolloutConfig(temperature=1.0, kv_cache_size=64),
        ),
    )


def main(folder: Path) -> None:
    settings = json.loads((folder / "work.json").read_text())
    arrays = dict(np.load(folder / "work.npz"))
    algorithm, num = settings["algorithm"], settings["num_trajectories"]
    host = prompts_and_completions(arrays, PAD)
    length = host["prompt_ids"].shape[1] + host["completion_ids"].shape[1]
    rows = even_rows(num, length, MAX_MICROBATCH_TOKENS)
    cluster = make_cluster(settings, arrays, rows)
    config = GRPOConfig(
        num_generations=algorithm["group_size"],
        beta=algorithm["kl_coefficient"],
        kl_loss_mode="low_var_kl",
        epsilon=algorithm["clip_low"],
        loss_agg_mode="token-mean",
    )
    GRPOLearner(cluster, config, reward_fns=lambda prompts, **_: [0.0] * len(prompts))
    trainer = cluster.actor_trainer

    def update() -> dict[str, Any]:
        host = prompts_and_completions(arrays, PAD)
        device = {name: jax.device_put(value) for name, value in host.items()}
        reference = cluster.get_ref_per_token_logps(
            prompt_tokens=device["prompt_ids"],
            completion_tokens=device["completion_ids"],
            pad_id=PAD,
            eos_id=EOS,
            micro_batch_size=rows,
        )
        device["ref_per_token_logps"] = reference
        examples = [
            TrainExample(**{name: value[i : i + rows] for name, value in device.items()}) for i in range(0, num, rows)
        ]
        cluster.update_actor(examples, None)
        jax.block_until_ready(nnx.state(trainer.model))
        return {}

    before = np.array(trainer.model.lm_head.w.get_value())
    update()
    if np.array_equal(before, trainer.model.lm_head.w.get_value()):
        raise RuntimeError("google-tunix: the update changed nothing")

    versions = {name: importlib.metadata.version(name) for name in ("google-tunix", "jax", "flax")}
    layout = f"{num // rows} padded micro-batches of {rows} x {length}"
    serve(update, {"versions": versions, "layout": layout, "padded_tokens": num * length})


if __name__ == "__main__":
    main(Path(sys.argv[1]))  # XLA takes its threads from the CPUs this process may use
