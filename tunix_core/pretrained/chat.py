"""The tokenizer and chat template of a model folder: Hugging Face `tokenizers` and Jinja, offline.

The template is rendered once, around placeholders, and cut into the text between messages. So the
marks come from the template alone, a message's text is encoded as text even where it spells a mark,
and a sequence only ever grows: turn k + 1 extends the ids of turn k. A template that does not work
that way (one that rewrites earlier turns, say) is refused when it is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tunix_core.errors import DataError
from tunix_core.validation import require_package

_SYSTEM, _FIRST, _ANSWER, _SECOND, _LAST = (f"\ue000{name}\ue001" for name in "sfatl")
"""Placeholders from Unicode's private area."""


class ChatTokenizer:
    """See `tokenizer.Tokenizer`.

    Args:
        files: text of `tokenizer.json`, and of `tokenizer_config.json` or `chat_template.jinja`, by name.
        vocab_size: of the model; the tokenizer may use fewer ids, not more.
        reply_role: whom the template lets say what a tool returned.

    Raises:
        DataError: a file is missing or broken, or the template cannot be used turn by turn.
    """

    def __init__(self, files: Mapping[str, str], vocab_size: int, *, reply_role: str = "user") -> None:
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
        pieces = _template_pieces(files, reply_role)
        self._to_question, self._without_system, self._after_question, after_answer, self._after_reply = pieces
        ended = self._marked(after_answer)
        self.end_of_turn = ended[0] if ended else -1
        if not ended or ended[0] not in self._tokenizer.get_added_tokens_decoder():
            raise DataError(
                f"chat template: an assistant's message ends with {after_answer[:20]!r}, accepted a special token first"
            )
        self._before_reply = ended[1:]
        self._generation = self._marked(self._after_reply)

    def encode(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = True  # a mark in the text is text
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))

    def opening(self, instructions: str | None, question: str) -> list[int]:
        """See `tokenizer.Tokenizer`; without instructions the template's own, where it has some (not so with "").

        Raises:
            DataError: the template cannot do without a system message.
        """
        if instructions is None:
            if self._without_system is None:
                raise DataError("chat template: received no system message, accepted conversations with one only")
            start = self._marked(self._without_system)
        else:
            before, _, between = self._to_question.partition(_SYSTEM)
            start = [*self._marked(before), *self.encode(instructions), *self._marked(between)]
        return [*start, *self.encode(question), *self._marked(self._after_question)]

    def reply(self, text: str) -> list[int]:
        return [*self._before_reply, *self.encode(text), *self._generation]

    def _marked(self, text: str) -> list[int]:
        """Ids of the template's own text."""
        self._tokenizer.encode_special_tokens = False
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _template_pieces(files: Mapping[str, str], reply_role: str) -> tuple[str, str | None, str, str, str]:
    """Text before the question (with the instructions' place, and without instructions), between question and
    answer, between answer and reply, and between reply and answer."""
    system, first = {"role": "system", "content": _SYSTEM}, {"role": "user", "content": _FIRST}
    answer, second = {"role": "assistant", "content": _ANSWER}, {"role": reply_role, "content": _SECOND}
    render = _renderer(files)
    opening = render([system, first])
    first_answer = render([system, first, answer, second])
    second_answer = render([system, first, answer, second, {**answer, "content": _LAST}, second])
    if opening.count(_SYSTEM) != 1 or opening.count(_FIRST) != 1:
        raise DataError("chat template: drops or repeats the system or the user message; accepted each once")
    to_question, after_question = opening.split(_FIRST)
    grown = first_answer.removeprefix(opening + _ANSWER)
    if grown == first_answer or grown.count(_SECOND) != 1:
        raise DataError(
            "chat template: changes what it rendered before when a turn is added; accepted one that appends"
        )
    after_answer, after_reply = grown.split(_SECOND)
    expected = first_answer + _LAST + after_answer + _SECOND + after_reply
    if second_answer != expected:
        raise DataError("chat template: renders the second turn unlike the first; accepted one that treats turns alike")
    return to_question, _without_system(render, first, after_question), after_question, after_answer, after_reply


def _without_system(render: Callable[[list[dict[str, str]]], str], first: dict[str, str], after: str) -> str | None:
    """Text before the question where there is no system message; None where the template needs one."""
    try:
        before, separator, rest = render([first]).partition(_FIRST)
    except DataError:
        return None
    return before if separator and rest == after else None


def _renderer(files: Mapping[str, str]) -> Any:
    import jinja2
    import jinja2.sandbox

    settings = json.loads(files.get("tokenizer_config.json", "{}"))
    template = files.get("chat_template.jinja") or settings.get("chat_template")
    if not isinstance(template, str):
        raise DataError("chat template: none in chat_template.jinja or tokenizer_config.json; accepted one template")

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    marks = {}
    for name in ("bos_token", "eos_token"):
        mark = settings.get(name)
        marks[name] = mark.get("content", "") if isinstance(mark, dict) else mark or ""

    def render(messages: list[dict[str, str]]) -> str:
        try:
            compiled = environment.from_string(template)
            return compiled.render(messages=messages, add_generation_prompt=True, **marks)
        except jinja2.TemplateError as error:
            raise DataError(f"chat template: {error}") from error

    return render
