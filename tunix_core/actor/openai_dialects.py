"""What goes over the wire to vLLM and to SGLang: token ids and log probabilities, never text.

Checked against the sources of vLLM 0.32.0 and SGLang 0.5.23; the paths in the docstrings are theirs.
Both servers draw from the whole distribution here: whatever a model's `generation_config.json` says of
top-k, top-p or penalties is overridden in each request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

NUM_TOP = 5
"""Most likely tokens that a probe asks for; servers allow 20 unless told otherwise."""


class MalformedAnswer(Exception):
    """An answer that is not what the API promises; nothing of it is used."""


class Call(NamedTuple):
    """One request."""

    method: Literal["GET", "POST"]
    path: str
    body: Mapping[str, Any] | None = None


class Sampling(NamedTuple):
    """How a message is drawn."""

    max_tokens: int
    temperature: float
    seed: int
    stop_ids: tuple[int, ...]
    """Each ends the message, as its last token."""


class Generation(NamedTuple):
    """What a server drew, N tokens."""

    tokens: list[int]
    logprobs: list[float]
    aborted: bool
    """The server gave up half way, as it was told to; the tokens are drawn as any."""
    version: str | None
    """The weight version as the answer states it; None where the API does not."""


class Probe(NamedTuple):
    """What a server makes of a fixed prompt of N tokens."""

    prompt: list[float]
    """Log probabilities of all but its first token."""
    top: dict[int, float]
    """Of the most likely next tokens."""


class Dialect(Protocol):
    """Builds requests and reads answers; talks to nobody."""

    echoes_version: bool
    """Whether each answer states the version that drew it."""
    has_names: bool
    """Whether a request names the model. SGLang has one, which it calls by the folder that it loaded last."""
    dev_mode_hint: str
    """What a server without the control endpoints was started without."""

    def generate(self, model: str, ids: Sequence[int], how: Sampling) -> Call: ...

    def generation(self, answer: Any) -> Generation:
        """Raises MalformedAnswer."""
        ...

    def probe(self, model: str, ids: Sequence[int], temperature: float) -> Call: ...

    def probed(self, answer: Any) -> Probe:
        """Raises MalformedAnswer."""
        ...

    def version(self) -> Call: ...

    def pause(self) -> Call:
        """Abort what is under way, and start nothing."""
        ...

    def resume(self) -> Call: ...

    def load(self, folder: str) -> list[Call]:
        """Take the weights of a Hugging Face folder, and forget what was cached of the old ones."""
        ...

    def set_version(self, version: str) -> Call: ...


class VllmDialect:
    """vLLM: `/v1/completions` with ids as the prompt.

    `vllm/entrypoints/openai/completion/protocol.py`: `return_token_ids` puts `token_ids` (the stop token included) into the
    choice, `logprobs.token_logprobs` lies beside it, `return_tokens_as_token_ids` names tokens `token_id:<id>`.
    Log probabilities are those of the temperature only with `--logprobs-mode processed_logprobs`
    (`vllm/v1/sample/sampler.py`); raw ones are the default. `vllm/entrypoints/rl/online/api_router.py` has `/pause`, `/resume`,
    `/weight_info` and `/update_weight_version`, `serve/dev/rpc/api_router.py` `/collective_rpc`, whose `reload_weights` takes `weights_path`;
    all of them want `VLLM_SERVER_DEV_MODE=1`. No answer of `/v1/completions` states the version, so it is asked for.
    """

    echoes_version = False
    has_names = True
    dev_mode_hint = "Start it with VLLM_SERVER_DEV_MODE=1: its weights are changed through /collective_rpc."

    def generate(self, model: str, ids: Sequence[int], how: Sampling) -> Call:
        return Call("POST", "/v1/completions", self._body(model, ids, how, logprobs=0))

    def _body(self, model: str, ids: Sequence[int], how: Sampling, **fields: Any) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": list(ids),
            "max_tokens": how.max_tokens,
            "temperature": how.temperature,
            "seed": how.seed,
            "stop_token_ids": list(how.stop_ids),
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            **fields,
        }

    def generation(self, answer: Any) -> Generation:
        choice = _only(answer, "choices")
        tokens = _entry(choice, "token_ids", list)
        # Aborted before the first token there is no table of log probabilities.
        logprobs = _entry(_entry(choice, "logprobs", dict), "token_logprobs", list) if tokens else []
        return Generation(tokens, logprobs, choice.get("finish_reason") == "abort", None)

    def probe(self, model: str, ids: Sequence[int], temperature: float) -> Call:
        how = Sampling(max_tokens=1, temperature=temperature, seed=0, stop_ids=())
        return Call("POST", "/v1/completions", self._body(model, ids, how, logprobs=NUM_TOP, prompt_logprobs=0))

    def probed(self, answer: Any) -> Probe:
        choice = _only(answer, "choices")
        prompt = []
        for token, entry in zip(
            _entry(choice, "prompt_token_ids", list)[1:], _entry(choice, "prompt_logprobs", list)[1:], strict=False
        ):
            prompt.append(_number(_entry(_entry(entry, str(token), dict), "logprob", float)))
        (first,) = _entry(_entry(choice, "logprobs", dict), "top_logprobs", list)[:1] or [None]
        if not isinstance(first, dict):
            raise MalformedAnswer("no top_logprobs")
        return Probe(prompt, {_named(name): _number(value) for name, value in first.items()})

    def version(self) -> Call:
        return Call("GET", "/weight_info")

    def pause(self) -> Call:
        return Call("POST", "/pause?mode=abort")

    def resume(self) -> Call:
        return Call("POST", "/resume")

    def load(self, folder: str) -> list[Call]:
        return [
            Call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
            Call("POST", "/reset_prefix_cache"),
        ]

    def set_version(self, version: str) -> Call:
        return Call("POST", "/update_weight_version", {"new_version": version})


class SglangDialect:
    """SGLang: its native `/generate` with `input_ids`.

    `python/sglang/srt/managers/io_struct.py` (GenerateReqInput, UpdateWeightFromDiskReqInput, PauseGenerationReqInput) and
    `tokenizer_manager.py`: `meta_info.output_token_logprobs` holds `[logprob, id, text]` of every token, the stop token included, beside
    `output_ids`; `meta_info.weight_version` is that of the moment of the answer. Log probabilities are those after the temperature
    (`layers/sampler.py`), unless the server runs with `SGLANG_RETURN_ORIGINAL_LOGPROB=1`. `sampling_seed` acts only with
    `--enable-deterministic-inference`. `/update_weights_from_disk` answers `success` and flushes the cache.
    """

    echoes_version = True
    has_names = False
    dev_mode_hint = "Take a release with /model_info (0.5.23 is tested)."

    def generate(self, model: str, ids: Sequence[int], how: Sampling) -> Call:
        del model  # a server has one
        return Call("POST", "/generate", self._body(ids, how))

    def _body(self, ids: Sequence[int], how: Sampling, **fields: Any) -> dict[str, Any]:
        return {
            "input_ids": list(ids),
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": how.max_tokens,
                "temperature": how.temperature,
                "sampling_seed": how.seed,
                "stop_token_ids": list(how.stop_ids),
                "ignore_eos": True,
                "no_stop_trim": True,
                "skip_special_tokens": False,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
            },
            **fields,
        }

    def generation(self, answer: Any) -> Generation:
        meta = _entry(answer, "meta_info", dict)
        drawn = _entry(answer, "output_ids", list)
        entries = [_triple(entry) for entry in (_entry(meta, "output_token_logprobs", list) if drawn else [])]
        tokens = [token for _, token in entries]
        if drawn != tokens:
            raise MalformedAnswer("output_ids differ from the ids of output_token_logprobs")
        reason = meta.get("finish_reason")
        aborted = isinstance(reason, dict) and reason.get("type") == "abort"
        return Generation(tokens, [logprob for logprob, _ in entries], aborted, _entry(meta, "weight_version", str))

    def probe(self, model: str, ids: Sequence[int], temperature: float) -> Call:
        del model
        how = Sampling(max_tokens=1, temperature=temperature, seed=0, stop_ids=())
        return Call("POST", "/generate", self._body(ids, how, logprob_start_len=0, top_logprobs_num=NUM_TOP))

    def probed(self, answer: Any) -> Probe:
        meta = _entry(answer, "meta_info", dict)
        prompt = [_triple(entry) for entry in _entry(meta, "input_token_logprobs", list)[1:]]
        (first,) = _entry(meta, "output_top_logprobs", list)[:1] or [None]
        if not isinstance(first, list):
            raise MalformedAnswer("no output_top_logprobs")
        top = [_triple(entry) for entry in first]
        return Probe([_number(value) for value, _ in prompt], {token: _number(value) for value, token in top})

    def version(self) -> Call:
        return Call("GET", "/model_info")

    def pause(self) -> Call:
        return Call("POST", "/pause_generation", {"mode": "abort"})

    def resume(self) -> Call:
        return Call("POST", "/continue_generation", {})

    def load(self, folder: str) -> list[Call]:
        return [Call("POST", "/update_weights_from_disk", {"model_path": folder, "flush_cache": True})]

    def set_version(self, version: str) -> Call:
        return Call("POST", "/update_weight_version", {"new_version": version, "abort_all_requests": False})


DIALECTS: Mapping[str, Dialect] = {"vllm": VllmDialect(), "sglang": SglangDialect()}


def checked(generation: Generation, how: Sampling, vocab_size: int) -> Generation:
    """The same, with values that can be of the message that was asked for.

    Raises:
        MalformedAnswer: unequal lengths, too many or no tokens, one out of the vocabulary or behind the end of the turn,
            a log probability that is none.
    """
    tokens, logprobs = generation.tokens, generation.logprobs
    if len(tokens) != len(logprobs):
        raise MalformedAnswer(f"{len(tokens)} ids and {len(logprobs)} log probabilities")
    if len(tokens) > how.max_tokens or not (tokens or generation.aborted):
        raise MalformedAnswer(f"{len(tokens)} tokens, accepted 1 to {how.max_tokens}")
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise MalformedAnswer(f"token {token!r}, accepted 0 to {vocab_size - 1}")
    if set(how.stop_ids) & set(tokens[:-1]):
        raise MalformedAnswer("tokens behind a stop id")
    for logprob in logprobs:
        if _number(logprob) > 1e-3:
            raise MalformedAnswer(f"log probability {logprob!r}, accepted none above 0")
    return generation._replace(logprobs=[min(0.0, float(logprob)) for logprob in logprobs])


def weight_version(answer: Any) -> str:
    """What a server calls its weights. Raises MalformedAnswer."""
    return str(_entry(answer, "weight_version", str))


def succeeded(answer: Any) -> bool:
    """Whether a control call did what it was asked: both servers may say `success: false`."""
    return not isinstance(answer, dict) or answer.get("success", True) is True


def _entry(value: Any, name: str, kind: type) -> Any:
    found = value.get(name) if isinstance(value, dict) else None
    if kind is float and isinstance(found, int) and not isinstance(found, bool):
        return float(found)
    if not isinstance(found, kind):
        raise MalformedAnswer(f"{name}: received {type(found).__name__}, accepted {kind.__name__}")
    return found


def _only(value: Any, name: str) -> dict[str, Any]:
    entries = _entry(value, name, list)
    if len(entries) != 1 or not isinstance(entries[0], dict):
        raise MalformedAnswer(f"{name}: accepted one")
    return entries[0]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise MalformedAnswer(f"log probability {value!r}, accepted a finite number")
    return float(value)


def _triple(entry: Any) -> tuple[Any, int]:
    """`[logprob, id, text]`."""
    if not isinstance(entry, list) or len(entry) < 2:
        raise MalformedAnswer("an entry of log probabilities that is no [logprob, id, text]")
    return entry[0], entry[1]


def _named(name: str) -> int:
    prefix, _, number = name.partition(":")
    if prefix != "token_id" or not number.isdecimal():
        raise MalformedAnswer(f"token {name[:40]!r}, accepted token_id:<id>")
    return int(number)
