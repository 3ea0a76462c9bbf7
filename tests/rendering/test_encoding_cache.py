"""Texts that were encoded before: the same ids, without the tokenizer, within a limit of memory."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from leyden.rendering.encoding_cache import EncodingCache
from leyden.rendering.tokenizer import Tokenizer

SPARK = Path(__file__).parents[2] / "src/leyden/models/spark"


class CountingEncoder:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.texts.append(text)
        return [ord(character) for character in text]


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
    cache = EncodingCache(encode, max_characters=6)
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
    cache = EncodingCache(encode, max_characters=50)
    texts = [f"text {number % 17}" for number in range(2000)]
    with ThreadPoolExecutor(8) as pool:
        for text, ids in zip(texts, pool.map(cache, texts), strict=True):
            assert ids == [ord(character) for character in text]
    assert cache._characters == sum(map(len, cache._known)) <= 50


def test_a_tokenizer_encodes_alike_with_and_without_control_tokens() -> None:
    text = "<|im_start|>user\nhello<|im_end|>"
    tokenizer, other = Tokenizer.load(SPARK), Tokenizer.load(SPARK)
    first = tokenizer.encode(text), tokenizer.text_ids(text)
    assert first == (tokenizer.encode(text), tokenizer.text_ids(text)) == (other.encode(text), other.text_ids(text))
    assert first[0] != first[1]
