"""How the peers lay a batch out. NumPy only, so that our tests can run what their environments import."""

from __future__ import annotations

import numpy as np

Arrays = dict[str, np.ndarray]


def sorted_microbatches(lengths: np.ndarray, max_tokens: int) -> list[list[int]]:
    """Rows sorted by length, as many to a micro-batch as `max_tokens` padded tokens take; at least one."""
    batches: list[list[int]] = [[]]
    for i in np.argsort(-lengths, kind="stable").tolist():
        rows = batches[-1]
        if rows and (len(rows) + 1) * lengths[rows[0]] > max_tokens:
            batches.append([i])
        else:
            rows.append(i)
    return batches


def batch_padded_microbatches(num: int, rows: int) -> list[list[int]]:
    """Rows in the order of arrival, so many to a micro-batch: how TRL's GRPO trainer splits a generation batch that it
    has padded to its longest (`_prepare_inputs`: pad, shuffle, `split_tensor_dict`)."""
    return [list(range(start, min(start + rows, num))) for start in range(0, num, rows)]


def even_rows(num: int, length: int, max_tokens: int) -> int:
    """The largest divisor of `num` whose rows of `length` stay within `max_tokens`; 1 where none does."""
    return max(rows for rows in range(1, num + 1) if num % rows == 0 and (rows == 1 or rows * length <= max_tokens))


def prompts_and_completions(work: Arrays, pad: int) -> Arrays:
    """Prompts `[N, P]` padded on the left, completions `[N, C]` on the right, each to the longest of its kind.

    The prompt is what comes before the first policy token, and at least one token.
    """
    lengths, mask = work["trajectory.lengths"], work["trajectory.loss_mask"]
    offsets = np.cumsum(lengths) - lengths
    prompts = np.array([max(1, int(mask[o : o + n].argmax())) for o, n in zip(offsets, lengths, strict=True)])
    num, longest_prompt, longest = len(lengths), prompts.max(), (lengths - prompts).max()
    out = {
        "prompt_ids": np.full((num, longest_prompt), pad, np.int32),
        "completion_ids": np.full((num, longest), pad, np.int32),
        "completion_mask": np.zeros((num, longest), bool),
        "old_per_token_logps": np.zeros((num, longest), np.float32),
        "advantages": work["trajectory.advantages"],
    }
    sources = {
        "completion_ids": "tokens",
        "completion_mask": "loss_mask",
        "old_per_token_logps": "behavior_logprobs",
    }
    for row, (o, n, p) in enumerate(zip(offsets, lengths, prompts, strict=True)):
        out["prompt_ids"][row, longest_prompt - p :] = work["trajectory.tokens"][o : o + p]
        for name, source in sources.items():
            out[name][row, : n - p] = work[f"trajectory.{source}"][o + p : o + n]
    out["prompt_mask"] = out["prompt_ids"] != pad
    return out
