"""Texts that were encoded before: the same ids, without the tokenizer, within a limit of memory."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from leyden.rendering.encoding_cache import EncodingCache
from leyden.rendering.tokenizer import Tokenizer

SPARK = Path(__file__).parents[2] / "src/leyden/models/spark"


def ordinals(text: str) -> list[int]:
    return [ord(character) for character in text]


class CountingEncoder:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.texts.append(text)
        return ordinals(text)


def test_a_text_is_encoded_once() -> None:
    encode = CountingEncoder()
    cache = EncodingCache(encode)
    assert cache("abc") == cache("abc") == [97, 98, 99]
    assert encode.texts == ["abc"]


def test_callers_may_change_the_ids_that_they_get() -> None:
    cache = EncodingCache(CountingEncoder())
    for _ in range(3):
        ids = cache("ab")
        assert ids == [97, 98]
        ids.append(7)


def test_texts_that_were_not_used_for_longest_are_forgotten_first() -> None:
    encode = CountingEncoder()
    cache = EncodingCache(encode, max_entries=2)
    for text in ("aaa", "bbb", "aaa", "ccc", "aaa", "bbb"):
        cache(text)
    assert encode.texts == ["aaa", "bbb", "ccc", "bbb"]


def test_a_very_long_text_is_not_remembered() -> None:
    encode = CountingEncoder()
    cache = EncodingCache(encode)
    long = "x" * 100_000
    cache("short")
    assert cache(long) == cache(long)
    cache("short")
    assert encode.texts == ["short", long, long]


def test_threads_get_the_same_ids_and_the_limit_holds() -> None:
    encode = CountingEncoder()
    cache = EncodingCache(encode, max_bytes=3000)
    texts = [f"text {number % 17}" for number in range(2000)]
    with ThreadPoolExecutor(8) as pool:
        for text, ids in zip(texts, pool.map(cache, texts), strict=True):
            assert ids == [ord(character) for character in text]
    assert 0 < len(cache._known) < 17
    assert cache._bytes <= 3000


@pytest.mark.parametrize("length", [2, 400, 20_000])
def test_texts_of_any_length_take_no_more_memory_than_the_limit(length: int) -> None:
    limit = 1 << 20
    cache = EncodingCache(ordinals, max_bytes=limit, max_entries=1 << 14)
    tracemalloc.start()
    try:
        for number in range(3 * limit // (length + 100)):
            cache(f"{number:{length}}")
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert limit / 2 < taken < 1.1 * limit


def test_a_tokenizer_encodes_alike_with_and_without_control_tokens() -> None:
    text = "<|im_start|>user\nhello<|im_end|>"
    tokenizer, other = Tokenizer.load(SPARK), Tokenizer.load(SPARK)
    first = tokenizer.encode(text), tokenizer.text_ids(text)
    assert first == (tokenizer.encode(text), tokenizer.text_ids(text)) == (other.encode(text), other.text_ids(text))
    assert first[0] != first[1]
