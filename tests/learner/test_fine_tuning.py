"""Training from files: tokens and masks of examples, batches, and the two objectives in any packing."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.learner import step_cases
from tests.learner.step_cases import MAX_TOKENS, MODEL, WINDOW_TOKENS, Sequences, make_config, make_parameters
from tests.pretrained.support import TEMPLATE, chat_files
from tunix_core.config import FineTuneConfig, PreferencesConfig, RunConfig
from tunix_core.data.conversations import Conversation, Message, Preference
from tunix_core.data.packing import PackedArrays, best_fit
from tunix_core.distributed.compilation import QUICK_ON_CPU
from tunix_core.environments.demonstrations import Demonstration
from tunix_core.errors import ConfigError, DataError
from tunix_core.learner.examples import (
    Example,
    conversation_example,
    lengths_of,
    num_tokens,
    pack_examples,
    preference_example,
)
from tunix_core.learner.fine_tuning import preference_optimization, schedule, split, supervised_fine_tuning
from tunix_core.learner.objectives import Batch, Objective
from tunix_core.models import decoder
from tunix_core.pretrained.chat import ChatTokenizer
from tunix_core.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
CHAT = ChatTokenizer(chat_files(), 300)

# ---- tokens ---------------------------------------------------------------------------------------


def conversation(*texts: str, system: str | None = None, roles: str = "uatau") -> Conversation:
    names = {"u": "user", "a": "assistant", "t": "tool"}
    messages = tuple(Message(names[role], text) for role, text in zip(roles, texts, strict=False))
    return Conversation(system, messages, "chats.jsonl:3")


def learned(example: Example) -> list[str]:
    """Runs of policy tokens, as text."""
    (segment,) = example
    ends = np.flatnonzero(np.diff(np.r_[0, segment.loss_mask, 0]))
    pairs = zip(ends[::2].tolist(), ends[1::2].tolist(), strict=True)
    return [CHAT.decode(segment.tokens[first:last]) for first, last in pairs]


@pytest.mark.parametrize("system", [None, "Be short."])
def test_a_conversation_is_what_the_template_renders_and_the_assistant_is_learned(system: str | None) -> None:
    import jinja2

    told = conversation("2+2?", "calc", "4", "It is <|im_end|> 4.", system=system)
    example = conversation_example(CHAT, told)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages += [{"role": m.role.replace("tool", "user"), "content": m.text} for m in told.messages]
    assert CHAT.decode(example[0].tokens) + "\n" == jinja2.Template(TEMPLATE).render(messages=messages)
    assert learned(example) == ["calc<|im_end|>", "It is <|im_end|> 4.<|im_end|>"]


def test_a_system_message_is_never_left_out_silently() -> None:
    assert conversation_example(BYTES, conversation("a", "b", system=""))[0].tokens.size
    with pytest.raises(DataError, match=r"chats\.jsonl:3: received a system message"):
        conversation_example(BYTES, conversation("a", "b", system="Be short."))
    needs_one = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('who am I?') }}{% endif %}" + TEMPLATE
    with pytest.raises(DataError, match=r"chats\.jsonl:3: chat template: received no system message"):
        conversation_example(ChatTokenizer(chat_files(needs_one), 300), conversation("a", "b"))


def test_of_a_pair_only_the_answers_are_learned() -> None:
    prompt = conversation("2+2?", "calc", "4", roles="uat")
    pair = preference_example(CHAT, Preference(prompt, "four", ""))
    assert [learned((segment,)) for segment in pair] == [["four<|im_end|>"], ["<|im_end|>"]]
    prompts = [segment.tokens[~segment.loss_mask].tolist() for segment in pair]
    assert prompts[0] == prompts[1]


# ---- batches --------------------------------------------------------------------------------------


def test_an_epoch_has_each_example_once_and_epochs_differ() -> None:
    options = FineTuneConfig(num_epochs=2, examples_per_step=4)
    plan = schedule(10, options, seed=3)
    assert [(step.epoch, len(step.examples)) for step in plan] == [(0, 4), (0, 4), (0, 2), (1, 4), (1, 4), (1, 2)]
    orders = [np.concatenate([step.examples for step in plan if step.epoch == epoch]).tolist() for epoch in (0, 1)]
    assert [sorted(order) for order in orders] == [list(range(10))] * 2
    assert orders[0] != orders[1]
    again = schedule(10, dataclasses.replace(options, num_steps=4), seed=3)
    assert [step.examples.tolist() for step in again] == [step.examples.tolist() for step in plan[:4]]
    assert schedule(10, options, seed=4)[0].examples.tolist() != plan[0].examples.tolist()


def segment(length: int, fill: int = 1) -> Demonstration:
    return Demonstration(np.full(length, fill, np.int32), np.arange(length) > 0)


def test_the_held_out_share_is_apart_and_overlong_examples_are_counted() -> None:
    config = dataclasses.replace(make_config(), fine_tune=FineTuneConfig(held_out_fraction=0.25))
    examples = [(segment(2, fill=i),) for i in range(9)] + [(segment(WINDOW_TOKENS + 1),), (segment(WINDOW_TOKENS, 9),)]
    found = split(examples, config)
    assert found.num_overlong == 1
    assert len(found.held_out) == 3, "a quarter of ten, rounded up"
    assert sorted(int(e[0].tokens[0]) for e in found.train + found.held_out) == list(range(10))
    fills = [
        [int(e[0].tokens[0]) for e in split(examples, dataclasses.replace(config, seed=s)).held_out] for s in (0, 0, 1)
    ]
    assert fills[0] == fills[1] != fills[2]
    pair = (segment(WINDOW_TOKENS // 2), segment(WINDOW_TOKENS // 2 + 1))
    assert split([pair, *[(segment(2),)] * 3], config).num_overlong == 1, "a pair must fit as a whole"


@pytest.mark.parametrize("examples", [[], [(segment(2),)], [(segment(WINDOW_TOKENS + 1),)] * 5])
def test_nothing_to_train_on_is_refused(examples: list[Example]) -> None:
    with pytest.raises(ConfigError, match=r"--data: received .* examples, .* of which fit a window of 24 tokens"):
        split(examples, make_config())


# ---- objectives -----------------------------------------------------------------------------------


def random_examples(num: int, segments: int, seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)

    def one() -> Demonstration:
        length = int(rng.integers(3, 1 + MAX_TOKENS // segments))
        mask = rng.random(length) < 0.5
        mask[0], mask[-1] = False, True
        return Demonstration(rng.integers(0, MODEL.vocab_size, length).astype(np.int32), mask)

    return [tuple(one() for _ in range(segments)) for _ in range(num)]


def pack(examples: list[Example]) -> PackedArrays:
    return pack_examples(examples, best_fit(lengths_of(examples), WINDOW_TOKENS).num_windows, WINDOW_TOKENS)


def answer_logprobs(seed: int, examples: list[Example]) -> np.ndarray:
    """float64 [N, segments], each segment alone in its row."""
    flat = [s for example in examples for s in example]
    tokens, mask = np.zeros((2, len(flat), MAX_TOKENS), np.int32)
    for row, s in enumerate(flat):
        tokens[row, : len(s.tokens)], mask[row, : len(s.tokens)] = s.tokens, s.loss_mask
    ones = np.ones(len(flat), np.float32)
    lengths = np.array([len(s.tokens) for s in flat])
    alone = Sequences(lengths, tokens, mask > 0, 0 * tokens, ones, ones, ones > 2)
    return (step_cases.logprobs(make_parameters(seed), alone) * mask).sum(axis=1).reshape(len(examples), -1)


OPTIONS = PreferencesConfig(beta=0.3, label_smoothing=0.1)
CONFIG = dataclasses.replace(make_config(), preferences=OPTIONS)


@functools.cache
def differentiated(objective: Objective):
    return jax.jit(jax.value_and_grad(objective, has_aux=True), compiler_options=QUICK_ON_CPU)


DPO, SFT = preference_optimization(CONFIG), supervised_fine_tuning(CONFIG)


def evaluate(method, arrays: PackedArrays, denominator: float, params: int = 1, reference: int = 2):
    (loss, sums), gradient = differentiated(method.objective)(
        make_parameters(params), make_parameters(reference), Batch(*arrays), jnp.float32(denominator)
    )
    return float(loss), {k: float(v) for k, v in sums.items()}, decoder.flatten_parameters(gradient)


def windows(arrays: PackedArrays, first: int, last: int) -> PackedArrays:
    return jax.tree.map(lambda array: array[first:last], arrays)


def test_dpo_of_packed_pairs_is_the_loop_over_pairs() -> None:
    pairs = random_examples(7, segments=2)
    arrays = pack(pairs)
    assert DPO.denominator(arrays) == 7
    assert len(arrays.tokens) < 7, "some share a window"
    policy, reference = answer_logprobs(1, pairs), answer_logprobs(2, pairs)
    margins = OPTIONS.beta * ((policy - reference) @ [1.0, -1.0])
    losses = [0.9 * math.log1p(math.exp(-m)) + 0.1 * math.log1p(math.exp(m)) for m in margins.tolist()]
    loss, sums, _ = evaluate(DPO, arrays, 7)
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert sums["pairs"] == 7
    assert sums["pair_margin"] == pytest.approx(margins.sum(), rel=1e-4)
    assert sums["pair_accuracy"] == (margins > 0).sum()
    assert 0 < sums["pair_accuracy"] < 7
    assert sums["pair_chosen_logprob"] == pytest.approx(policy[:, 0].sum(), rel=1e-5)
    assert sums["pair_rejected_logprob"] == pytest.approx(policy[:, 1].sum(), rel=1e-5)


@pytest.mark.parametrize(("method", "segments"), [(SFT, 1), (DPO, 2)])
def test_any_packing_and_any_microbatches_give_the_same_gradient(method, segments: int) -> None:
    examples = random_examples(6, segments, seed=5)
    arrays = pack(examples)
    count = method.denominator(arrays)
    loss, _, gradient = evaluate(method, arrays, count)
    apart = [pack_examples([example], 1, WINDOW_TOKENS) for example in examples]
    assert sum(method.denominator(part) for part in apart) == count
    cut = [windows(arrays, i, i + 1) for i in range(len(arrays.tokens))]
    assert 1 < len(cut) < len(apart)
    for parts in (apart, cut):
        results = [evaluate(method, part, count) for part in parts]
        assert sum(result[0] for result in results) == pytest.approx(loss, rel=1e-5)
        for name, leaf in gradient.items():
            total = sum(result[2][name] for result in results)
            np.testing.assert_allclose(total, leaf, atol=1e-4 * np.abs(leaf).max(), err_msg=name)


def test_at_the_start_dpo_is_log_2_and_its_step_raises_the_chosen_answer() -> None:
    pairs = random_examples(5, segments=2, seed=1)
    arrays = pack(pairs)
    plain = preference_optimization(dataclasses.replace(CONFIG, preferences=PreferencesConfig(beta=0.3)))
    loss, sums, gradient = evaluate(plain, arrays, 5, params=2, reference=2)
    assert loss == pytest.approx(math.log(2), rel=1e-6)
    assert sums["pair_margin"] == pytest.approx(0, abs=1e-4)

    def margin(params: decoder.Params) -> jax.Array:
        return plain.objective(params, make_parameters(2), Batch(*arrays), jnp.float32(5))[1]["pair_margin"]

    start = decoder.flatten_parameters(make_parameters(2))
    moved = {name: leaf - 1e-2 * gradient[name] for name, leaf in start.items()}
    after = jax.jit(margin, compiler_options=QUICK_ON_CPU)(decoder.unflatten_parameters(MODEL, moved))
    assert float(after) > 1e-3


def test_pairs_lie_side_by_side() -> None:
    pairs = random_examples(9, segments=2, seed=2)
    arrays = pack(pairs)
    found = 0
    for window, ids in enumerate(arrays.segment_ids):
        for chosen in range(1, ids.max() + 1, 2):
            columns = np.flatnonzero((ids == chosen) | (ids == chosen + 1))
            both = arrays.tokens[window, columns].tolist()
            assert np.all(np.diff(columns) == 1)
            assert any(both == np.concatenate([s.tokens for s in pair]).tolist() for pair in pairs)
            assert arrays.positions[window, columns[0]] == 0
            found += 1
    assert found == 9
    assert max(num_tokens(pair) for pair in pairs) <= WINDOW_TOKENS


def test_a_smoothing_of_a_half_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"preferences\.label_smoothing"):
        PreferencesConfig(label_smoothing=0.5)
    with pytest.raises(ConfigError, match=r"reference_uri: received '', accepted a policy folder with start_uri"):
        RunConfig(recipe="x", start_uri="runs/a/policies/00000007")
    RunConfig(recipe="x", start_uri="runs/a/policies/00000000")
