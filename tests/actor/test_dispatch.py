from __future__ import annotations

import dataclasses

import pytest

from tests.actor.support import ACTOR, MODEL
from tunix_core.actor.dispatch import engine_sizes, executables
from tunix_core.tokenizer import ByteTokenizer


@pytest.mark.parametrize("num_slots", [1, 8])
def test_no_dispatch_copies_the_cache(num_slots: int) -> None:
    """Whatever its rows are: a cache is as large as memory allows, and a dispatch touches a few rows of it."""
    actor = dataclasses.replace(ACTOR, num_slots=num_slots, decode_rows=2, prefill_rows=4, context_sizes=2)
    sizes = engine_sizes(actor, (ByteTokenizer.END_OF_TURN,))
    compiled = executables(MODEL, sizes, "temperature")
    kv_heads, width, context = MODEL.num_kv_heads, MODEL.head_width, sizes.contexts[-1]
    whole = (
        f"f32[{num_slots},{kv_heads},{width},{context}]",
        f"f32[{num_slots},{kv_heads},{context},{width}]",
    )
    for executable in [*compiled.extend.values(), *compiled.decode.values(), *compiled.copy.values()]:
        text = executable.as_text()
        assert whole[0] in text
        copies = [line for line in text.splitlines() if " copy(" in line and line.split(" = ")[-1].startswith(whole)]
        assert not copies
