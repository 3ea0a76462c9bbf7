"""Answers in a given format: asked for by unmodified clients, held to it token by token, and recorded as such."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
import torch
from modelserving import END, ModelServer, call, eventually, model_server
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoModelForCausalLM

from leyden.engine.grammar import GrammarCompiler
from leyden.engine.grammar_checker import GrammarChecker
from leyden.engine.protocol import EngineRequest
from leyden.engine.torch.engine import TorchEngine
from leyden.records import MIN_ALLOWED_MASS, Purpose, Sampling
from leyden.rendering.chat_template import TemplateError
from leyden.rendering.factory import renderer_for
from leyden.rendering.tokenizer import Tokenizer
from leyden.server.gateway.answers.structured_output import StructuredOutput
from leyden.server.gateway.dialects.types import Format, GenerationRequest, ToolChoice
from leyden.server.gateway.errors import GatewayError

SPARK = str(files("leyden") / "models" / "spark")
TOKENIZER = Tokenizer.load(SPARK)
QUESTION = {"role": "user", "content": "Is 2 + 3 = 5?"}


class Bare(BaseModel):
    model_config = ConfigDict(extra="forbid")
    verdict: Literal["right", "wrong"]
    sure: bool


class Verdict(Bare):
    note: str = Field(max_length=8)


WANTED: Format = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": Verdict.model_json_schema()}}


@pytest.fixture(scope="module")
def spark() -> Any:
    return AutoModelForCausalLM.from_pretrained(SPARK, dtype=torch.float32)


@pytest.fixture
async def server(tmp_path: Path, spark: Any) -> AsyncIterator[ModelServer]:
    """A server whose model is spark itself."""
    async with model_server(tmp_path) as running:
        engine = TorchEngine(spark, slots=8, tokenizer=TOKENIZER.control_json)
        gateway = running.service.gateway
        assert gateway is not None
        gateway.models = {name: replace(policy, engine=engine) for name, policy in gateway.models.items()}
        await running.new_attempt()
        yield running
        engine.close()


async def test_the_openai_client_parses_the_format_it_requested(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": [QUESTION], "n": 3, "response_format": Verdict}
    answer = await client.chat.completions.parse(**asked)
    assert all(isinstance(choice.message.parsed, Verdict) for choice in answer.choices)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    calls = (await server.episode()).calls
    assert len(calls) == 3 and calls[0].request["response_format"]["type"] == "json_schema"
    for made in calls:
        assert made.allowed is not None and len(made.allowed) == len(made.completion_ids)
        assert 0.0 in made.allowed  # a key of the schema is not the model's choice
        assert list(made.chosen) == [place for place, share in enumerate(made.allowed) if share >= MIN_ALLOWED_MASS]
        assert made.unusable == (None if made.chosen else "chosen by a grammar")


async def test_an_answer_in_a_format_is_streamed_and_continued(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "response_format": WANTED}
    stream = await client.chat.completions.create(**asked, messages=[QUESTION], stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    Verdict.model_validate_json(text)
    more = [QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "Really?"}]
    second = await client.chat.completions.create(**asked, messages=more)
    Verdict.model_validate_json(second.choices[0].message.content or "")
    await server.check(calls=2)


async def test_any_object_can_be_requested(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": [QUESTION], "max_tokens": 40, "n": 8}
    answer = await client.chat.completions.create(**asked, response_format={"type": "json_object"})
    for choice in answer.choices:
        text = choice.message.content or ""
        assert text.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(text), dict)


async def test_the_caller_may_take_the_likeliest_in_evaluation(server: ModelServer) -> None:
    key = await server.new_attempt("eval", Purpose.EVAL)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        asked: dict[str, Any] = {"model": "m", "messages": [QUESTION], "temperature": 0, "response_format": Verdict}
        first, second = [await client.chat.completions.parse(**asked) for _ in range(2)]
    assert first.choices[0].message.parsed == second.choices[0].message.parsed is not None


async def test_the_anthropic_client_parses_the_format_it_requested(server: ModelServer) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=server.key, max_retries=0) as client:
        asked: dict[str, Any] = {"model": "m", "max_tokens": 200, "messages": [QUESTION], "output_format": Bare}
        answer = await client.messages.parse(**asked)
        assert isinstance(answer.parsed_output, Bare)
        old = {"output_format": {"type": "json_schema", "schema": Verdict.model_json_schema()}}
        written = await client.messages.create(model="m", max_tokens=200, messages=[QUESTION], extra_body=old)
        Verdict.model_validate_json(written.content[0].text)
    assert all(made.allowed for made in (await server.episode()).calls)


async def test_langchains_structured_output(server: ModelServer) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{server.url}/v1", api_key=server.key, model="m", max_retries=0)
    answer = await model.with_structured_output(Verdict).ainvoke([("user", "Is 2 + 3 = 5?")])
    assert isinstance(answer, Verdict)


async def test_the_agents_sdks_output_type_beside_its_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool

    def add(a: int, b: int) -> int:
        return a + b

    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    async with model_server(tmp_path) as server:
        key = await server.new_attempt()
        lines = [call("add", '{"a": 2, "b": 3}') + END, SAID + END]
        server.lines = list(lines)
        model = OpenAIChatCompletionsModel("m", openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key))
        agent = Agent(name="judge", output_type=Verdict, tools=[function_tool(add)], model=model)
        result = await Runner.run(agent, "Is 2 + 3 = 5?")
        assert result.final_output == Verdict.model_validate_json(SAID)
        for asked, line in zip(server.engine.requests, lines, strict=True):
            assert await allows(asked, line)
        # an engine that does not say what a grammar left to it is not trained on
        assert [made.unusable for made in (await server.check(calls=2)).calls] == ["chosen by a grammar"] * 2


MULTIPLES = [{"multipleOf": 997}, {"multipleOf": 991}]


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("format", [{}, {"type": "text"}, {"type": "json_object", "json_schema": None}])
async def test_formats_that_say_little_are_taken_as_they_are_meant(client: openai.AsyncOpenAI, format: Any) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": [QUESTION], "max_tokens": 5, "response_format": format}
    assert (await client.chat.completions.create(**asked)).choices[0].message.content is not None


@pytest.mark.parametrize(
    ("format", "why"),
    [
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "the schema of a json_schema"),
        ({"type": "regex"}, "a json_object"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}, "objekt"),
        ({"type": "json_schema", "json_schema": {"strict": True, "schema": {"not": {}}}}, "not"),
        ({"type": "json_schema", "json_schema": {"strict": True, "schema": {"multipleOf": 999983}}}, "multipleOf"),
        ({"type": "json_schema", "json_schema": {"strict": True, "schema": {"multipleOf": 1e-9}}}, "multipleOf"),
        ({"type": "json_schema", "json_schema": {"strict": True, "schema": {"allOf": MULTIPLES}}}, "multipleOf"),
        ({"type": "json_schema", "json_schema": {"strict": True, "schema": {"enum": ["x" * 200_000]}}}, "characters"),
        ({"type": "json_schema", "json_schema": {"strict": True, "schema": deep(900)}}, "cannot be enforced"),
    ],
)
async def test_a_format_that_cannot_be_followed_is_a_400(client: openai.AsyncOpenAI, format: Any, why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why):
        await client.chat.completions.create(model="m", messages=[QUESTION], response_format=format)


async def test_thousands_of_huge_multiples_are_refused_at_once(client: openai.AsyncOpenAI) -> None:
    schema = {"allOf": [{"multipleOf": 1e300}] * 5400}
    format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError, match="multipleOf"):
        await client.chat.completions.create(model="m", messages=[QUESTION], response_format=format, timeout=20)


# The grammars by themselves, with what a model could say

SAID = '{"verdict": "right", "sure": true, "note": "so"}'
CALL = call("add", '{"a": 1}')


on_one_loop = pytest.mark.asyncio(loop_scope="module")


@lru_cache
def formats_of(tokenizer: Tokenizer) -> StructuredOutput:
    """What makes grammars, once for all tests of a tokenizer on one loop: it starts a process."""
    return StructuredOutput(renderer_for(tokenizer), tokenizer, len(tokenizer))


async def follows(text: str, prompt: str = "", calls: bool = False, tokenizer: Tokenizer = TOKENIZER) -> bool:
    """Whether the grammar of an answer allows a text, and then its end."""
    formats = formats_of(tokenizer)
    grammar = await formats.grammar(WANTED, tokenizer.encode(prompt), calls)
    stops = tuple(renderer_for(tokenizer).get_stop_token_ids())
    asked = EngineRequest((), Sampling(), stops, 1, "s", grammar=grammar)
    return await allows(asked, text + END, tokenizer)


async def allows(asked: EngineRequest, text: str, tokenizer: Tokenizer = TOKENIZER) -> bool:
    """Whether a completion may be this."""
    at = await GrammarCompiler(tokenizer.control_json, len(tokenizer)).new_matcher(asked.grammar or "", asked.stop_ids)
    for id in tokenizer.encode(text):
        bits = at.allowed_bitmask()
        if not bits[id // 8] >> id % 8 & 1:
            return False
        at.accept(id)
    return True


def without_marks(*marks: str) -> Tokenizer:
    """Spark's tokenizer, had it no such marks."""
    document = json.loads((Path(SPARK) / "tokenizer.json").read_text())
    for token in document["added_tokens"]:
        if token["content"] in marks:
            renamed = f"reserved_{token['id']}"
            if token["content"] in document["model"]["vocab"]:
                document["model"]["vocab"][renamed] = document["model"]["vocab"].pop(token["content"])
            token["content"] = renamed
    return Tokenizer(document, TOKENIZER.config, "without")


@pytest.mark.parametrize("text", [SAID, SAID.replace(" ", ""), json.dumps(json.loads(SAID), indent=2)])
@on_one_loop
async def test_json_may_be_written_as_the_model_likes(text: str) -> None:
    assert await follows(text) and await follows(text, calls=True)


@pytest.mark.parametrize("text", ["Yes.", SAID + " ", " " + SAID, SAID[:-1], '{"sure": true}', CALL])
@on_one_loop
async def test_nothing_else_is_an_answer(text: str) -> None:
    assert not await follows(text)


@on_one_loop
async def test_an_answer_may_reason_first_where_the_model_has_tokens_for_that() -> None:
    assert await follows(f"<think>\nHm.\n</think>\n\n{SAID}") and await follows(f"<think></think>{SAID}")
    assert not await follows(f"<think>{SAID}") and not await follows(f"Hm.</think>{SAID}")
    assert not await follows(f"<think>Hm.</think>{SAID}", tokenizer=without_marks("<think>", "</think>"))


@on_one_loop
async def test_reasoning_that_the_prompt_has_started_is_ended_first() -> None:
    assert await follows(f"Hm.\n</think>\n\n{SAID}", prompt="<|im_start|>assistant\n<think>\n")
    assert not await follows(SAID, prompt="<|im_start|>assistant\n<think>\n")
    assert await follows(SAID, prompt="<think>\nHm.</think><|im_start|>assistant\n")


@pytest.mark.parametrize("tokenizer", [TOKENIZER, without_marks("<tool_call>", "</tool_call>")], ids=["mark", "text"])
@on_one_loop
async def test_tool_calls_may_replace_an_answer_where_tools_are_offered(tokenizer: Tokenizer) -> None:
    assert await follows(CALL, calls=True, tokenizer=tokenizer)
    assert await follows(f"{CALL}\n{CALL}", calls=True, tokenizer=tokenizer)
    assert await follows(f"<think>Hm.</think>\n{CALL}", calls=True, tokenizer=tokenizer)
    assert await follows(SAID, calls=True, tokenizer=tokenizer)
    assert not await follows(f"I shall add. {CALL}", calls=True, tokenizer=tokenizer)


async def test_a_model_whose_answers_have_another_form_is_not_held_to_one() -> None:
    renderer = renderer_for(TOKENIZER)

    class Channelled(type(renderer)):
        def _answer(self, message: Any, text: str, index: int) -> Any:
            return super()._answer(message, f"final: {text}", index)

    formats = StructuredOutput(Channelled(TOKENIZER, renderer.form), TOKENIZER, len(TOKENIZER))
    with pytest.raises(GatewayError, match="wraps its answers"):
        await formats.grammar(WANTED, [], calls=False)


@pytest.mark.parametrize("why", ["takes one call", "takes no call"])
async def test_a_template_that_refuses_calls_is_tried_with_one_call_and_then_refused(why: str) -> None:
    renderer = renderer_for(TOKENIZER)

    class Picky(type(renderer)):
        def _answer(self, message: Any, text: str, index: int) -> Any:
            if len(message.get("tool_calls") or ()) > (why == "takes one call"):
                raise TemplateError(why)
            return super()._answer(message, text, index)

    formats = StructuredOutput(Picky(TOKENIZER, renderer.form), TOKENIZER, len(TOKENIZER))
    if why == "takes one call":
        assert "calls" in await formats.grammar(WANTED, [], calls=True)
        return
    with pytest.raises(GatewayError, match="not both"):
        await formats.grammar(WANTED, [], calls=True)
    assert await formats.grammar(WANTED, [], calls=False)


COSTLY: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "costly",
        "schema": {"type": "string", "allOf": [{"pattern": f".*a{{{i}}}.*"} for i in range(1, 21)]},
    },
}


def checked(checker: GrammarChecker) -> int:
    """Return how many grammars are being checked."""
    return sum(isinstance(key, tuple) for key in checker._locks)


async def test_a_schema_that_never_finishes_is_refused_and_delays_nobody(tmp_path: Path) -> None:
    async with model_server(tmp_path) as server:
        server.lines = ['{"verdict":"right","sure":true}' + END] * 2
        assert server.service.gateway is not None
        (model,) = server.service.gateway.models.values()
        checker = model.structured_output._checker
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=await server.new_attempt()) as client:

            def ask(format: Any, name: str = "x") -> Any:
                named = {**format, "json_schema": {**format["json_schema"], "name": name, "strict": True}}
                return client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "?"}], response_format=named
                )

            costly = [asyncio.create_task(ask(COSTLY, f"x{n}")) for n in range(4)]
            left = asyncio.create_task(ask({**COSTLY, "json_schema": {"name": "x", "schema": LEFT}}))
            await eventually(lambda: checked(checker) == 2)
            left.cancel()  # its caller hangs up: its check ends although it would take for ever
            await eventually(lambda: checked(checker) == 1)
            refused = await asyncio.gather(*costly, return_exceptions=True)
            for error in refused:
                assert isinstance(error, openai.BadRequestError) and "simplify its schema" in str(error), error
            assert (await ask(BARE)).choices[0].message.content.startswith("{")
            with pytest.raises(openai.BadRequestError, match="simplify its schema"):  # it is remembered
                await ask(COSTLY)
    assert not checker._locks


@pytest.mark.slow
async def test_a_server_ends_while_a_schema_that_never_finishes_is_checked(tmp_path: Path) -> None:
    async with asyncio.timeout(120):
        async with model_server(tmp_path) as server:
            assert server.service.gateway is not None
            (model,) = server.service.gateway.models.values()
            checker = model.structured_output._checker
            key = await server.new_attempt()
            client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            question: Any = {"model": "m", "messages": [{"role": "user", "content": "?"}], "response_format": COSTLY}
            asking = asyncio.create_task(client.chat.completions.create(**question))
            await eventually(lambda: checked(checker) == 1)
        with pytest.raises(openai.OpenAIError):
            await asking
        await client.close()
    assert not checker._locks


LEFT = {"type": "string", "allOf": [{"pattern": f".*b{{{i}}}.*"} for i in range(1, 21)]}
BARE: Any = {"type": "json_schema", "json_schema": {"name": "bare", "schema": Bare.model_json_schema()}}


# Tool calls that are held to their tools

STRICT: Any = {
    "type": "function",
    "function": {"name": "judge", "strict": True, "parameters": Verdict.model_json_schema()},
}
LOOSE: Any = {"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "judge"}}])
async def test_a_required_call_follows_its_strict_schema_and_the_allowed_mass_is_recorded(
    server: ModelServer, client: openai.AsyncOpenAI, choice: Any
) -> None:
    tools = [STRICT] if choice == "required" else [LOOSE, STRICT]
    asked: dict[str, Any] = {"model": "m", "messages": [QUESTION], "tools": tools, "tool_choice": choice, "n": 2}
    answer = await client.chat.completions.create(**asked, max_tokens=200)
    for given in answer.choices:
        if given.finish_reason == "length":  # it may go on calling
            continue
        for made in given.message.tool_calls or ():
            assert made.type == "function" and made.function.name == "judge"
            Verdict.model_validate_json(made.function.arguments)
    assert any(given.message.tool_calls for given in answer.choices)
    for recorded in (await server.episode()).calls:
        assert recorded.allowed is not None and 0.0 in recorded.allowed
        assert not server.tokenizer.decode((await server.episode()).prompt_ids(recorded)).endswith("<tool_call>\n")


async def held(text: str, mode: Literal["auto", "required"], *tools: Any, parallel: bool = True) -> bool | None:
    """Whether the grammar of calls allows a text and then its end; None where there is no grammar."""
    messages = (QUESTION,)
    request = GenerationRequest("m", messages, tools=tools, tool_choice=ToolChoice(mode), parallel_tool_calls=parallel)
    grammar = await formats_of(TOKENIZER).call_grammar(request, [])
    if grammar is None:
        return None
    matcher = await GrammarCompiler(TOKENIZER.control_json, len(TOKENIZER)).new_matcher(
        grammar, renderer_for(TOKENIZER).get_stop_token_ids()
    )
    for id in TOKENIZER.encode(text + END):
        allowed = matcher.allowed_bitmask()
        if not allowed[id // 8] >> id % 8 & 1:
            return False
        matcher.accept(id)
    return True


@on_one_loop
async def test_strict_tools_are_held_to_their_schema_and_others_to_an_object() -> None:
    right, wrong, loose = call("judge", SAID), call("judge", '{"verdict": "so"}'), call("note", '{"x": [1]}')
    for text in ("Just text.", right, f"I shall. {right}", f"{loose}{right}", "<think>Hm.</think>\n" + right):
        assert await held(text, "auto", STRICT, LOOSE)
    for text in (wrong, call("note", "[1]"), call("unknown", "{}")):
        assert not await held(text, "auto", STRICT, LOOSE)
    assert await held(right, "required", STRICT)
    assert await held(f"{right}\n{loose}", "required", STRICT, LOOSE)
    assert await held("Just text.", "required", STRICT) is False
    assert await held(wrong, "auto", LOOSE) is None  # nothing is strict


@on_one_loop
async def test_without_parallel_calls_a_grammar_allows_one_call_at_the_end() -> None:
    right, loose = call("judge", SAID), call("note", "{}")
    for text in ("Just text.", right, f"I shall. {right}"):
        assert await held(text, "auto", STRICT, LOOSE, parallel=False)
    for text in (f"{right}\n{loose}", f"{right} Done."):
        assert await held(text, "auto", STRICT, LOOSE, parallel=False) is False
    assert await held(right, "required", STRICT, LOOSE, parallel=False)
    assert await held(f"{right}\n{loose}", "required", STRICT, LOOSE, parallel=False) is False


@on_one_loop
async def test_a_strict_schema_that_cannot_be_enforced_is_left_to_validation() -> None:
    odd: Any = {"type": "function", "function": {"name": "odd", "strict": True, "parameters": {"not": {}}}}
    assert await held("Text", "auto", odd) is None
    assert await held(call("odd", "{}"), "required", odd)
    assert not await held("Text", "required", odd)


@on_one_loop
async def test_a_strict_tool_whose_schema_is_no_object_takes_any_object() -> None:
    odd: Any = {"type": "function", "function": {"name": "odd", "strict": True, "parameters": 5}}
    assert await held(call("odd", '{"x": 1}'), "auto", odd)
    assert not await held(call("odd", "5"), "auto", odd)


async def test_without_the_allowed_mass_strict_is_validated_and_counted_in_training_and_enforced_elsewhere(
    tmp_path: Path,
) -> None:
    async with model_server(tmp_path) as server:
        for purpose in (Purpose.TRAIN, Purpose.EVAL):
            key = await server.new_attempt(f"strict-{purpose}", purpose)
            server.lines = [call("judge", SAID) + END, call("judge", "{}") + END]
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                for _ in range(2):
                    await client.chat.completions.create(model="m", messages=[QUESTION], tools=[STRICT])
            assert (server.engine.requests[-1].grammar is None) == (purpose is Purpose.TRAIN)
            unusable = [made.unusable for made in (await server.check(calls=2)).calls]
            assert unusable == [None if purpose is Purpose.TRAIN else "chosen by a grammar"] * 2
        assert server.service.gateway is not None
        strict = server.service.gateway.recorder.strict
        await eventually(lambda: strict.counts == {"valid": 1, "invalid": 1})
        await strict.close()


async def test_a_schema_that_cannot_be_checked_is_counted_so_and_holds_up_nobody(tmp_path: Path) -> None:
    backtracking: Any = {
        "type": "function",
        "function": {
            "name": "judge",
            "strict": True,
            "parameters": {"properties": {"q": {"type": "string", "pattern": f"^(?=a){'(a|a)' * 40}$"}}},
        },
    }
    async with model_server(tmp_path) as server:
        key = await server.new_attempt("strict", Purpose.TRAIN)
        server.lines = [call("judge", json.dumps({"q": "a" * 40 + "b"})) + END]
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            await client.chat.completions.create(model="m", messages=[QUESTION], tools=[backtracking])
        assert server.service.gateway is not None
        strict = server.service.gateway.recorder.strict
        await eventually(lambda: strict.counts == {"unchecked": 1})
        await strict.close()
        await server.check(calls=1)
