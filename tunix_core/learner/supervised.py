"""The warm start: supervised steps on demonstrations until the policy is a weak beginner, no further.

Reinforcement learning needs a policy that succeeds now and then, and something left to learn. So
the training stops inside a range of held-out success. Where one stretch between evaluations jumps over
the range, it is taken back and repeated in stretches half as long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tunix_core.config import RunConfig
from tunix_core.data.packing import PackedArrays, best_fit
from tunix_core.distributed.mesh import make_local_mesh
from tunix_core.environments import demonstrated, task_seed
from tunix_core.environments.demonstrations import Demonstration, demonstrations
from tunix_core.errors import ConfigError
from tunix_core.learner.examples import pack_examples
from tunix_core.learner.train_step import TrainStep, make_supervised_step
from tunix_core.learner.update import TrainState
from tunix_core.models.parameters import Params, adapters, init_parameters
from tunix_core.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStart:
    """What came out."""

    params: Params
    """Host arrays: whole weights, or adapters where those are trained."""
    num_steps: int
    """Optimizer steps taken, those taken back excluded."""
    loss: float
    """Cross entropy of the last step, nats per policy token."""
    success: float
    """Held-out greedy success."""


def pack_demonstrations(items: Sequence[Demonstration], num_windows: int, window_tokens: int) -> PackedArrays:
    """As many of the leading demonstrations as the windows hold, as a batch; advantages are zero."""
    kept = len(items)
    lengths = np.array([len(item.tokens) for item in items])
    while best_fit(lengths[:kept], window_tokens).num_windows > num_windows:
        kept -= 1
    return pack_examples([(item,) for item in items[:kept]], num_windows, window_tokens)


class _Demonstrations:
    """Batch k of the run's endless stream: the same k gives the same batch."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._environment = demonstrated(config.environment)
        unit = config.microbatch_windows
        lengths = np.array([len(item.tokens) for item in self._draw(0)])
        # A tenth to spare: batches differ in length, the compiled shape does not.
        windows = best_fit(lengths, config.learner.window_tokens).num_windows * 1.1
        self.num_windows = max(1, -int(-windows // unit)) * unit

    def _draw(self, step: int) -> list[Demonstration]:
        size = self._config.warm_start.demonstrations_per_step
        seeds = [task_seed("train", step * size + i, self._config.seed) for i in range(size)]
        return demonstrations(self._tokenizer, self._environment, seeds)

    def batch(self, step: int) -> PackedArrays:
        return pack_demonstrations(self._draw(step), self.num_windows, self._config.learner.window_tokens)


def _train(
    step_function: TrainStep, state: TrainState, base: Params | None, stream: _Demonstrations, steps: range
) -> tuple[TrainState, float]:
    loss = np.nan
    for step in steps:
        arrays = stream.batch(step)
        state, metrics = step_function(state, base, step_function.put(arrays), float(arrays.loss_mask.sum()))
        loss = float(metrics["loss"])
    return state, loss


def _host(state: TrainState) -> TrainState:
    """A copy that outlives the donation of `state`."""
    return jax.tree.map(lambda leaf: np.array(leaf), state)


def start_parameters(config: RunConfig, pretrained: Params | None) -> tuple[Params, Params | None]:
    """What training starts from, and the frozen base under it where that is adapters.

    Args:
        pretrained: whole weights of the model the run starts from; None: fresh ones.
    """
    model = config.model
    if not model.lora_rank:
        return (init_parameters(model, config.seed) if pretrained is None else pretrained), None
    return adapters(init_parameters(model, config.seed)), pretrained


def warm_start(
    config: RunConfig,
    evaluate: Callable[[Params], float],
    report: Callable[[dict[str, Any]], None],
    *,
    tokenizer: Tokenizer,
    pretrained: Params | None = None,
) -> WarmStart:
    """Train into `warm_start.target_success_low … high`, from fresh parameters or from a pretrained model.

    Args:
        evaluate: held-out greedy success of what is trained (host arrays): whole weights, or adapters.
        report: called after each evaluation with `num_steps`, `loss`, `success`.
        pretrained: whole weights to start from; evaluated before any step, and good enough as they are from
            `target_success_low` on.

    Raises:
        ConfigError: `warm_start.num_steps` did not reach the range, or the range is too narrow to hit.
    """
    options = config.warm_start
    start, base = start_parameters(config, pretrained)
    kept_params = jax.tree.map(np.asarray, start)
    done, stretch, success = 0, options.evaluate_every_steps, 0.0
    if pretrained is not None or options.num_steps == 0:
        success = evaluate(kept_params)
        report({"num_steps": 0, "loss": float("nan"), "success": success})
        if options.num_steps == 0 or success >= options.target_success_low:
            return WarmStart(params=kept_params, num_steps=0, loss=float("nan"), success=success)
    config, mesh = make_local_mesh(config)
    step_function = make_supervised_step(config, mesh)
    stream = _Demonstrations(config, tokenizer)
    step_function.compile(stream.num_windows)
    state = step_function.init_state(kept_params)
    if base is not None:
        base = step_function.put_reference(base)
    kept = _host(state)
    while done < options.num_steps:
        state, loss = _train(step_function, state, base, stream, range(done, done + stretch))
        trained = _host(state)
        success = evaluate(trained.params)
        report({"num_steps": done + stretch, "loss": loss, "success": success})
        if success > options.target_success_high:
            if stretch == 1:
                raise ConfigError(
                    "warm_start.target_success_high",
                    options.target_success_high,
                    f"above {success:.3f}, which a single step reached",
                    "Widen the range or lower warm_start.learning_rate.",
                )
            stretch = max(1, stretch // 2)
            state = step_function.put_state(kept)
            continue
        done += stretch
        kept = trained
        if success >= options.target_success_low:
            return WarmStart(params=kept.params, num_steps=done, loss=loss, success=success)
    raise ConfigError(
        "warm_start.num_steps",
        options.num_steps,
        f"enough for a held-out success of {options.target_success_low} (reached {success:.3f})",
        "Raise it, or lower warm_start.target_success_low.",
    )
