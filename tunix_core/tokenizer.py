"""What turns text into ids and frames a conversation; and the tokenizer of the small CPU policies.

Nothing that a policy sampled is ever decoded and encoded again: text goes to environments and to
people, ids go to the learner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Reply(NamedTuple):
    """What follows a policy message."""

    ids: list[int]
    """After the message's end of turn, up to where the policy speaks again; a whole sequence where it `forks`."""
    forks: bool = False
    """Earlier turns read differently now, so the sequence cannot go on: another one begins with `ids`."""


class Framing(Protocol):
    """One conversation: its opening, then policy messages with a reply between two of them."""

    def opening(self, instructions: str | None, question: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """See `Tokenizer.opening`; called once."""

    def reply(self, message: Sequence[int], text: str, role: str = "tool") -> Reply:
        """What comes after a policy message.

        Args:
            message: the ids that the policy sampled, without its end of turn.
            text: what the environment (`tool`) or a person (`user`) answers.
        """


class Tokenizer(Protocol):
    """Text, ids, and the marks around the turns of a conversation.

    Text from outside never becomes a mark, whatever it says.
    """

    vocab_size: int
    end_of_turn: int
    """The id with which the policy ends its message."""
    takes_tools: bool
    """Whether an opening says anything of tools that it is given."""
    may_fork: bool
    """Whether replies may fork."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none of them a mark."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, marks by visible names."""

    def opening(self, instructions: str | None, question: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The start of a sequence up to where the policy speaks; None: as the tokenizer starts one without instructions."""

    def framing(self) -> Framing:
        """Of a new conversation."""


class Appending:
    """Frames for a tokenizer whose replies do not depend on what was said before."""

    def __init__(self, tokenizer: Appends) -> None:
        self._tokenizer = tokenizer

    def opening(self, instructions: str | None, question: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return self._tokenizer.opening(instructions, question, tools)

    def reply(self, message: Sequence[int], text: str, role: str = "tool") -> Reply:
        del message
        return Reply(self._tokenizer.reply(text, role))


class Appends(Protocol):
    """What `Appending` needs."""

    def opening(
        self, instructions: str | None, question: str, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]: ...

    def reply(self, text: str, role: str = "tool") -> list[int]: ...


class ByteTokenizer:
    """Ids 0 to 255 are bytes of UTF-8; three marks follow; the rest of the vocabulary is unused.

        [BOS] question END_OF_TURN   policy message END_OF_TURN   reply END_OF_TURN   …

    Instructions and tools are left out: policies this small learn the form of a message from demonstrations.
    """

    BOS = 256
    END_OF_TURN = 257
    PAD = 258
    vocab_size = 272
    end_of_turn = END_OF_TURN
    takes_tools = False
    may_fork = False

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

    def opening(self, instructions: str | None, question: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        del instructions, tools
        return [self.BOS, *self.encode(question), self.END_OF_TURN]

    def framing(self) -> Framing:
        return Appending(self)

    def reply(self, text: str, role: str = "tool") -> list[int]:
        """What follows the policy's end of turn."""
        del role
        return [*self.encode(text), self.END_OF_TURN]


_MARKS = {ByteTokenizer.BOS: "<bos>", ByteTokenizer.END_OF_TURN: "<end>", ByteTokenizer.PAD: "<pad>"}
