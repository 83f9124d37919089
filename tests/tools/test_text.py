from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunix_core.tools.text import CUT, cut


@pytest.mark.parametrize(
    ("text", "max_bytes", "kept"),
    [
        ("aé", 3, ("aé", False)),
        ("a" * 20, 10, ("aaaa [cut]", True)),
        ("aaaé" * 20, 10, ("aaa [cut]", True)),  # never half a character
        ("\ud800", 9, ("?", False)),
        ("a" * 20, 3, (" [c", True)),
        ("", 0, ("", False)),
    ],
)
def test_a_text_is_cut_between_characters_with_a_mark(text: str, max_bytes: int, kept: tuple[str, bool]) -> None:
    assert cut(text, max_bytes) == kept


@given(st.text(max_size=40), st.integers(6, 60))
def test_no_more_bytes_than_allowed_and_a_beginning_of_the_text(text: str, max_bytes: int) -> None:
    kept, was_cut = cut(text, max_bytes)
    assert len(kept.encode()) <= max_bytes
    assert was_cut == (len(text.encode()) > max_bytes)
    assert text.startswith(kept.removesuffix(CUT) if was_cut else kept)


def test_no_more_of_a_text_is_encoded_than_is_kept() -> None:
    class Counted(str):
        """Notes what is asked of it."""

        slices: list[slice] = []  # noqa: RUF012

        def __getitem__(self, key):
            self.slices.append(key)
            return super().__getitem__(key)

        def encode(self, *_args, **_options):
            raise AssertionError("the whole text was encoded")

    assert cut(Counted("x" * 10_000), 10) == ("xxxx [cut]", True)
    assert Counted.slices == [slice(None, 11, None)]
