"""Tools as text: instructions for policies whose chat template takes no schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tunix_core.tools.functions import Tool

_HERMES = """\
You may call functions to assist with the query. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>
For each call write a JSON object with its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""

_LLAMA3 = """\
You may call functions to assist with the query:
{tools}
To call one, answer with a JSON object {{"name": <name>, "parameters": <arguments>}} and nothing else; several are \
separated by ;."""


def instructions_with_tools(instructions: str, tools: Sequence[Mapping[str, Any]], tool_format: str) -> str:
    """What a chat template that takes tools would make of both.

    Args:
        tools: `Observation.tools`.
        tool_format: `environment.tool_format`.
    """
    if not tools:
        return instructions
    form = {"hermes": _HERMES, "llama3": _LLAMA3}[tool_format]
    text = form.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    return f"{instructions}\n\n{text}" if instructions else text


def plain_instructions(instructions: str, tools: Mapping[str, Tool]) -> str:
    """Instructions with the tools in the plain form of calls."""
    lines = [instructions] if instructions else []
    lines.append("Each message is one call of a tool, or `= ` and the answer:")
    for tool in tools.values():
        usage = " ".join([tool.name, *(field.name.upper() for field in tool.fields)])
        lines.append(f"`{usage}`: {tool.description}" if tool.description else f"`{usage}`")
        for field in tool.fields:
            if "description" in field.kind.schema:
                lines.append(f"  {field.name.upper()}: {field.kind.schema['description']}")
    return "\n".join(lines)
