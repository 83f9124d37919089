"""The decoder's configuration: one architecture with the switches by which the families differ.

What a family sets is what its Hugging Face `config.json` says; `models.huggingface` translates.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Literal

from tunix_core.validation import require, require_choice, require_range

LORA_TARGETS = ("query", "key", "value", "output", "gate", "up", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder with rotary positions, grouped-query attention, RMSNorm and a gated MLP."""

    architecture: Literal["llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3"] = "llama"
    """Whose names and `config.json` an export takes; what is computed, the other fields say."""
    vocab_size: int = 272
    model_width: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_width: int = 32
    mlp_width: int = 384
    """Of one expert, where there are experts."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norm_epsilon: float = 1e-6
    unit_offset_norms: bool = False
    """Norms multiply by 1 + scale (Gemma) instead of by scale."""
    post_norms: bool = False
    """Also norm what attention and MLP give, before it is added (Gemma)."""
    tied_embeddings: bool = False
    """The head is the embedding, transposed."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by sqrt(model_width) (Gemma)."""

    attention_bias: bool = False
    """Query, key and value have biases (Qwen2.5)."""
    query_key_norm: bool = False
    """RMSNorm over each head of query and key before rotation (Qwen3, Gemma 3)."""
    query_scale_width: int = 0
    """Queries are divided by its square root; 0: `head_width`."""
    attention_softcap: float = 0.0
    """Scores s become cap * tanh(s / cap) (Gemma 2); 0: off."""
    logit_softcap: float = 0.0
    """The same for logits."""
    sliding_window: int = 0
    """Tokens that a local layer attends to, its own included; 0: every layer attends to all."""
    sliding_period: int = 0
    """Every so many layers, the last of them attends to all and the others locally (2: Gemma 2, 6: Gemma 3)."""

    rope_theta: float = 10_000.0
    local_rope_theta: float = 0.0
    """Of local layers; 0: as the others. Scaling does not apply to them where it is set (Gemma 3)."""
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    rope_factor: float = 1.0
    rope_low_frequency_factor: float = 1.0
    rope_high_frequency_factor: float = 4.0
    rope_original_tokens: int = 8192

    num_experts: int = 0
    """0: dense. Otherwise each MLP is a mixture of experts."""
    experts_per_token: int = 0
    normalize_expert_weights: bool = True
    """The weights of a token's experts sum to 1."""

    pretrained_uri: str = ""
    """Model folder that `tunixctl import-model` wrote; policy version 0 is that model."""
    lora_rank: int = 0
    """0: all weights are trained. Otherwise low-rank adapters on a frozen base (arXiv:2106.09685)."""
    lora_alpha: float = 16.0
    """Adapters are scaled by alpha / rank."""
    lora_targets: tuple[str, ...] = LORA_TARGETS

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and of the weights as they are used; master weights, norms, softmax and losses are float32."""
    attention: Literal["auto", "dense", "blocks", "segments", "pallas"] = "auto"
    """How packed windows attend, see `models.attention`; `auto` chooses by device and window."""
    remat: Literal["none", "layer", "matmuls"] = "none"
    """What the backward pass computes again: nothing, each layer whole, or each layer but its matrix products."""
    logprob_chunk_tokens: int = 0
    """Tokens whose logits exist at a time; 0: as the vocabulary allows, at most 1,024."""

    def __post_init__(self) -> None:
        for field in ("vocab_size", "model_width", "num_layers", "num_heads", "num_kv_heads", "head_width"):
            require_range(f"model.{field}", getattr(self, field), 1)
        for name, kind in typing.get_type_hints(type(self)).items():
            if typing.get_origin(kind) is Literal:
                require_choice(f"model.{name}", getattr(self, name), kind)
        require_range("model.mlp_width", self.mlp_width, 1)
        require_range("model.norm_epsilon", self.norm_epsilon, 0)
        require_range("model.logprob_chunk_tokens", self.logprob_chunk_tokens, 0)
        for field in ("attention_softcap", "logit_softcap", "query_scale_width", "local_rope_theta"):
            require_range(f"model.{field}", getattr(self, field), 0)
        require(
            self.num_heads % self.num_kv_heads == 0,
            "model.num_kv_heads",
            self.num_kv_heads,
            f"a divisor of model.num_heads = {self.num_heads}",
            "Query heads share kv heads in equal groups.",
        )
        require(
            self.head_width % 2 == 0,
            "model.head_width",
            self.head_width,
            "an even number",
            "Rotary positions turn pairs.",
        )
        self._check_positions()
        self._check_experts()
        self._check_adapters()

    def _check_positions(self) -> None:
        require_range("model.rope_theta", self.rope_theta, 1)
        require_range("model.sliding_window", self.sliding_window, 0)
        require_range("model.sliding_period", self.sliding_period, 0)
        require(
            (self.sliding_window > 0) == (self.sliding_period > 1),
            "model.sliding_period",
            self.sliding_period,
            "2 or more with a model.sliding_window, else 0",
            "Set both or neither.",
        )
        require(
            self.sliding_window > 0 or self.local_rope_theta == 0,
            "model.local_rope_theta",
            self.local_rope_theta,
            "0 without model.sliding_window",
            "There are no local layers.",
        )
        require(
            (self.rope_scaling == "none") == (self.rope_factor == 1.0),
            "model.rope_factor",
            self.rope_factor,
            "1 with model.rope_scaling = none, another factor otherwise",
            "Name the scaling and its factor together.",
        )
        require_range("model.rope_factor", self.rope_factor, 1)
        if self.rope_scaling == "llama3":
            require_range("model.rope_low_frequency_factor", self.rope_low_frequency_factor, 1e-6)
            require(
                self.rope_high_frequency_factor > self.rope_low_frequency_factor,
                "model.rope_high_frequency_factor",
                self.rope_high_frequency_factor,
                f"above model.rope_low_frequency_factor = {self.rope_low_frequency_factor}",
                "Frequencies between the two are interpolated.",
            )
            require_range("model.rope_original_tokens", self.rope_original_tokens, 1)

    def _check_experts(self) -> None:
        require_range("model.num_experts", self.num_experts, 0)
        low, high = (1, self.num_experts) if self.num_experts else (0, 0)
        require_range("model.experts_per_token", self.experts_per_token, low, high)
        require(
            not (self.num_experts and self.lora_rank and set(self.lora_targets) & {"gate", "up", "down"}),
            "model.lora_targets",
            self.lora_targets,
            "query, key, value, output with model.num_experts",
            "Experts have no adapters.",
        )

    def _check_adapters(self) -> None:
        require_range("model.lora_rank", self.lora_rank, 0, 1024)
        require_range("model.lora_alpha", self.lora_alpha, 1e-6)
        for name in self.lora_targets:
            require(
                name in LORA_TARGETS,
                "model.lora_targets",
                self.lora_targets,
                ", ".join(LORA_TARGETS),
                "Name weights that a layer has.",
            )
        require(
            not self.lora_rank or bool(self.lora_targets),
            "model.lora_targets",
            self.lora_targets,
            "at least one weight with model.lora_rank",
            "Without adapters nothing is trained.",
        )

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by."""
        return float((self.query_scale_width or self.head_width) ** -0.5)

    @property
    def lora_scale(self) -> float:
        """What adapters are multiplied by; 0 without adapters."""
        return self.lora_alpha / self.lora_rank if self.lora_rank else 0.0

    def base(self) -> ModelConfig:
        """The same model without adapters."""
        return dataclasses.replace(self, lora_rank=0)

    def is_local(self, layer: int) -> bool:
        """Whether layer `layer` attends to its sliding window only."""
        return bool(self.sliding_period) and (layer + 1) % self.sliding_period != 0
