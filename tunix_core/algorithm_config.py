"""What a step minimises, and which choices belong together."""

from __future__ import annotations

import dataclasses
import typing
from typing import Literal

from tunix_core.validation import require, require_choice, require_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """What a step minimises: advantages of whole episodes, a policy loss, a correction, a KL leash.

    The default holds up off-policy: decoupled PPO with truncated importance weights.
    """

    group_size: int = 8
    """Episodes per task instance, G."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "turn_level", "gae"] = "grpo"
    """Baseline and scale, see `rl.advantages`; `reinforce_pp` is the variant with a group baseline. `turn_level` gives each
    policy turn what was paid from it on, the others but `gae` the whole episode the same. `gae` trains a value head, and
    estimates the advantage of each policy token by it from what each turn was paid."""
    discount: float = 1.0
    """Of later rewards: per turn with `turn_level`, per policy token with `gae`."""
    trace_decay: float = 0.95
    """Lambda of `gae` and of the V-trace loss."""
    value_coefficient: float = 0.5
    """Weight of the value head's loss."""
    value_clip: float = 0.2
    """How far from its value at the start of the batch a value is trained; acts from a batch's second update on. 0: any
    distance."""
    filter_zero_signal_groups: bool = False
    """Drop groups whose rewards are all equal before a batch is formed (DAPO's dynamic sampling); the penalty
    for length does not count there."""
    overlong_penalty: float = 0.0
    """Taken from the reward of an episode that speaks `overlong_limit_tokens` or more, before its advantage (DAPO's soft
    overlong punishment); 0: none."""
    overlong_limit_tokens: int = 0
    overlong_buffer_tokens: int = 0
    """Policy tokens below the limit over which the penalty rises linearly from 0."""
    loss: Literal["decoupled_ppo", "ppo", "gspo", "cispo", "policy_gradient", "vtrace"] = "decoupled_ppo"
    """`vtrace` is IMPALA's policy gradient with the value head of `gae`."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    """Bound of the objective where the advantage is negative, above 1; 0: none."""
    correction: Literal["truncate", "truncate_sequence", "mask", "mask_sequence", "none"] = "truncate"
    """Between behavior and proximal policy, per token or per trajectory, see `rl.corrections`. `ppo`, `gspo`, `cispo`
    and `vtrace` take their ratio to the behavior policy and have none."""
    importance_truncation: float = 2.0
    """Cap of the weight proximal / behavior where it is truncated, V-trace's rho too."""
    mask_low: float = 0.5
    mask_high: float = 2.0
    """Band of proximal / behavior that is kept where it is masked."""
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    """The loss is the mean over policy tokens, over trajectories of their means, or over trajectories of their
    sums divided by `constant_tokens`. One denominator for the whole batch."""
    constant_tokens: int = 64
    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = "unbiased"
    kl_in: Literal["loss", "reward"] = "loss"
    """`reward` lowers a token's advantage by its divergence and lets no gradient through it."""
    kl_coefficient: float = 1e-3
    """0 drops the leash; its metric stays."""
    temperature: float = 1.0

    def __post_init__(self) -> None:
        require_range("algorithm.group_size", self.group_size, 2)
        require_range("algorithm.clip_low", self.clip_low, 0, 1)
        require_range("algorithm.clip_high", self.clip_high, 0)
        require_range("algorithm.importance_truncation", self.importance_truncation, 1)
        require_range("algorithm.mask_low", self.mask_low, 0, 1)
        require_range("algorithm.mask_high", self.mask_high, 1)
        require_range("algorithm.constant_tokens", self.constant_tokens, 1)
        require_range("algorithm.kl_coefficient", self.kl_coefficient, 0)
        require_range("algorithm.temperature", self.temperature, 1e-3, 10)
        require_range("algorithm.overlong_penalty", self.overlong_penalty, 0)
        on = self.overlong_penalty > 0
        require(
            (self.overlong_limit_tokens >= 1) if on else (self.overlong_limit_tokens == 0),
            "algorithm.overlong_limit_tokens",
            self.overlong_limit_tokens,
            f"{'1 and above' if on else '0'} with algorithm.overlong_penalty = {self.overlong_penalty}",
            "The penalty and its limit go together.",
        )
        require(
            (1 <= self.overlong_buffer_tokens <= self.overlong_limit_tokens)
            if on
            else (self.overlong_buffer_tokens == 0),
            "algorithm.overlong_buffer_tokens",
            self.overlong_buffer_tokens,
            f"1 to algorithm.overlong_limit_tokens = {self.overlong_limit_tokens}" if on else "0 without a penalty",
            "The penalty rises over so many tokens below the limit.",
        )
        for name, kind in typing.get_type_hints(type(self)).items():
            if typing.get_origin(kind) is Literal:
                require_choice(f"algorithm.{name}", getattr(self, name), kind)
        self._require_what_belongs_together()

    @property
    def has_value_head(self) -> bool:
        return self.advantage == "gae"

    @property
    def reads_turns(self) -> bool:
        """Whether what each turn was paid matters, beside an episode's reward."""
        return self.advantage in ("turn_level", "gae")

    def _require_what_belongs_together(self) -> None:
        require_range("algorithm.discount", self.discount, 0, 1)
        require(
            self.reads_turns or self.discount == 1,
            "algorithm.discount",
            self.discount,
            f"1 with algorithm.advantage = {self.advantage}",
            "An episode's reward as a whole has no time: choose algorithm.advantage = turn_level or gae.",
        )
        require(
            not (self.reads_turns and self.filter_zero_signal_groups),
            "algorithm.filter_zero_signal_groups",
            self.filter_zero_signal_groups,
            f"false with algorithm.advantage = {self.advantage}",
            "Groups of equal rewards have a signal there: when they were paid.",
        )
        require_range("algorithm.trace_decay", self.trace_decay, 0, 1)
        require_range("algorithm.value_coefficient", self.value_coefficient, 1e-6)
        require_range("algorithm.value_clip", self.value_clip, 0)
        require(
            self.loss != "vtrace" or self.has_value_head,
            "algorithm.advantage",
            self.advantage,
            "gae with algorithm.loss = vtrace",
            "V-trace corrects what a value head estimates.",
        )
        require(
            not (self.reads_turns and self.loss == "gspo"),
            "algorithm.loss",
            self.loss,
            f"another one with algorithm.advantage = {self.advantage}",
            "One ratio per trajectory needs one advantage per trajectory.",
        )
        coupled = self.loss in ("ppo", "gspo", "cispo", "vtrace")
        require(
            not coupled or self.correction == "none",
            "algorithm.correction",
            self.correction,
            f"none with algorithm.loss = {self.loss}",
            "Its ratio to the behavior policy corrects already; a second weight would count it twice.",
        )
        require(
            coupled or self.correction != "none",
            "algorithm.correction",
            self.correction,
            f"truncate, truncate_sequence, mask, mask_sequence with algorithm.loss = {self.loss}",
            "Without a correction stale trajectories would count as the policy's own.",
        )
        require(
            self.dual_clip == 0 or (self.dual_clip > 1 and self.loss in ("ppo", "decoupled_ppo")),
            "algorithm.dual_clip",
            self.dual_clip,
            "0, or above 1 with algorithm.loss = ppo or decoupled_ppo",
            "It bounds PPO's objective.",
        )
        require(
            self.kl_in == "reward" or self.kl_estimator != "k1",
            "algorithm.kl_estimator",
            self.kl_estimator,
            "k2, k3, unbiased with algorithm.kl_in = loss",
            "The gradient of k1 is zero in expectation.",
        )
        require(
            self.kl_in == "loss" or self.kl_estimator != "unbiased",
            "algorithm.kl_estimator",
            self.kl_estimator,
            "k1, k2, k3 with algorithm.kl_in = reward",
            "The unbiased estimator is a gradient's; a reward has none.",
        )
        require(
            self.loss != "gspo" or self.kl_in == "loss",
            "algorithm.kl_in",
            self.kl_in,
            "loss with algorithm.loss = gspo",
            "One ratio per trajectory needs one advantage per trajectory.",
        )
