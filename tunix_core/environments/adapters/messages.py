"""What of a policy message counts."""

from __future__ import annotations

import re

from tunix_core.environment_config import Extract


def extract(message: str, kind: Extract, tag: str) -> str | None:
    """The part of `message` that `kind` names, stripped; None where it is missing or empty.

    Args:
        tag: with tags, `<tag>…</tag>`; the last pair counts, thinking before it does not.
    """
    if kind == "tags":
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", message, re.DOTALL)
        return (found[-1].strip() or None) if found else None
    if kind == "message":
        return message.strip() or None
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else None


def how_to(kind: Extract, tag: str, what: str) -> str:
    """The sentence that tells a policy where to write `what`."""
    return {
        "tags": f"Think first, then write {what} between <{tag}> and </{tag}>.",
        "last_line": f"Think first, then write only {what} in the last line.",
        "message": f"Write only {what.rstrip(',')}.",
    }[kind]
