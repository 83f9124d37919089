"""Answers as vLLM 0.32.0 gave them (recorded), and as SGLang 0.5.23's source builds them."""

import copy
from typing import Any

import pytest

from tunix_core.actor.openai_dialects import DIALECTS, Generation, MalformedAnswer, Sampling, checked

VLLM = {
    "id": "cmpl-97e52da1714b0e35",
    "object": "text_completion",
    "model": "policy",
    "choices": [
        {
            "index": 0,
            "text": "",
            "logprobs": {
                "text_offset": [0, 11],
                "token_logprobs": [-0.6843640208244324, -2.1558775901794434],
                "tokens": ["token_id:11", "token_id:217"],
                "top_logprobs": [{"token_id:11": -0.6843640208244324}, {"token_id:217": -2.1558775901794434}],
            },
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": [11, 217],
            "prompt_logprobs": None,
            "prompt_token_ids": [256, 65, 66, 67, 257],
        }
    ],
    "system_fingerprint": "vllm-0.32.0-cc45a5e1",
}
VLLM_PROBE = {
    "choices": [
        {
            "index": 0,
            "text": "",
            "logprobs": {
                "token_logprobs": [-1.2540483474731445],
                "tokens": ["token_id:11"],
                "top_logprobs": [{"token_id:11": -1.2540483474731445, "token_id:104": -2.1092844009399414}],
            },
            "finish_reason": "length",
            "token_ids": [11],
            "prompt_logprobs": [
                None,
                {"65": {"logprob": -9.280627250671387, "rank": 185, "decoded_token": None}},
                {"66": {"logprob": -6.4443583488464355, "rank": 83, "decoded_token": None}},
            ],
            "prompt_token_ids": [256, 65, 66],
        }
    ]
}
SGLANG = {
    "text": "",
    "output_ids": [11, 217],
    "meta_info": {
        "id": "1",
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": "3-abc",
        "output_token_logprobs": [[-0.5, 11, None], [-2.0, 217, None]],
        "input_token_logprobs": [[None, 256, None], [-9.25, 65, None]],
        "output_top_logprobs": [[[-0.5, 11, None], [-1.5, 12, None]]],
    },
}
HOW = Sampling(max_tokens=2, temperature=0.7, seed=7, stop_ids=(257,))


def test_ids_and_log_probabilities_are_read_as_they_were_drawn() -> None:
    found = DIALECTS["vllm"].generation(VLLM)
    assert found == Generation([11, 217], [-0.6843640208244324, -2.1558775901794434], False, None)
    assert DIALECTS["sglang"].generation(SGLANG) == Generation([11, 217], [-0.5, -2.0], True, "3-abc")


def test_probes_tell_the_prompt_and_the_likeliest_tokens() -> None:
    found = DIALECTS["vllm"].probed(VLLM_PROBE)
    assert found.prompt == [-9.280627250671387, -6.4443583488464355]
    assert found.top == {11: -1.2540483474731445, 104: -2.1092844009399414}
    found = DIALECTS["sglang"].probed(SGLANG)
    assert found == ([-9.25], {11: -0.5, 12: -1.5})


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_requests_carry_ids_and_leave_the_distribution_whole(name: str) -> None:
    body: Any = DIALECTS[name].generate("policy", [256, 65], HOW).body
    how = body if name == "vllm" else body["sampling_params"]
    assert body["prompt" if name == "vllm" else "input_ids"] == [256, 65]
    assert how["stop_token_ids"] == [257]
    assert how["ignore_eos"] is True
    assert (how["temperature"], how["top_p"], how["min_p"], how["repetition_penalty"]) == (0.7, 1.0, 0.0, 1.0)
    assert how["top_k"] == (0 if name == "vllm" else -1)
    assert how["seed" if name == "vllm" else "sampling_seed"] == 7


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("token_ids"),
        lambda c: c.update(logprobs=None),
        lambda c: c["logprobs"]["token_logprobs"].pop(),
        lambda c: c["logprobs"]["token_logprobs"].__setitem__(0, None),
        lambda c: c["logprobs"]["token_logprobs"].__setitem__(0, float("nan")),
        lambda c: c["logprobs"]["token_logprobs"].__setitem__(0, 0.5),
        lambda c: c["token_ids"].__setitem__(0, 272),
        lambda c: c["token_ids"].__setitem__(0, -1),
        lambda c: c["token_ids"].__setitem__(0, "11"),
        lambda c: c["token_ids"].__setitem__(0, True),
        lambda c: c["token_ids"].__setitem__(0, 257),
        lambda c: (c["token_ids"].append(5), c["logprobs"]["token_logprobs"].append(-1.0)),
        lambda c: (c["token_ids"].clear(), c["logprobs"]["token_logprobs"].clear()),
    ],
)
def test_an_answer_that_is_no_message_is_refused_whole(change) -> None:
    dialect, answer = DIALECTS["vllm"], copy.deepcopy(VLLM)
    checked(dialect.generation(answer), HOW, 272)
    change(answer["choices"][0])
    with pytest.raises(MalformedAnswer):
        checked(dialect.generation(answer), HOW, 272)


def test_an_abort_before_the_first_token_is_an_empty_message() -> None:
    answer: Any = copy.deepcopy(VLLM)
    answer["choices"][0] |= {"token_ids": [], "logprobs": None, "finish_reason": "abort"}
    assert checked(DIALECTS["vllm"].generation(answer), HOW, 272) == Generation([], [], True, None)


def test_ids_that_disagree_with_their_log_probabilities_are_refused() -> None:
    answer: Any = copy.deepcopy(SGLANG)
    answer["output_ids"][1] = 218
    with pytest.raises(MalformedAnswer, match="differ"):
        DIALECTS["sglang"].generation(answer)
