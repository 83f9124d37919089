"""A chat template rendered as text in which marks come from the template alone.

What people, tools and the policy said is shielded first: a mark that is spelled in it gets a
character inside that no template looks for, and that goes again when the text is encoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tunix_core.errors import DataError

_SHIELD = "\ue000"
"""From Unicode's private area; one that a text holds itself is doubled."""

_SYSTEM, _QUESTION, _PLAIN, _REPLY = (f"\ue001{name}\ue002" for name in "sqar")
_ANSWERS = (_PLAIN, f"<think>\nr\n</think>\n\n{_PLAIN}", f"<think>r</think>{_PLAIN}")
"""Answers that some templates render otherwise once others follow."""

Message = dict[str, str]


class ChatTemplate:
    """The template of a model folder.

    Args:
        files: text of `tokenizer_config.json` or `chat_template.jinja`, by name.
        marks: the tokenizer's special tokens.
    """

    def __init__(self, files: Mapping[str, str], marks: Iterable[str]) -> None:
        settings = json.loads(files.get("tokenizer_config.json", "{}"))
        source = files.get("chat_template.jinja") or settings.get("chat_template")
        if not isinstance(source, str):
            raise DataError(
                "chat template: none in chat_template.jinja or tokenizer_config.json; accepted one template"
            )
        self._render = _compiled(source, settings)
        ordered = sorted(filter(None, marks), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self.tool_role = "tool" if re.search(r"""['"]tool['"]""", source) and self._takes("tool") else "user"
        """Whom the template lets say what a tool returned."""

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, asks: bool = True) -> str:
        """Text of shielded messages; with `asks` up to where the policy speaks.

        Raises:
            DataError: the template does not take them.
        """
        return self._render(list(messages), self._shielded_json(list(tools)) or None, asks)

    def shielded(self, text: str) -> str:
        return self._marks.sub(lambda mark: mark[0][0] + _SHIELD + mark[0][1:], text.replace(_SHIELD, 2 * _SHIELD))

    def parts(self, text: str) -> Iterable[tuple[str, bool]]:
        """Rendered text in pieces: text whose shields are gone, and marks (true)."""
        start = 0
        for mark in self._marks.finditer(text):
            yield _unshielded(text[start : mark.start()]), False
            yield mark[0], True
            start = mark.end()
        yield _unshielded(text[start:]), False

    def is_shielded(self, text: str) -> bool:
        return _SHIELD in text

    def growth(self) -> dict[str, tuple[str, str]] | None:
        """Role -> text before and after each reply; None for a template that rewrites what it rendered before.

        White space that it strips off a message is no rewriting.
        """
        tool = self.tool_role
        rounds = [(answer, role) for role in (tool, "user") for answer in _ANSWERS] + [(_PLAIN, tool), (_PLAIN, "user")]
        messages = opening_messages(_SYSTEM, _QUESTION)
        before = self.render(messages)
        pieces: dict[str, tuple[str, str]] = {}
        for answer, role in rounds:
            messages += [{"role": "assistant", "content": answer}, {"role": role, "content": _REPLY}]
            after = self.render(messages)
            grown = after.removeprefix(before + answer)
            if grown == after or grown.count(_REPLY) != 1:
                return None
            head, tail = grown.split(_REPLY)
            if pieces.setdefault(role, (head, tail)) != (head, tail):
                return None
            before = after
        return pieces

    def after_answer(self) -> str:
        """Text that follows the assistant's message.

        Raises:
            DataError: the template does not hold on to what is said.
        """
        messages = opening_messages(_SYSTEM, _QUESTION)
        opening = self.render(messages)
        if opening.count(_SYSTEM) != 1 or opening.count(_QUESTION) != 1:
            raise DataError("chat template: drops or repeats the system or the user message; accepted each once")
        messages.append({"role": "assistant", "content": _PLAIN})
        replied = self.render([*messages, {"role": self.tool_role, "content": _REPLY}])
        for rendered in (replied, self.render(messages, asks=False)):
            if rendered.count(_PLAIN) == 1:
                return rendered.split(_PLAIN)[1]
        raise DataError("chat template: drops or repeats the assistant's message; accepted it once")

    def takes_no_system(self) -> bool:
        """Whether a conversation may begin without a system message."""
        try:
            return self.render(opening_messages(None, _QUESTION)).count(_QUESTION) == 1
        except DataError:
            return False

    def takes_tools(self) -> bool:
        """Whether an opening holds the names of the tools that it is given."""
        function = {"name": _REPLY, "description": "d", "parameters": {"type": "object", "properties": {}}}
        try:
            return _REPLY in self.render(
                opening_messages(_SYSTEM, _QUESTION), [{"type": "function", "function": function}]
            )
        except DataError:
            return False

    def _takes(self, role: str) -> bool:
        messages = [*opening_messages(_SYSTEM, _QUESTION), {"role": "assistant", "content": _PLAIN}]
        try:
            return self._render([*messages, {"role": role, "content": _REPLY}], None, True).count(_REPLY) == 1
        except DataError:
            return False

    def _shielded_json(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.shielded(value)
        if isinstance(value, Mapping):
            return {self.shielded(str(key)): self._shielded_json(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self._shielded_json(item) for item in value]
        return value


def opening_messages(instructions: str | None, question: str) -> list[Message]:
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    return [*system, {"role": "user", "content": question}]


def _unshielded(text: str) -> str:
    return re.sub(f"{_SHIELD}({_SHIELD}?)", r"\1", text)


def _compiled(source: str, settings: Mapping[str, Any]) -> Callable[[list[Message], Any, bool], str]:
    import jinja2
    import jinja2.sandbox

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)  # not Jinja's own, which escapes for HTML

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = to_json
    marks = {}
    for name in ("bos_token", "eos_token"):
        mark = settings.get(name)
        marks[name] = mark.get("content", "") if isinstance(mark, dict) else mark or ""
    try:
        compiled = environment.from_string(source)
    except jinja2.TemplateError as error:
        raise DataError(f"chat template: {error}") from error

    def render(messages: list[Message], tools: Any, asks: bool) -> str:
        try:
            return str(compiled.render(messages=messages, tools=tools, add_generation_prompt=asks, **marks))
        except jinja2.TemplateError as error:
            raise DataError(f"chat template: {error}") from error

    return render
