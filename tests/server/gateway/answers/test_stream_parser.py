"""What is let out of an answer while it is written, for any text in any pieces."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from gpt_oss_files import FOLDER_VARIABLE, VOCABULARY, vocabulary
from hypothesis import example, given
from model_families import FAMILIES, THINKING, template_of, write_model

from leyden.engine.protocol import TokenChunk
from leyden.rendering.factory import renderer_for
from leyden.rendering.renderer import find_reasoning_end
from leyden.rendering.tokenizer import Tokenizer
from leyden.server.gateway.answers.stream_parser import StreamParser
from leyden.server.gateway.dialects.types import (
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)

TOKENIZER = Tokenizer.load(str(files("leyden") / "models" / "spark"))
RENDERER = renderer_for(TOKENIZER)
PROMPT = RENDERER.render_ids([{"role": "user", "content": "?"}], add_generation_prompt=True)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40) | st.text(alphabet="ab STOP\n", max_size=40)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def write(text: str, sizes: list[int], end: str = "stop", **more: Any) -> tuple[StreamParser, list[Any]]:
    """Have an answer written in pieces of these sizes (again and again), as an engine would."""
    ids = TOKENIZER.encode(text) + ([TOKENIZER.convert_tokens_to_ids("<|im_end|>")] if end == "stop" else [])
    parser, events, at, turn = StreamParser(0, RENDERER, TOKENIZER, PROMPT, **more), [], 0, 0
    while at < len(ids) and not parser.done:
        some = tuple(ids[at : at + sizes[turn % len(sizes)]])
        at, turn = at + len(some), turn + 1
        finish: Any = end if at == len(ids) else None
        events += parser.feed(TokenChunk(some, (-0.5,) * len(some), turn, finish=finish))
    return parser, events


@given(text=TEXTS, sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_the_deltas_add_up_to_the_whole_answer(text: str, sizes: list[int]) -> None:
    plain = text.replace("<", "(")  # marks are another test's business
    parser, events = write(plain, sizes)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == parser.content == plain
    assert sum(run.tokens for run in parser.versions) == len(parser.ids) == len(parser.logprobs)


@example(text="SOa", stop=["O", "SOa"], size=1)
@given(
    text=TEXTS,
    stop=st.lists(st.text("abSTO P", min_size=1, max_size=4), min_size=1, max_size=3),
    size=st.integers(1, 5),
)
def test_nothing_of_a_stop_string_is_let_out(text: str, stop: list[str], size: int) -> None:
    plain = text.replace("<", "(")
    parser, events = write(plain, [size], stop=tuple(stop))
    shown = "".join(event.text for event in events if isinstance(event, TextDelta))
    found = [(plain.index(string) + len(string), plain.index(string)) for string in stop if string in plain]
    assert shown == parser.content == (plain[: min(found)[1]] if found else plain)
    assert (parser.stopped_by is not None) == bool(found)


@example(text="a stop b", stop=" st", sizes=[3])
@given(
    text=TEXTS,
    stop=st.text("abSTO P", min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
)
def test_an_answer_ends_with_the_token_that_completes_its_stop_string(text: str, stop: str, sizes: list[int]) -> None:
    plain = text.replace("<", "(")
    parser, _ = write(plain, sizes, stop=(stop,), logprobs=True)
    if stop not in plain:
        assert parser.context_tail == 0
        return
    end = plain.index(stop) + len(stop)
    said = TOKENIZER.decode(parser.ids)
    assert said.startswith(plain[:end]) and not TOKENIZER.decode(parser.ids[:-1]).startswith(plain[:end])
    assert parser.context_tail == (said != plain[:end])  # a token that says more was not chosen to end here
    assert len(parser.ids) == len(parser.logprobs) == sum(run.tokens for run in parser.versions)


@given(text=TEXTS, calls=st.integers(1, 3), size=st.integers(1, 9), streamed=st.booleans())
def test_tool_calls_arrive_complete_and_their_tokens_never_as_text(
    text: str, calls: int, size: int, streamed: bool
) -> None:
    said = text.replace("<", "(").strip()
    parser, events = write(said + CALL * calls, [size], streamed=streamed)
    assert [event.call.name for event in events if isinstance(event, ToolCallFinished)] == ["f"] * calls
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == parser.content
    assert "tool_call" not in parser.content
    assert [call["function"]["arguments"] for call in parser.message["tool_calls"]] == ['{"x": 1}'] * calls


@given(said=st.sampled_from(["", "Thought: look\n"]), size=st.integers(1, 50), streamed=st.booleans())
def test_a_tool_call_before_a_stop_string_ends_the_answer(said: str, size: int, streamed: bool) -> None:
    parser, events = write(said + CALL + "\nObservation: 3" + CALL, [size], stop=("Observation:",), streamed=streamed)
    assert [event.call.name for event in events if isinstance(event, ToolCallFinished)] == ["f"]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == parser.content == said
    assert TOKENIZER.decode(parser.ids) == said + CALL
    assert parser.context_tail == 0
    assert len(parser.ids) == len(parser.logprobs) == sum(run.tokens for run in parser.versions)


@given(size=st.integers(1, 50), streamed=st.booleans())
def test_text_between_a_tool_call_and_a_stop_string_stays(size: int, streamed: bool) -> None:
    parser, _ = write(CALL + "so Observation: 3", [size], stop=("Observation:",), streamed=streamed)
    assert (parser.content, len(parser.calls)) == ("so ", 1)
    assert TOKENIZER.decode(parser.ids) == CALL + "so Observation:"


@given(size=st.integers(1, 50), streamed=st.booleans())
def test_text_after_a_tool_call_stays_where_the_stop_string_is_white_space(size: int, streamed: bool) -> None:
    parser, _ = write(CALL + "\nThe sum is 3.\nMore", [size], stop=("\n",), streamed=streamed)
    assert (parser.content, len(parser.calls)) == ("The sum is 3.", 1)
    assert TOKENIZER.decode(parser.ids) == CALL + "\nThe sum is 3.\n"


@given(thought=st.text("ab c\n", min_size=1, max_size=20), said=st.text("xy z", min_size=1, max_size=20))
def test_reasoning_is_kept_apart(thought: str, said: str) -> None:
    parser, events = write(f"<think>\n{thought}\n</think>\n\n{said}", [3])
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == parser.content
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == parser.reasoning
    assert said.strip() in parser.content
    assert thought.strip() in parser.reasoning
    kinds = [type(event) for event in events]
    assert kinds == sorted(kinds, key=[ReasoningDelta, TextDelta].index)  # never reasoning after text


def test_an_answer_cut_by_length_shows_all_there_is() -> None:
    parser, events = write("A long story", [2], end="length")
    assert "".join(event.text for event in events) == "A long story"
    assert parser.finish == "length"


def test_an_unfinished_answer_is_parsed_as_far_as_it_goes() -> None:
    parser = StreamParser(0, RENDERER, TOKENIZER, PROMPT, streamed=False)
    assert (
        parser.feed(TokenChunk(tuple(TOKENIZER.encode("Half a")), (-0.5,) * len(TOKENIZER.encode("Half a")), 0)) == []
    )
    parser.parse_partial()
    assert parser.content == "Half a"


ARGUMENTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.text(max_size=12)
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.booleans()
        | st.none(),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    ),
    max_size=4,
)


@given(
    said=st.sampled_from(["", "I shall. ", "Grüße: "]),
    arguments=st.lists(ARGUMENTS, min_size=1, max_size=3),
    between=st.sampled_from(["", "\n", " and\n"]),
    size=st.integers(1, 9),
    ascii_only=st.booleans(),
)
def test_arguments_are_streamed_as_they_are_sampled(
    said: str, arguments: list[Any], between: str, size: int, ascii_only: bool
) -> None:
    written = [json.dumps(given, ensure_ascii=ascii_only) for given in arguments]
    calls = [f'<tool_call>\n{{"name": "f{at}", "arguments": {text}}}\n</tool_call>' for at, text in enumerate(written)]
    parser, events = write(said + between.join(calls), [size])
    streamed: dict[int, str] = {}
    for event in events:
        match event:
            case ToolCallStarted(_, index, _, name):
                assert (index, name) == (len(streamed), f"f{index}")
                streamed[index] = ""
            case ToolArgumentsDelta(_, index, text):
                assert text
                streamed[index] += text
            case ToolCallFinished(_, index, call):
                assert call.arguments == streamed[index]
                assert call.malformed is None
    assert list(streamed.values()) == written
    assert [call.arguments for call in parser.calls] == written
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == parser.content


def test_a_long_argument_arrives_in_many_parts() -> None:
    text = "word " * 200
    _, events = write(f'<tool_call>\n{{"name": "f", "arguments": {{"text": "{text}"}}}}\n</tool_call>', [4])
    kinds = [type(event) for event in events]
    assert kinds[0] is ToolCallStarted
    assert kinds[-1] is ToolCallFinished
    assert kinds.count(ToolArgumentsDelta) > 10


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("arguments", "rest", "why"),
    [
        ('{"x": "some words}', "", "unclosed_block"),
        ('{"x": "some words}}', "\n</tool_call>", "invalid_json"),
        ('{"x": "some words" 2}', "}\n</tool_call>", "invalid_json"),
        ('{"x": "some words"}', "]}\n</tool_call>", "invalid_json"),
        ('{"x": "some words"}', ', "name": "g"}\n</tool_call>', "repeated_key"),
        ('{"x": "some words"}', ', "arguments": {}}\n</tool_call>', "repeated_key"),
    ],
)
def test_a_malformed_call_is_the_same_call_streamed_or_whole_and_is_marked(
    arguments: str, rest: str, why: str, streamed: bool
) -> None:
    parser, events = write(f'<tool_call>\n{{"name": "f", "arguments": {arguments}{rest}', [3], streamed=streamed)
    (call,) = parser.calls
    assert (call.name, call.malformed) == ("f", why)
    sent = "".join(event.text for event in events if isinstance(event, ToolArgumentsDelta))
    assert call.arguments == sent == arguments
    assert parser.content == ""
    assert parser.message["tool_calls"][0]["malformed"] == why


REASONED = "\nTwo and\n three.\n</think>\n\nFive it is."
CHANNELS = "Two and\n three. <|end|><|start|>assistant<|channel|>final<|message|>Five it is.<|return|>"
"""As gpt-oss writes it."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("end", ["stop", "length"])
def test_reasoning_is_streamed_as_the_whole_answer_has_it(
    family: str, end: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every family: an open block has white space or a label that the closed one has not."""
    if family == "gpt-oss":  # its renderer downloads its vocabulary otherwise
        (tmp_path / VOCABULARY).write_bytes(vocabulary())
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    model = THINKING.get(family, FAMILIES[family])
    tokenizer = Tokenizer.load(write_model(tmp_path / "model", model, template_of(family)).folder, model)
    renderer = renderer_for(tokenizer)
    question: list[Any] = [{"role": "user", "content": "?"}]
    answer = {"role": "assistant", "content": "Five it is.", "reasoning_content": "Two and\n three."}
    prompt, written = (
        renderer.render_ids(question, add_generation_prompt=True),
        renderer.render_ids([*question, answer]),
    )
    shared = next((at for at, pair in enumerate(zip(prompt, written, strict=False)) if len({*pair}) > 1), len(prompt))
    ids = written[shared : -1 if end == "stop" else shared + 6]
    if "three" not in tokenizer.decode(written):  # its template shows no reasoning of earlier answers
        begun = tokenizer.decode(prompt).rstrip().endswith(("<think>", "<|message|>"))
        text = ("" if begun else "<think>") + (CHANNELS if family == "gpt-oss" else REASONED)
        shared, ids = len(prompt), tokenizer.encode(text)[: None if end == "stop" else 6]

    def parse(size: int, streamed: bool) -> tuple[StreamParser, str]:
        closing = find_reasoning_end(renderer)
        parser = StreamParser(0, renderer, tokenizer, prompt[:shared], reasoning_end=closing, streamed=streamed)
        deltas: list[Any] = []
        for at in range(0, len(ids), size):
            some = tuple(ids[at : at + size])
            finish = end if at + size >= len(ids) else None
            deltas += parser.feed(TokenChunk(some, (-0.5,) * len(some), 1, finish=finish))
        return parser, "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))

    whole, _ = parse(len(ids), streamed=False)
    assert whole.reasoning or family == "llama-3"  # which has none
    for size in (1, 2, 5):
        parser, streamed = parse(size, streamed=True)
        assert streamed == parser.reasoning == whole.reasoning
        assert parser.message == whole.message


def test_a_call_inside_reasoning_is_not_streamed() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    parser, events = write(f"<think>\nI could say {call} here.\n</think>\n\nNo.", [2])
    assert not parser.calls
    assert not [event for event in events if isinstance(event, ToolCallStarted)]
    assert parser.content == "No."


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("size", [1, 4, 50])
def test_a_call_without_marks_is_a_call_where_the_run_says_so(size: int, streamed: bool) -> None:
    said = 'I call it:\n\n```json\n{"name": "f", "arguments": {"x": 1}}\n```'
    parser, events = write(said, [size], tools=TOOLS, unmarked=True, streamed=streamed)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == parser.content == "I call it:"
    assert [call["function"]["arguments"] for call in parser.message["tool_calls"]] == ['{"x": 1}']
    parser, events = write(said, [size], tools=TOOLS, streamed=streamed)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == parser.content == said
    assert not parser.calls


def test_doubled_braces_inside_the_marks_are_read_too() -> None:
    said = '<tool_call>\n{{"name": "f", "arguments": {"x": 1}}}\n</tool_call>'
    parser, events = write(f"So.\n{said}", [3], tools=TOOLS, unmarked=True)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == parser.content == "So."
    assert [call.arguments for call in parser.calls] == ['{"x": 1}']
    parser, _ = write(f"So.\n{said}", [3], tools=TOOLS)
    assert not parser.calls and said in parser.content


@given(text=TEXTS | st.text("`{j", max_size=9), size=st.integers(1, 9))
def test_what_might_have_become_a_call_is_still_shown(text: str, size: int) -> None:
    plain = text.replace("<", "(")
    parser, events = write(plain, [size], tools=TOOLS, unmarked=True)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == parser.content == plain
