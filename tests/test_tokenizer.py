from hypothesis import given
from hypothesis import strategies as st

from tunix_core.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


@given(st.text())
def test_text_survives(text: str) -> None:
    if any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        return
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_no_text_can_forge_a_mark() -> None:
    ids = TOKENIZER.encode("<end> <pad> <bos>")
    assert max(ids) < 256
    assert TOKENIZER.END_OF_TURN not in ids


def test_marks_inside_a_call_are_visible() -> None:
    ids = [*TOKENIZER.encode("get"), TOKENIZER.PAD, *TOKENIZER.encode(" c"), 260]
    assert TOKENIZER.decode(ids) == "get<pad> c<unused-260>"


def test_bytes_that_are_no_text_decode_without_raising() -> None:
    assert TOKENIZER.decode([0xFF, 65]) == "�A"
