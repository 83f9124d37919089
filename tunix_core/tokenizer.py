"""Bytes and three marks: the tokenizer of the small policies that train on a CPU.

Nothing that a policy sampled is ever decoded and encoded again: text goes to environments and to
people, ids go to the learner.
"""

from __future__ import annotations

from collections.abc import Iterable


class ByteTokenizer:
    """Ids 0 to 255 are bytes of UTF-8; three marks follow; the rest of the vocabulary is unused."""

    BOS = 256
    END_OF_TURN = 257
    PAD = 258
    vocab_size = 272

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of `text`; never a mark, so no text from outside can forge one."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`.

        Marks and unused ids come out as visible names such as `<pad>`: a policy that samples one
        inside a tool call has not written that call.
        """
        pieces: list[str] = []
        run = bytearray()
        for token in ids:
            if 0 <= token < 256:
                run.append(token)
                continue
            pieces.append(run.decode("utf-8", errors="replace"))
            run.clear()
            pieces.append(_MARKS.get(int(token), f"<unused-{int(token)}>"))
        pieces.append(run.decode("utf-8", errors="replace"))
        return "".join(pieces)


_MARKS = {ByteTokenizer.BOS: "<bos>", ByteTokenizer.END_OF_TURN: "<end>", ByteTokenizer.PAD: "<pad>"}
