"""Texts of any length, cut to what may be read of them."""

from __future__ import annotations

CUT = " [cut]"
"""Ends a text of which more was there."""


def cut(text: str, max_bytes: int) -> tuple[str, bool]:
    """At most `max_bytes` of UTF-8, ending in `CUT` where something is missing; and whether it does."""
    # A character is at least one byte, so what is encoded is never more than four times the limit.
    data = text[: max_bytes + 1].encode("utf-8", errors="replace")
    if len(data) <= max_bytes:
        return data.decode(), False
    kept = data[: max(0, max_bytes - len(CUT))].decode("utf-8", errors="ignore")
    return (kept + CUT)[:max_bytes], True
