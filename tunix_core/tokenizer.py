"""What turns text into ids and frames a conversation; and the tokenizer of the small CPU policies.

Nothing that a policy sampled is ever decoded and encoded again: text goes to environments and to
people, ids go to the learner.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Tokenizer(Protocol):
    """Text, ids, and the marks around the turns of a conversation.

    A sequence is `opening`, then policy messages, each ended by `end_of_turn`, with a `reply` between
    two of them. Text from outside never becomes a mark, whatever it says.
    """

    vocab_size: int
    end_of_turn: int
    """The id with which the policy ends its message."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none of them a mark."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, marks by visible names."""

    def opening(self, instructions: str | None, question: str) -> list[int]:
        """The start of a sequence up to where the policy speaks; None: as the tokenizer starts one without instructions."""

    def reply(self, text: str) -> list[int]:
        """What follows the policy's `end_of_turn`: the environment's answer, up to where the policy speaks again."""


class ByteTokenizer:
    """Ids 0 to 255 are bytes of UTF-8; three marks follow; the rest of the vocabulary is unused.

        [BOS] question END_OF_TURN   policy message END_OF_TURN   reply END_OF_TURN   …

    Instructions are left out: policies this small learn the form of a message from demonstrations.
    """

    BOS = 256
    END_OF_TURN = 257
    PAD = 258
    vocab_size = 272
    end_of_turn = END_OF_TURN

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

    def opening(self, instructions: str | None, question: str) -> list[int]:
        del instructions
        return [self.BOS, *self.encode(question), self.END_OF_TURN]

    def reply(self, text: str) -> list[int]:
        return [*self.encode(text), self.END_OF_TURN]


_MARKS = {ByteTokenizer.BOS: "<bos>", ByteTokenizer.END_OF_TURN: "<end>", ByteTokenizer.PAD: "<pad>"}
