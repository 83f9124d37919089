"""Names of evaluators and of their inputs, so that a result is never mistaken for another one's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_DIGITS = 12


def evaluator_name(version: int, source_file: str) -> str:
    """`<version>-<digest of the evaluator's source>`: a change of the code is another evaluator."""
    return f"{version}-{hashlib.sha256(Path(source_file).read_bytes()).hexdigest()[:_DIGITS]}"


def input_digest(inputs: Iterable[str]) -> str:
    """Digest of a sequence of texts in their order, unambiguous about where one ends."""
    digest = hashlib.sha256()
    for text in inputs:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[: 2 * _DIGITS]
