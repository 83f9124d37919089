"""The tokenizer and chat template of a model folder: Hugging Face `tokenizers` and Jinja, offline.

The ids of a sequence that the policy sampled stay as they are; the template gives what stands
around them. Where it only ever appends, what follows a message is known before. A template that
renders earlier turns otherwise once others follow (it drops their reasoning, say) is rendered anew
at every turn: while the text extends what the sequence says, the sequence goes on, and else it forks into
one that begins with the template's own words. A message's text is encoded as text even where it spells a mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tunix_core.errors import DataError
from tunix_core.pretrained.chat_template import ChatTemplate, opening_messages
from tunix_core.tokenizer import Appending, Framing, Reply
from tunix_core.validation import require_package


class ChatTokenizer:
    """See `tokenizer.Tokenizer`.

    Args:
        files: text of `tokenizer.json`, and of `tokenizer_config.json` or `chat_template.jinja`, by name.
        vocab_size: of the model; the tokenizer may use fewer ids, not more.

    Raises:
        DataError: a file is missing or broken, or the template cannot be used turn by turn.
    """

    def __init__(self, files: Mapping[str, str], vocab_size: int) -> None:
        require_package("tokenizers", "models")
        require_package("jinja2", "models")
        import tokenizers

        if "tokenizer.json" not in files:
            raise DataError("tokenizer.json: missing. Import a folder that has it.")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
        except Exception as error:  # the library raises bare exceptions
            raise DataError(f"tokenizer.json: not readable ({error})") from error
        if self._tokenizer.get_vocab_size() > vocab_size:
            raise DataError(
                f"tokenizer.json: has {self._tokenizer.get_vocab_size()} ids, accepted at most the model's {vocab_size}"
            )
        self.vocab_size = vocab_size
        added = self._tokenizer.get_added_tokens_decoder()
        self._marks = {i: token.content for i, token in added.items() if token.special}
        self._ids_of_marks = {mark: i for i, mark in self._marks.items()}
        self.template = ChatTemplate(files, self._marks.values())
        after_answer = self.template.after_answer()
        ended = self.marked(after_answer)
        self.end_of_turn = ended[0] if ended else -1
        if self.end_of_turn not in self._marks:
            raise DataError(
                f"chat template: an assistant's message ends with {after_answer[:20]!r}, accepted a special token first"
            )
        self.end_text = self._marks[self.end_of_turn]
        self.takes_tools = self.template.takes_tools()
        self._takes_no_system = self.template.takes_no_system()
        self._growth = self.template.growth()
        self.may_fork = self._growth is None

    def encode(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = True  # a mark in the text is text
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))

    def opening(self, instructions: str | None, question: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """See `tokenizer.Tokenizer`; without instructions the template's own, where it has some (not so with "").

        Raises:
            DataError: the template cannot do without a system message.
        """
        return self.marked(self.template.render(self.opening_messages(instructions, question), tools))

    def opening_messages(self, instructions: str | None, question: str) -> list[dict[str, str]]:
        """The first messages, shielded; raises as `opening` does."""
        if instructions is None and not self._takes_no_system:
            raise DataError("chat template: received no system message, accepted conversations with one only")
        shielded = self.template.shielded
        return opening_messages(None if instructions is None else shielded(instructions), shielded(question))

    def reply(self, text: str, role: str = "tool") -> list[int]:
        """What follows the policy's end of turn, of a template that appends."""
        assert self._growth is not None, "the template's replies depend on the conversation: see framing"
        before, after = self._growth[self.role(role)]
        return self.marked(before + self.template.shielded(text) + after)[1:]

    def framing(self) -> Framing:
        return _Rendering(self) if self._growth is None else Appending(self)

    def role(self, role: str) -> str:
        """The template's name for `tool` or `user`."""
        return self.template.tool_role if role == "tool" else role

    def marked(self, text: str) -> list[int]:
        """Ids of rendered text."""
        if not self.template.is_shielded(text):
            self._tokenizer.encode_special_tokens = False
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        for part, is_mark in self.template.parts(text):
            ids += [self._ids_of_marks[part]] if is_mark else self.encode(part)
        return ids

    def shielded_message(self, ids: Sequence[int]) -> str:
        """Text of a policy message for the template: marks that the policy drew are marks, spelled ones are not."""
        text, start = "", 0
        for place in [*(place for place, token in enumerate(ids) if token in self._marks), len(ids)]:
            text += self.template.shielded(self.decode(ids[start:place])) if place > start else ""
            text += self._marks[ids[place]] if place < len(ids) else ""
            start = place + 1
        return text


class _Rendering:
    """A conversation that the template renders anew at every turn."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._messages: list[dict[str, str]] = []
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._text = ""
        """What the sequence says up to where the policy spoke last."""

    def opening(self, instructions: str | None, question: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        self._messages = self._tokenizer.opening_messages(instructions, question)
        self._tools = tools
        self._text = self._tokenizer.template.render(self._messages, tools)
        return self._tokenizer.marked(self._text)

    def reply(self, message: Sequence[int], text: str, role: str = "tool") -> Reply:
        tokenizer = self._tokenizer
        said = tokenizer.shielded_message(message)
        self._messages += [
            {"role": "assistant", "content": said},
            {"role": tokenizer.role(role), "content": tokenizer.template.shielded(text)},
        ]
        before, self._text = self._text, tokenizer.template.render(self._messages, self._tools)
        follows = _after(self._text, before, said, tokenizer.end_text)
        if follows is None:
            return Reply(tokenizer.marked(self._text), forks=True)
        return Reply(tokenizer.marked(follows))


def _after(rendered: str, before: str, said: str, end: str) -> str | None:
    """What `rendered` says after `before`, `said` and the end of turn; None where it does not say these first.

    White space at the edges of `said` may be gone.
    """
    spoken, said = rendered[len(before) :].lstrip(), said.strip()
    if not (rendered.startswith(before) and spoken.startswith(said)):
        return None
    rest = spoken[len(said) :].lstrip()
    return rest[len(end) :] if rest.startswith(end) else None
