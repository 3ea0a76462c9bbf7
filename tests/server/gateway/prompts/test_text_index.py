"""The index of texts: which call a text begins with."""

import time
from hashlib import blake2b

from leyden.records import Call
from leyden.server.gateway.prompts.text_index import TextIndex, segment


def add(index: TextIndex, id: str, prompt: str, prompt_ids: list[int]) -> None:
    call = Call(id, completion_ids=(7, 8), response={"role": "assistant", "content": "!"})
    index.add(call, lambda: prompt_ids, (segment(prompt),))


def test_the_longest_call_is_found_by_its_text_and_by_its_tokens() -> None:
    index = TextIndex()
    add(index, "short", "One", [1])
    add(index, "long", "One! two", [1, 7, 8, 2])
    for prompt, id in {
        "One! and": "short",
        "One! two! three": "long",
        (1, 7, 8): "short",
        (1, 7, 3): "short",  # without the token that ended it
        (1, 7, 8, 2, 7, 8, 3): "long",
    }.items():
        found = index.match(prompt)
        assert found is not None and found.call == id
    assert index.match("Two! and") is None and index.match("One") is None and index.match((1,)) is None


def test_a_lone_surrogate_is_a_character_like_any_other() -> None:
    index = TextIndex()
    add(index, "odd", "\ud800", [1])
    found = index.match("\ud800! more")
    assert found is not None and found.call == "odd"


def test_a_long_text_is_read_once_however_many_calls_there_are() -> None:
    index, text = TextIndex(), "word " * 40_000
    for number in range(300):
        add(index, f"call-{number}", text[: 150_000 + number], [1])
    started = time.thread_time()
    for _ in range(10):
        blake2b(text.encode()).digest()
    once_s = (time.thread_time() - started) / 10
    started = time.thread_time()
    assert index.match(text) is None
    assert time.thread_time() - started < 60 * once_s  # 300 readings of it would take at least 200 times as long
