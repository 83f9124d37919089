"""The same batches on meshes of 8 devices and on one.

`python -m tests.learner.mesh_cases FILE CASE …` runs in a process of its own, under
XLA_FLAGS=--xla_force_host_platform_device_count=8, and writes what each case gave to FILE, an `.npz`. A case is the JSON of
`Case`'s fields.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from tests.learner.step_cases import WINDOW_TOKENS, denominators, make_config, make_sequences
from tunix_core.config import MeshConfig, ModelConfig, OptimizerConfig, PreferencesConfig, RunConfig
from tunix_core.data.packing import PackedArrays
from tunix_core.distributed.compilation import CompilationCounter
from tunix_core.distributed.mesh import make_mesh
from tunix_core.environments.demonstrations import Demonstration
from tunix_core.learner.examples import pack_examples
from tunix_core.learner.held_out_loss import HeldOutLoss
from tunix_core.learner.objectives import preference_objective, supervised_objective
from tunix_core.learner.train_step import TrainStep, make_optimizer, make_train_step
from tunix_core.models import decoder
from tunix_core.models.decoder import flatten_parameters
from tunix_core.models.parameters import abstract_parameters, trained_parameters

DEVICES = 8
STEPS = 3

DENSE = ModelConfig(
    vocab_size=304,
    model_width=16,
    num_layers=8,
    num_heads=8,
    num_kv_heads=8,
    head_width=4,
    mlp_width=24,
    logprob_chunk_tokens=7,
)
MODELS = {
    "dense": DENSE,
    "lora": dataclasses.replace(
        DENSE, lora_rank=3, lora_targets=("query", "value", "output", "gate", "down"), pretrained_uri="memory://base"
    ),
    # Every switch that a mesh could trip over.
    "switches": dataclasses.replace(
        DENSE,
        num_kv_heads=4,
        sliding_window=5,
        sliding_period=2,
        attention_softcap=50.0,
        logit_softcap=30.0,
        post_norms=True,
        unit_offset_norms=True,
        query_key_norm=True,
        attention_bias=True,
        tied_embeddings=True,
        scaled_embeddings=True,
        activation="gelu_tanh",
        num_experts=4,
        experts_per_token=2,
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of `STEPS` batches."""

    shape: tuple[int, int, int, int] = (1, 1, 1, 1)
    model: str = "dense"
    schedule: str = "1f1b"
    updates: int = 1
    remat: str = "none"
    compute: str = "float32"
    objective: Literal["policy", "sft", "dpo"] = "policy"
    """The others with their held-out loss."""
    algorithm: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.algorithm.items())
        shape = "x".join(map(str, self.shape))
        return f"{self.objective}-{self.model}-{shape}-{self.schedule}-{self.updates}-{self.remat}-{self.compute}-{options}"

    @property
    def on_one_device(self) -> Case:
        return dataclasses.replace(self, shape=(1, 1, 1, 1), schedule="1f1b", remat="none")

    def config(self) -> RunConfig:
        data, fsdp, stage, tensor = self.shape
        return dataclasses.replace(
            make_config(
                # The windows of an update are the same on all meshes only where a micro-batch has as many.
                windows_per_microbatch=1 if self.updates == 1 else DEVICES // (data * fsdp),
                updates_per_batch=self.updates,
                optimizer=OptimizerConfig(learning_rate=1e-2, gradient_clip_norm=0.2, weight_decay=0.1),
                **self.algorithm,
            ),
            model=dataclasses.replace(MODELS[self.model], remat=self.remat, compute_dtype=self.compute),
            mesh=MeshConfig(data=data, fsdp=fsdp, stage=stage, tensor=tensor, schedule=self.schedule),
        )


def parameters(model: ModelConfig, seed: int, *, trained: bool) -> Any:
    shapes = trained_parameters(model) if trained else abstract_parameters(model.base())
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(np.float32), shapes)


def batches(config: RunConfig) -> list[PackedArrays]:
    """Of 11 and fewer windows: on 8 data shards some devices have one and some none."""
    found = []
    for step in range(STEPS):
        sequences = make_sequences((24, 5, 30)[step])
        rewards = None
        if config.algorithm.has_value_head:
            rewards = np.where(sequences.loss_mask, np.random.default_rng(step).normal(size=sequences.tokens.shape), 0)
            rewards = rewards.astype(np.float32)
        found.append(sequences.pack(rewards=rewards))
    return found


def pairs(seed: int) -> PackedArrays:
    """12 pairs of answers of 4 to 8 tokens, a pair in one window; the first token of each is its prompt."""
    rng = np.random.default_rng(seed)

    def answer() -> Demonstration:
        size = int(rng.integers(4, 9))
        return Demonstration(rng.integers(0, 19, size).astype(np.int32), np.arange(size) > 0)

    return pack_examples([(answer(), answer()) for _ in range(12)], 12, WINDOW_TOKENS)


def make_step(case: Case, config: RunConfig, mesh: Mesh) -> TrainStep:
    if case.objective == "policy":
        return make_train_step(config, mesh)
    model = config.model
    objectives = {"sft": supervised_objective(model), "dpo": preference_objective(model, PreferencesConfig())}
    return TrainStep(config, mesh, objective=objectives[case.objective], optimizer=make_optimizer(config.optimizer))


def same_bits(first: Any, second: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))


def run(case: Case) -> dict[str, np.ndarray]:
    config = case.config()
    step = make_step(case, config, make_mesh(config.mesh, jax.devices()[: config.mesh.num_devices]))
    step.compile(32)
    reference = step.put_reference(parameters(config.model, 2, trained=False))
    work = batches(config) if case.objective != "dpo" else [pairs(seed) for seed in range(STEPS)]

    def update(state: Any, number: int) -> tuple[Any, Any]:
        batch = work[number]
        return step(state, reference, step.put(batch), denominators(step, batch))

    def start() -> Any:
        return step.init_state(parameters(config.model, 1, trained=True))

    twice = [jax.tree.map(np.array, update(start(), 0)) for _ in range(2)]
    found: dict[str, np.ndarray] = {"repeats": np.asarray(same_bits(*twice))}
    state = start()
    counter = CompilationCounter()
    counter.warmed_up()
    for number in range(STEPS):
        state, metrics = update(state, number)
        found |= {f"metrics/{number}/{name}": np.asarray(value) for name, value in metrics.items()}
        if number == 0:
            moments = jax.tree.leaves(state.opt_state[1][0].mu)
            found |= {f"gradient/{i}": np.array(leaf) for i, leaf in enumerate(moments)}
        if case.objective != "policy" and number == 0:
            counter = CompilationCounter()  # of the held-out pass that compiles at its first call
            sums = HeldOutLoss(step, work[1], float(work[1].loss_mask.sum()))(state, reference)
            counter.warmed_up()
            found |= {f"held_out/{name}": np.asarray(value) for name, value in sums.items()}
    found["compilations"] = np.asarray(counter.after_warmup)
    found |= {f"params/{name}": leaf for name, leaf in flatten_parameters(state.params).items()}
    return found


def main(path: str, *cases: str) -> None:
    assert len(jax.devices()) == DEVICES
    decoder.UNROLLED_LAYERS = 1  # a loop over layers compiles in a fraction of the time
    arrays = {}
    for text in cases:
        values = json.loads(text)
        case = Case(**{name: tuple(value) if name == "shape" else value for name, value in values.items()})
        arrays |= {f"{case.name}/{name}": value for name, value in run(case).items()}
    np.savez(path, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
