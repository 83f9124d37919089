import numpy as np
import pytest

from tunix_core.actor.stopping import StopScanner
from tunix_core.tokenizer import ByteTokenizer

tokenizers = pytest.importorskip("tokenizers")

TEXT = "naïve café — 日本語の文字 🙂🙃 </tool> the tool said: answer</tool>\n" * 3


@pytest.fixture(scope="module")
def bpe():
    """A byte-level vocabulary whose merges cut through characters."""
    subject = tokenizers.Tokenizer(tokenizers.models.BPE())
    subject.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    subject.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    subject.train_from_iterator([TEXT], trainer)
    return subject


def first_match(decode, ids: list[int], strings: list[str]) -> int | None:
    """By the definition: the shortest prefix whose text holds one of the strings."""
    return next((n for n in range(1, len(ids) + 1) if any(s in decode(ids[:n]) for s in strings)), None)


def fed(decode, ids: list[int], strings: list[str], rng: np.random.Generator) -> int | None:
    """The same by a scanner, over dispatches of random lengths."""
    scanner, at = StopScanner(decode, strings), 0
    while at < len(ids):
        size = int(rng.integers(1, 9))
        kept = scanner.feed(ids[at : at + size])
        if kept is not None:
            return at + kept
        at += size
    return None


@pytest.mark.parametrize(
    "strings", [["</tool>"], ["語の"], ["🙃"], ["é", "said: a"], ["\n", "xx"], ["not there at all"]]
)
def test_text_that_spans_tokens_dispatches_and_characters(bpe, strings: list[str]) -> None:
    rng = np.random.default_rng(0)
    whole = bpe.encode(TEXT).ids
    found = set()
    for start in range(0, len(whole) - 10, 3):
        # Some of the ids are noise, so that characters break off and stay unfinished.
        ids = [int(rng.integers(300)) if rng.random() < 0.05 else token for token in whole[start:]]
        expected = first_match(bpe.decode, ids, strings)
        assert fed(bpe.decode, ids, strings, rng) == expected
        found.add(expected is None)
    assert (False in found) != strings[0].startswith("not")


def test_random_bytes_and_marks() -> None:
    rng, decode = np.random.default_rng(1), ByteTokenizer().decode
    alphabet = [*"ab€".encode(), 0xE2, 0x82, 256, 258]
    for _ in range(150):
        ids = rng.choice(alphabet, 80).tolist()
        assert fed(decode, ids, ["a€b", "b<bos>"], rng) == first_match(decode, ids, ["a€b", "b<bos>"])


def test_a_long_turn_is_not_decoded_from_its_start_again() -> None:
    sizes = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return ByteTokenizer().decode(ids)

    scanner = StopScanner(decode, ["stop"])
    for _ in range(500):
        assert scanner.feed([97] * 8) is None
    assert max(sizes) < 60
