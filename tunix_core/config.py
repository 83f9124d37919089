"""One frozen dataclass per component; a run's configuration is their tuple.

A recipe is a TOML file that names only what it changes. The resolved configuration is saved with
the run and is the only one its processes read, so changing a default later changes no old run.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from pathlib import Path
from typing import Literal

from tunix_core.actor_config import ActorConfig
from tunix_core.algorithm_config import AlgorithmConfig
from tunix_core.engine_config import EngineConfig
from tunix_core.environment_config import EnvironmentConfig
from tunix_core.mesh_config import MeshConfig
from tunix_core.model_config import ModelConfig
from tunix_core.retention_config import RetentionConfig
from tunix_core.types import Order
from tunix_core.validation import check_sampling as _check_sampling
from tunix_core.validation import require as _require
from tunix_core.validation import require_choice as _require_choice
from tunix_core.validation import require_range as _require_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """A short supervised start from scripted demonstrations; it makes policy version 0.

    It stops as soon as held-out greedy success lies in the target range, so that reinforcement
    learning has both a signal to start from and something left to learn.
    """

    learning_rate: float = 1e-3
    num_steps: int = 400
    """At most this many; running out below the target range is an error. 0: version 0 is the pretrained model, or the
    fresh parameters, as they are."""
    demonstrations_per_step: int = 128
    evaluate_every_steps: int = 10
    target_success_low: float = 0.15
    target_success_high: float = 0.40

    def __post_init__(self) -> None:
        _require_range("warm_start.learning_rate", self.learning_rate, 1e-8, 1)
        _require_range("warm_start.num_steps", self.num_steps, 0)
        _require_range("warm_start.demonstrations_per_step", self.demonstrations_per_step, 1)
        _require_range("warm_start.evaluate_every_steps", self.evaluate_every_steps, 1)
        _require_range("warm_start.target_success_low", self.target_success_low, 0, 1)
        _require_range("warm_start.target_success_high", self.target_success_high, self.target_success_low, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuneConfig:
    """Supervised training from files, `python -m tasks.fine_tune`: batches, length and held-out loss.

    An example is a conversation, or a pair of answers. Rate and warm-up are the optimizer's, windows the learner's.
    """

    num_epochs: int = 1
    """Each example once per epoch, in an order of the epoch's own."""
    num_steps: int = 0
    """At most so many optimizer steps; 0: as many as the epochs have."""
    examples_per_step: int = 32
    """The last step of an epoch takes what is left."""
    held_out_fraction: float = 0.05
    """Of the examples, drawn by the seed and never trained on; rounded up to a whole one."""
    evaluate_every_steps: int = 50
    """Held-out loss after every so many steps, beside the start and the end."""

    def __post_init__(self) -> None:
        _require_range("fine_tune.num_epochs", self.num_epochs, 1)
        _require_range("fine_tune.num_steps", self.num_steps, 0)
        _require_range("fine_tune.examples_per_step", self.examples_per_step, 1)
        _require_range("fine_tune.held_out_fraction", self.held_out_fraction, 0, 0.9)
        _require_range("fine_tune.evaluate_every_steps", self.evaluate_every_steps, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferencesConfig:
    """Direct preference optimisation, see `rl.preferences`."""

    beta: float = 0.1
    """How strongly the policy is held to its start: the larger, the closer."""
    label_smoothing: float = 0.0
    """Chance that a pair's label is wrong; below one half."""

    def __post_init__(self) -> None:
        _require_range("preferences.beta", self.beta, 1e-6)
        _require_range("preferences.label_smoothing", self.label_smoothing, 0, 0.499)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    learning_rate: float = 1e-4
    warmup_steps: int = 10
    """Updates over which the rate rises linearly: Adam's first steps, on two or three noisy gradients, are as
    long as any, and can undo a weak start."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    gradient_clip_norm: float = 1.0
    first_moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of Adam's running mean of gradients; bfloat16 saves 2 bytes a parameter."""

    def __post_init__(self) -> None:
        kind = typing.get_type_hints(type(self))["first_moment_dtype"]
        _require_choice("optimizer.first_moment_dtype", self.first_moment_dtype, kind)
        _require_range("optimizer.learning_rate", self.learning_rate, 1e-9, 1)
        _require_range("optimizer.warmup_steps", self.warmup_steps, 0)
        _require_range("optimizer.weight_decay", self.weight_decay, 0, 1)
        _require_range("optimizer.beta1", self.beta1, 0, 0.9999999)
        _require_range("optimizer.beta2", self.beta2, 0, 0.9999999)
        _require_range("optimizer.gradient_clip_norm", self.gradient_clip_norm, 1e-9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    num_steps: int = 90
    groups_per_batch: int = 32
    window_tokens: int = 256
    """Tokens of a packed row, W. A longer trajectory is counted overlong, never cut."""
    shorter_windows: tuple[int, ...] = ()
    """Further sizes of windows, each below `window_tokens` and compiled by itself. A batch takes the smallest one that its
    longest trajectory fits, so that short batches fill less with padding and hold less at a time. None with stages; warm start and fine-tuning have the one size."""
    windows_per_microbatch: int = 2
    """Windows per data shard in one gradient accumulation."""
    max_windows: int = 64
    """Windows of the compiled batch, over all data shards; raised where a whole batch could need more."""
    updates_per_batch: int = 1
    """Optimizer updates that a batch is cut into, K. Its micro-batches go to them in turn; all hold on to the weights at
    the start of the batch, whose log probabilities take one more forward pass at K >= 2. The clock counts batches."""
    buffer_bytes: int = 256 * 2**20
    snapshot_interval_steps: int = 1
    max_nonfinite_steps: int = 3
    """Batches in a row with a skipped update after which the run stops as diverged."""

    def __post_init__(self) -> None:
        _require_range("learner.num_steps", self.num_steps, 1)
        _require_range("learner.groups_per_batch", self.groups_per_batch, 1)
        _require_range("learner.window_tokens", self.window_tokens, 16)
        for size in self.shorter_windows:
            _require_range("learner.shorter_windows", size, 16, self.window_tokens - 1)
        _require(
            list(self.shorter_windows) == sorted(set(self.shorter_windows)),
            "learner.shorter_windows",
            list(self.shorter_windows),
            "rising sizes, each once",
            "Sort them.",
        )
        _require_range("learner.windows_per_microbatch", self.windows_per_microbatch, 1)
        _require_range("learner.max_windows", self.max_windows, self.windows_per_microbatch)
        _require_range("learner.updates_per_batch", self.updates_per_batch, 1)
        _require_range("learner.buffer_bytes", self.buffer_bytes, 2**20)
        _require_range("learner.snapshot_interval_steps", self.snapshot_interval_steps, 1)
        _require_range("learner.max_nonfinite_steps", self.max_nonfinite_steps, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StalenessConfig:
    """How old a trajectory may be, in steps, and what is done before it gets there."""

    max_staleness: int = 4
    max_mean_staleness: float = 3.0
    """Above it the learner waits for fresher data."""
    max_throttle_seconds: float = 30.0
    """After waiting so long it steps all the same and counts an override."""
    consumption_order: Order = "oldest_first"
    """Which of the groups that wait make the next batch. Oldest first discards least; freshest first lowers mean staleness
    a little; largest advantage first prefers groups whose rewards differ most, and leaves the others to grow stale."""
    max_reuse: int = 1
    """Steps that may train on a group, each within `max_staleness`; a group that was used comes back only where there are
    too few new ones."""
    control_interval_seconds: float = 1.0
    """How often the learner publishes its pacing signal, also while it waits."""

    def __post_init__(self) -> None:
        _require_range("staleness.max_staleness", self.max_staleness, 0, 1000)
        _require_range("staleness.max_mean_staleness", self.max_mean_staleness, 0)
        _require_range("staleness.max_throttle_seconds", self.max_throttle_seconds, 0)
        _require_range("staleness.control_interval_seconds", self.control_interval_seconds, 0.05, 60)
        _require_choice("staleness.consumption_order", self.consumption_order, Order)
        _require(
            1 <= self.max_reuse <= self.max_staleness + 1,
            "staleness.max_reuse",
            self.max_reuse,
            f"1 to {self.max_staleness + 1} (staleness.max_staleness + 1)",
            "Every use is at least a step after the one before: a further one would be over the bound. Lower it, or "
            "raise staleness.max_staleness.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Publication of snapshots as policy versions, behind a gate."""

    interval_seconds: float = 1.0
    max_abs_weight: float = 1e3
    """The gate refuses weights with a larger or a non-finite entry."""
    max_relative_change: float = 0.5
    """… or whose distance from the policy published before exceeds this share of its norm."""

    def __post_init__(self) -> None:
        _require_range("sync.interval_seconds", self.interval_seconds, 0.05, 86_400)
        _require_range("sync.max_abs_weight", self.max_abs_weight, 1e-6)
        _require_range("sync.max_relative_change", self.max_relative_change, 1e-6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    interval_steps: int = 10
    verify_interval_seconds: float = 5.0
    keep: int = 3
    """Complete, verified checkpoints retained."""
    grace_seconds: float = 60.0
    """Between retiring an object and deleting it."""

    def __post_init__(self) -> None:
        _require_range("checkpoint.interval_steps", self.interval_steps, 1)
        _require_range("checkpoint.verify_interval_seconds", self.verify_interval_seconds, 0.05)
        _require_range("checkpoint.keep", self.keep, 1)
        _require_range("checkpoint.grace_seconds", self.grace_seconds, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out evaluation of policy versions, and how it samples; training knows the temperature alone."""

    num_tasks: int = 256
    greedy: bool = True
    """Take the likeliest token; otherwise draw with what follows."""
    temperature: float = 1.0
    top_k: int = 0
    """Only the likeliest so many; 0: all."""
    top_p: float = 1.0
    """Of those the likeliest with so much of the probability together; 1: all."""
    min_p: float = 0.0
    """None below so much of the likeliest one's probability; 0: all."""

    def __post_init__(self) -> None:
        _check_sampling("evaluation", self)
        _require(
            not self.greedy or self.temperature == 1,
            "evaluation.temperature",
            self.temperature,
            "1 with evaluation.greedy",
            "Set evaluation.greedy to false to draw at a temperature.",
        )
        _require_range("evaluation.num_tasks", self.num_tasks, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoalsConfig:
    """What the recipe promises of a whole run; the report says what was met, and `make demo` fails where it was not.

    Staleness bound, ledger, no repetition and no compilation after warm-up are promised by every run.
    """

    success: float = 0.8
    """Held-out success at the end."""
    gain: float = 0.4
    """… and how much of it the run added."""
    num_actors: int = 2
    num_versions: int = 10
    """Policy versions whose trajectories were generated."""
    stale_fraction: float = 0.1
    """Of tokens read, at most."""
    feed_ratio: float = 0.6
    """Learner's tokens/s over its own from a full buffer."""

    def __post_init__(self) -> None:
        _require_range("goals.success", self.success, 0, 1)
        _require_range("goals.gain", self.gain, 0, 1)
        _require_range("goals.num_actors", self.num_actors, 1)
        _require_range("goals.num_versions", self.num_versions, 1)
        _require_range("goals.stale_fraction", self.stale_fraction, 0, 1)
        _require_range("goals.feed_ratio", self.feed_ratio, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """Where local processes run while a run trains. Empty: the operating system decides."""

    learner_cpus: tuple[int, ...] = ()
    actor_cpus: tuple[int, ...] = ()
    other_cpus: tuple[int, ...] = ()
    idle_actors: bool = False
    """Actors run only where nothing else wants the CPU (SCHED_IDLE), with one XLA thread each: a pool of
    threads is as slow as its most starved one."""

    def __post_init__(self) -> None:
        for field in ("learner_cpus", "actor_cpus", "other_cpus"):
            for cpu in getattr(self, field):
                _require_range(f"launcher.{field}", cpu, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Where the learner's metrics go besides the run directory, and what its utilisation is measured against."""

    sinks: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Each needs the package's extra of the same name. The Parquet metrics are written in any case."""
    local_folder: str = ""
    """Absolute path under which sinks keep their files on the learner's host; empty: a temporary folder that
    the process removes at its end."""
    peak_flops_per_second: float = 0.0
    """Of all the learner's devices together; 0: measured at start with float32 matrix products."""
    max_logprob_gap: float = 0.1
    """Mean distance, in nats, between an actor's log probabilities and the learner's at equal version, above which there
    is an alarm. Servers in bfloat16 are some hundredths away."""

    def __post_init__(self) -> None:
        kind = typing.get_args(typing.get_type_hints(type(self))["sinks"])[0]
        for sink in self.sinks:
            _require_choice("observability.sinks", sink, kind)
        _require(
            len(set(self.sinks)) == len(self.sinks),
            "observability.sinks",
            list(self.sinks),
            "each sink once",
            "Remove the repetition.",
        )
        path = Path(self.local_folder)
        _require(
            not self.local_folder or (path.is_absolute() and ".." not in path.parts),
            "observability.local_folder",
            self.local_folder,
            "an absolute path without '..', or nothing",
            "Write the whole path.",
        )
        _require_range("observability.max_logprob_gap", self.max_logprob_gap, 1e-6)
        _require(
            math.isfinite(self.peak_flops_per_second) and self.peak_flops_per_second >= 0,
            "observability.peak_flops_per_second",
            self.peak_flops_per_second,
            "0 (measure it) or a finite rate",
            "Take the product of a device's peak and the number of devices, in operations per second.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run's processes need to know."""

    recipe: str
    seed: int = 0
    reference_uri: str = ""
    """Policy folder that is the KL reference; empty: this run's policy version 0."""
    start_uri: str = ""
    """Policy folder, `<run URI>/policies/<eight digits>`, whose weights the run starts from: its version 0, as they are.
    Empty: the pretrained model or fresh parameters, and a warm start."""
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    environment: EnvironmentConfig = dataclasses.field(default_factory=EnvironmentConfig)
    warm_start: WarmStartConfig = WarmStartConfig()
    fine_tune: FineTuneConfig = FineTuneConfig()
    preferences: PreferencesConfig = PreferencesConfig()
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    learner: LearnerConfig = LearnerConfig()
    staleness: StalenessConfig = StalenessConfig()
    actor: ActorConfig = dataclasses.field(default_factory=ActorConfig)
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    sync: SyncConfig = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    retention: RetentionConfig = dataclasses.field(default_factory=RetentionConfig)
    evaluation: EvaluationConfig = EvaluationConfig()
    launcher: LauncherConfig = LauncherConfig()
    goals: GoalsConfig = GoalsConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    def __post_init__(self) -> None:
        _require_range("seed", self.seed, 0, 2**31 - 1)
        self.mesh.check(self.model, self.learner.window_tokens)
        for window_tokens in self.learner.shorter_windows:
            self.mesh.check(self.model, window_tokens, "learner.shorter_windows")
        _require(
            not self.learner.shorter_windows or self.mesh.stage == 1,
            "learner.shorter_windows",
            list(self.learner.shorter_windows),
            "none with mesh.stage above 1",
            "A pipeline takes one size of windows: leave them out.",
        )
        _require(
            self.staleness.consumption_order != "largest_advantage_first" or not self.algorithm.has_value_head,
            "staleness.consumption_order",
            self.staleness.consumption_order,
            "oldest_first or freshest_first with algorithm.advantage = gae",
            "With a value head the advantages are known only once a batch is on the device.",
        )
        limit = max(1, self.staleness.max_staleness)
        _require(
            self.learner.snapshot_interval_steps <= limit,
            "learner.snapshot_interval_steps",
            self.learner.snapshot_interval_steps,
            f"1 to {limit} (max(1, staleness.max_staleness))",
            "With a longer interval every trajectory is over the bound before newer weights exist, and the run stops for good.",
        )
        _require(
            not self.model.lora_rank or bool(self.model.pretrained_uri),
            "model.lora_rank",
            self.model.lora_rank,
            "0 without model.pretrained_uri",
            "Adapters need a trained base: tunixctl import-model makes one.",
        )
        _require(
            not (self.model.lora_rank and self.reference_uri),
            "reference_uri",
            self.reference_uri,
            "none with model.lora_rank",
            "The reference of adapters is their base.",
        )
        started = re.search(r"/policies/(\d{8})/?$", self.start_uri)
        _require(
            started is None or int(started[1]) == 0 or bool(self.reference_uri) or bool(self.model.lora_rank),
            "reference_uri",
            self.reference_uri,
            f"a policy folder with start_uri = {self.start_uri}",
            "Such a start has been trained by reinforcement already: name the supervised policy it came from, that run's "
            "reference.",
        )
        _require(
            self.environment.demonstrated or bool(self.start_uri) or self.warm_start.num_steps == 0,
            "environment.name",
            self.environment.name,
            "an environment with demonstrations, or a run without a warm start",
            "It cannot play its own tasks: start from a policy (start_uri), or as the model is (warm_start.num_steps = 0).",
        )
        _require(
            self.actor.min_actors <= self.actor.num_groups * self.actor.replicas,
            "actor.min_actors",
            self.actor.min_actors,
            f"1 to {self.actor.num_groups * self.actor.replicas} (num_groups * replicas)",
            "Lower it or enlarge the pool.",
        )
        num_actors = self.actor.num_groups * self.actor.replicas
        _require(
            self.engine.kind == "jax" or len(self.engine.base_urls) >= num_actors,
            "engine.base_urls",
            list(self.engine.base_urls),
            f"at least {num_actors}, one for each actor (actor.num_groups * actor.replicas)",
            "An actor alone changes the weights of its servers: name more servers or start fewer actors.",
        )
        _require(
            self.engine.kind == "jax" or self.actor.swap_policy in ("turn", "immediate"),
            "actor.swap_policy",
            self.actor.swap_policy,
            "turn, immediate with engine.kind = openai",
            "A server holds one version of the weights.",
        )
        _require(
            self.algorithm.group_size <= self.actor.num_slots,
            "actor.num_slots",
            self.actor.num_slots,
            f"at least algorithm.group_size = {self.algorithm.group_size}",
            "A whole group decodes at once.",
        )
        _require(
            self.environment.timeout_seconds <= self.actor.episode_timeout_seconds,
            "actor.episode_timeout_seconds",
            self.actor.episode_timeout_seconds,
            f"at least environment.timeout_seconds = {self.environment.timeout_seconds}",
            "An episode lasts at least as long as one of its steps may.",
        )
        _require(
            self.actor.task_block_size <= self.environment.num_tasks,
            "actor.task_block_size",
            self.actor.task_block_size,
            f"at most environment.num_tasks = {self.environment.num_tasks}",
            "An epoch is cut into blocks.",
        )
        _require(
            self.actor.context_tokens <= self.learner.window_tokens,
            "actor.context_tokens",
            self.actor.context_tokens,
            f"at most learner.window_tokens = {self.learner.window_tokens}",
            "A trajectory that fits no window can never be consumed.",
        )
        free = self.algorithm.overlong_limit_tokens - self.algorithm.overlong_buffer_tokens
        _require(
            self.algorithm.overlong_penalty == 0 or free < self.max_policy_tokens,
            "algorithm.overlong_limit_tokens",
            self.algorithm.overlong_limit_tokens,
            f"below {self.max_policy_tokens + self.algorithm.overlong_buffer_tokens}: an episode speaks at most "
            f"{self.max_policy_tokens} tokens (actor.max_turns, max_turn_tokens, context_tokens)",
            "No episode would reach the penalty: lower the limit.",
        )
        _require(
            self.microbatch_windows <= self.learner.max_windows,
            "learner.max_windows",
            self.learner.max_windows,
            f"at least windows_per_microbatch * mesh.data * mesh.fsdp = {self.microbatch_windows}",
            "Every data shard runs at least one micro-batch.",
        )
        _require(
            self.learner.updates_per_batch <= self.max_microbatches(self.learner.window_tokens),
            "learner.updates_per_batch",
            self.learner.updates_per_batch,
            f"1 to {self.max_microbatches(self.learner.window_tokens)}, the micro-batches of the largest batch",
            "An update takes at least one: lower it, or learner.windows_per_microbatch.",
        )
        _require(
            self.algorithm.loss != "vtrace" or self.learner.updates_per_batch == 1,
            "learner.updates_per_batch",
            self.learner.updates_per_batch,
            "1 with algorithm.loss = vtrace",
            "Its gradient has no hold on a proximal policy: choose decoupled_ppo or ppo for more updates.",
        )

    @property
    def batch_trajectories(self) -> int:
        """Episodes a step consumes, B; trajectories too, but for forks."""
        return self.learner.groups_per_batch * self.algorithm.group_size

    @property
    def max_policy_tokens(self) -> int:
        """That one episode can have."""
        of_turns = self.actor.max_turns * self.actor.max_turn_tokens
        return min(of_turns, (1 + self.actor.max_forks) * (self.actor.context_tokens - 1))

    @property
    def microbatch_windows(self) -> int:
        """Windows of one micro-batch, over all data shards."""
        return self.learner.windows_per_microbatch * self.mesh.num_window_shards

    @property
    def window_sizes(self) -> tuple[int, ...]:
        """Tokens of a window, rising: a batch takes one of them."""
        return (*self.learner.shorter_windows, self.learner.window_tokens)

    def max_microbatches(self, window_tokens: int) -> int:
        """Of the largest batch that is compiled for at this size: a whole one, every trajectory as long as it may be there."""
        per_window = window_tokens // min(window_tokens, self.actor.context_tokens)
        per_episode = 1 + self.actor.max_forks
        worst = max(-(-self.batch_trajectories * per_episode // per_window), self.algorithm.group_size * per_episode)
        return -(-max(self.learner.max_windows, worst) // self.microbatch_windows)
