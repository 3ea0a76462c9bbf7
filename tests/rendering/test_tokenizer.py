"""Tokens and text: what transformers would make of them, and text that is only ever text."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.rendering.chat_template import TemplateError, render
from leyden.rendering.tokenizer import EncodingCache, Tokenizer, TokenizerError

SPARK = Path(__file__).parents[2] / "src/leyden/models/spark"
tokenizer = Tokenizer.load(SPARK)
texts = st.text(max_size=80) | st.lists(
    st.sampled_from([*tokenizer.control_tokens, "é", "\n", "a", "<|im_", "end|>"])
).map("".join)


@given(texts)
def test_a_text_comes_back_from_its_tokens(text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode_text(text)[0]) == text


@given(texts)
def test_no_text_becomes_a_control_token(text: str) -> None:
    ids, offsets = tokenizer.encode_text(text)
    assert not set(ids) & set(tokenizer.control_tokens.values())
    assert len(ids) == len(offsets)
    assert all(0 <= start < end <= len(text) for start, end in offsets)


@given(
    st.text(min_size=1, max_size=20) | st.sampled_from([f"a{mark} b" for mark in tokenizer.control_tokens]),
    st.sampled_from([1, 500]),
)
@settings(deadline=None, max_examples=50)
def test_a_text_in_a_batch_has_the_tokens_that_it_has_alone(part: str, times: int) -> None:
    text = (f"{part}\n" * times).encode(errors="ignore").decode()
    alone = tokenizer._plain_backend.encode(text, add_special_tokens=False)
    assert tokenizer.encode_text(text) == (alone.ids, alone.offsets)
    assert tokenizer.text_ids(text) == alone.ids
    assert tokenizer.encode(text) == tokenizer._backend.encode(text, add_special_tokens=False).ids


@given(texts)
def test_splitting_at_control_tokens_finds_those_that_encoding_finds(text: str) -> None:
    marks = [id for id in tokenizer.encode(text) if id in tokenizer.control_tokens.values()]
    assert [part for part in tokenizer.split(text) if isinstance(part, int)] == marks


def test_half_a_surrogate_pair_is_no_crash() -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode_text("\ud83d\ude00")[0]) == "😀"


def test_the_interface_that_renderers_requires_of_a_tokenizer() -> None:
    from renderers import ChatTemplateTokenizer, OffsetTokenizer

    assert isinstance(tokenizer, OffsetTokenizer) and isinstance(tokenizer, ChatTemplateTokenizer)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id == 2
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>", "no such token"]) == [2, None]
    assert tokenizer("hi there", return_offsets_mapping=True)["offset_mapping"][-1][1] == 8
    assert tokenizer.decode(2) == "<|im_end|>" and tokenizer.decode([2], skip_special_tokens=True) == ""
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], return_dict=True)["input_ids"][0] == 1


def test_a_template_is_the_file_beside_the_configuration_where_there_is_one(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((SPARK / name).read_text())
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token is defined }}{{ eos_token }}{{ messages[0].content }}")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json", name="mine")
    assert loaded.name_or_path == "mine"
    assert loaded.apply_chat_template([{"content": "x"}], tokenize=False) == "False<|im_end|>x"


def test_of_several_templates_the_one_for_tools_is_used_with_tools() -> None:
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    named = Tokenizer(tokenizer._document, {"chat_template": several, "eos_token": {"content": "<|im_end|>"}}, "x")
    assert named.chat_template == "plain" and named.eos_token_id == 2
    assert named.apply_chat_template([], tools=[{}], tokenize=False) == "tools"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "it has no tokenizer.json"),
        ({"tokenizer.json": "{"}, "not JSON"),
        ({"tokenizer.json": "[]"}, "not a JSON object"),
        ({"tokenizer.json": "{}"}, "not a tokenizer"),
    ],
)
def test_invalid_files_are_reported_in_one_line(tmp_path: Path, files: dict[str, str], says: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=says) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(TokenizerError, match="no chat template"):
        Tokenizer(tokenizer._document, {}, "bare").apply_chat_template([])


def test_templates_run_as_in_transformers() -> None:
    template = """
    {%- for m in messages %}
        {%- if m == 'stop' %}{% break %}{% endif %}
        {% generation %}
        {{- m | tojson }}
        {% endgeneration %}
    {%- endfor %}"""
    shown: list[Any] = ["<é'&>", {"b": 1, "a": 2}, "stop", "x"]
    assert render(template, shown) == '"<é\'&>"\n{"b": 1, "a": 2}\n'
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", [])
    with pytest.raises(TemplateError):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}", [])
    with pytest.raises(TemplateError, match="concatenate"):
        render("{{ 'a' + messages[0].content }}", [{"content": ["b"]}])


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
