"""Responses that the server stores: continued by their id, referred to, read and deleted, also after a restart."""

from pathlib import Path
from typing import Any

import openai
import pytest
from databases import Postgres
from modelserving import END, ModelServer, call, model_server
from responses_oracle import check_response

from leyden.records import PromptOrigin
from leyden.server.gateway.dialects.responses.items import seal_reasoning
from leyden.server.gateway.dialects.responses.stored import StoredResponse

ADD: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    "strict": False,
}
SHELL: Any = {"type": "custom", "name": "shell", "description": "Run a command."}
CALL = call("add", '{"a": 2, "b": 3}') + END
QUESTION = "What is 2 + 3?"


def result(response: Any, output: str = "5") -> Any:
    """The result of the only call of a response."""
    (made,) = [item for item in response.output if item.type == "function_call"]
    return {"type": "function_call_output", "call_id": made.call_id, "output": output}


async def test_a_conversation_is_continued_by_the_id_of_its_last_response(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    server.lines = [CALL, "It is 5." + END, "You are welcome!" + END]
    options: Any = {"model": "m", "instructions": "You can add.", "tools": [ADD]}
    first = await client.responses.create(input=QUESTION, **options)
    second = await client.responses.create(input=[result(first)], previous_response_id=first.id, **options)
    assert (second.output_text, second.previous_response_id) == ("It is 5.", first.id)
    async with client.responses.stream(input="Thanks", previous_response_id=second.id, **options) as stream:
        third = await stream.get_final_response()
    assert third.output_text == "You are welcome!"
    episode = await server.check(calls=3)
    assert [made.prompt_origin for made in episode.calls] == [PromptOrigin.FRESH, *[PromptOrigin.CONTINUED] * 2]
    roles = [message["role"] for message in episode.messages(episode.calls[2])]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]


async def test_instructions_are_not_carried_over(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = ["A." + END, "B." + END]
    first = await client.responses.create(model="m", input="One", instructions="Be brief.")
    await client.responses.create(model="m", input="Two", instructions="Be long.", previous_response_id=first.id)
    episode = await server.check(calls=2)
    assert [m["content"] for m in episode.messages(episode.calls[1])] == ["Be long.", "One", "A.", "Two"]


@pytest.mark.parametrize("again", ["everything", "all but the answer", "the answer", "the user's message"])
async def test_what_a_client_sends_again_is_kept_once(
    server: ModelServer, client: openai.AsyncOpenAI, again: str
) -> None:
    server.lines = ["Hello." + END, CALL, "It is 5." + END]
    greeted = await client.responses.create(model="m", input="Hi", tools=[ADD])
    first = await client.responses.create(model="m", input=QUESTION, tools=[ADD], previous_response_id=greeted.id)
    asked = {"role": "user", "content": QUESTION}
    answer = [item.model_dump(exclude_unset=True) for item in first.output]
    before = [{"role": "user", "content": "Hi"}, *[item.model_dump() for item in greeted.output], asked]
    repeated: Any = {
        "everything": [*before, *answer],
        "all but the answer": before,
        "the answer": answer,
        "the user's message": [asked],
    }
    given = [*repeated[again], result(first)]
    await client.responses.create(model="m", input=given, tools=[ADD], previous_response_id=first.id)
    episode = await server.check(calls=3)
    roles = [message["role"] for message in episode.messages(episode.calls[2])]
    assert roles == ["user", "assistant", "user", "assistant", "tool"]
    assert episode.calls[2].prompt_origin is PromptOrigin.CONTINUED


async def test_a_message_that_the_user_repeats_is_new(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = ["One." + END, "Two." + END]
    first = await client.responses.create(model="m", input="Go on.")
    await client.responses.create(model="m", input="Go on.", previous_response_id=first.id)
    episode = await server.check(calls=2)
    assert [m["content"] for m in episode.messages(episode.calls[1])] == ["Go on.", "One.", "Go on."]


@pytest.mark.parametrize(
    "again",
    [["Hi", "Hello.", "Go on.", "One."], ["Hi", "Hello.", "Go on."], ["Go on.", "One."], ["Go on."]],
)
async def test_what_is_sent_again_before_a_new_message_is_kept_once(
    server: ModelServer, client: openai.AsyncOpenAI, again: list[str]
) -> None:
    server.lines = ["Hello." + END, "One." + END, "Two." + END]
    greeted = await client.responses.create(model="m", input="Hi")
    first = await client.responses.create(model="m", input="Go on.", previous_response_id=greeted.id)
    given: Any = [{"role": "assistant" if text.endswith(("lo.", "e.")) else "user", "content": text} for text in again]
    given.append({"role": "user", "content": "Go on."})
    await client.responses.create(model="m", input=given, previous_response_id=first.id)
    episode = await server.check(calls=3)
    said = [message["content"] for message in episode.messages(episode.calls[2])]
    assert said == ["Hi", "Hello.", "Go on.", "One.", "Go on."]
    assert episode.calls[2].prompt_origin is PromptOrigin.CONTINUED


async def test_items_are_given_back_by_reference(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = ["<think>\nSum them.\n</think>\n\nI add. " + CALL, "It is 5." + END]
    first = await client.responses.create(model="m", input=QUESTION, tools=[ADD])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    references: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    references[0].pop("type")  # it may be left out
    listed = await client.responses.input_items.list(first.id)
    references = [{"type": "item_reference", "id": listed.data[0].id}, *references, result(first)]
    await client.responses.create(model="m", input=references, tools=[ADD])
    assert (await server.check(calls=2)).calls[1].prompt_origin is PromptOrigin.CONTINUED
    with pytest.raises(openai.NotFoundError, match="no item"):
        await client.responses.create(model="m", input=[{"type": "item_reference", "id": "msg_call-0_0"}])


async def test_a_response_is_built_once_for_all_items_that_are_given_back_by_reference(
    server: ModelServer, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[StoredResponse] = []
    list_items = StoredResponse.input_items

    def counted(response: StoredResponse) -> list[dict[str, Any]]:
        built.append(response)
        return list_items(response)

    server.lines = ["Hello." + END, "Hello again." + END]
    said: Any = [{"role": "user", "content": f"{number}"} for number in range(50)]
    first = await client.responses.create(model="m", input=said)
    listed = await client.responses.input_items.list(first.id, limit=100, order="asc")
    references: Any = [{"type": "item_reference", "id": item.id} for item in (*listed.data, *first.output)]
    monkeypatch.setattr(StoredResponse, "input_items", counted)
    await client.responses.create(model="m", input=[*references, {"role": "user", "content": "Hi"}])
    episode = await server.check(calls=2)
    assert (episode.calls[1].prompt_origin, episode.calls[1].kept_messages) == (PromptOrigin.CONTINUED, 51)
    assert len(built) == 1


async def test_many_references_to_a_large_item_are_refused(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = ["Long." + END]
    first = await client.responses.create(model="m", input="x" * 30_000)
    (item,) = (await client.responses.input_items.list(first.id)).data
    references: Any = [{"type": "item_reference", "id": item.id}] * 1200
    with pytest.raises(openai.BadRequestError, match="the items that are referred to have more than 33554432 bytes"):
        await client.responses.create(model="m", input=references)


async def test_outputs_may_stand_between_the_calls_of_one_answer(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    server.lines = [CALL.removesuffix(END) + CALL, "They are 5." + END]
    first = await client.responses.create(model="m", input=QUESTION, tools=[ADD], store=False)
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    for item in first.output:
        assert item.type == "function_call"
        history += [item.model_dump(), {"type": "function_call_output", "call_id": item.call_id, "output": "5"}]
    await client.responses.create(model="m", input=history, tools=[ADD], store=False)
    assert (await server.check(calls=2)).calls[1].prompt_origin is PromptOrigin.CONTINUED


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
async def test_stored_responses_survive_a_restart(tmp_path: Path, postgres: Postgres | None, database: str) -> None:
    if database == "postgresql" and postgres is None:
        pytest.skip("no PostgreSQL server on this machine")
    location = postgres.new_database() if database == "postgresql" and postgres is not None else None
    tools: Any = [ADD, SHELL, {"type": "namespace", "name": "crm", "description": "", "tools": [ADD]}]
    options: Any = {"model": "m", "tools": tools, "instructions": "You can add.", "metadata": {"a": "b"}}
    async with model_server(tmp_path, location) as server:
        key = await server.new_attempt()
        run, attempt = server.run, server.attempt
        server.lines = [
            "<think>\nSum.\n</think>\n\nI add. " + call("crm__add", '{"a": 2, "b": 3}') + END,
            "Gone." + END,
        ]
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            first = await client.responses.create(input=QUESTION, max_output_tokens=100, **options)
            deleted = await client.responses.create(model="m", input="Delete me.")
            await client.responses.delete(deleted.id)
    async with model_server(tmp_path, location) as server:
        server.run, server.attempt = run, attempt
        server.lines = ["It is 5." + END]
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            again = await client.responses.retrieve(first.id)
            check_response(again.model_dump(mode="json", by_alias=True, exclude_unset=True))
            assert again.model_dump(exclude={"completed_at"}) == first.model_dump(exclude={"completed_at"})
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(deleted.id)
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="m", input="Go on.", previous_response_id=deleted.id)
            assert refused.value.code == "previous_response_not_found"
            second = await client.responses.create(input=[result(first)], previous_response_id=first.id, **options)
            assert second.output_text == "It is 5."
        episode = await server.check(calls=3)  # the record keeps the deleted one
        assert episode.calls[2].prompt_origin is PromptOrigin.CONTINUED


async def test_a_response_belongs_to_its_attempt_and_may_not_be_stored(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    server.lines = ["A." + END, "B." + END, "C." + END]
    mine = await client.responses.create(model="m", input="One")
    unstored = await client.responses.create(model="m", input="Two", store=False)
    chat = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Three"}])
    other = client.with_options(api_key=await server.new_attempt("other"))
    for asking, id in (other, mine.id), (client, unstored.id), (client, f"resp_{chat.id[9:]}"), (client, "resp_1"):
        with pytest.raises(openai.NotFoundError, match="is stored for this attempt"):
            await asking.responses.retrieve(id)
        with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
            await asking.responses.create(model="m", input="Go on.", previous_response_id=id)


async def test_input_items_are_listed(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = [CALL, "It is 5." + END]
    first = await client.responses.create(model="m", input=QUESTION, tools=[ADD], instructions="You can add.")
    second = await client.responses.create(
        model="m", input=[result(first)], tools=[ADD], instructions="You can add.", previous_response_id=first.id
    )
    items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    endless: Any = "9" * 5000
    assert len((await client.responses.input_items.list(second.id, limit=endless)).data) == 3
    newest = await client.responses.input_items.list(second.id, limit=1)
    assert ([item.id for item in newest.data], newest.has_more) == ([items[-1].id], True)


async def test_the_output_of_a_custom_tool_is_listed_as_such(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = [call("shell", '{"input": "ls"}') + END, "Two files." + END]
    shell: Any = {"type": "custom", "name": "shell"}
    first = await client.responses.create(model="m", input="List.", tools=[shell])
    (made,) = first.output
    assert made.type == "custom_tool_call"
    output: Any = {"type": "custom_tool_call_output", "call_id": made.call_id, "output": "a b"}
    second = await client.responses.create(model="m", input=[output], tools=[shell], previous_response_id=first.id)
    listed = [item.type async for item in client.responses.input_items.list(second.id, order="asc")]
    assert listed == ["message", "custom_tool_call", "custom_tool_call_output"]


async def test_a_stored_response_includes_all_that_its_reader_names(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    server.lines = ["<think>\nHm.\n</think>\n\nYes." + END]
    made = await client.responses.create(model="m", input="Well?")
    assert made.output[0].type == "reasoning" and made.output[0].encrypted_content is None
    wanted: Any = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    read = await client.responses.retrieve(made.id, include=wanted)
    assert read.output[0].type == "reasoning" and read.output[0].encrypted_content


async def test_the_tokens_of_a_prompt_are_counted(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = [CALL, "It is 5." + END]
    first = await client.responses.create(model="m", input=QUESTION, tools=[ADD])
    follow: Any = {"model": "m", "input": [result(first)], "tools": [ADD], "previous_response_id": first.id}
    counted = await client.responses.input_tokens.count(**follow)
    second = await client.responses.create(**follow)
    assert second.usage is not None
    assert counted.input_tokens == second.usage.input_tokens


@pytest.mark.parametrize("kept", ["content", "encrypted_content", "summary"])
async def test_reasoning_comes_back_in_any_form(server: ModelServer, client: openai.AsyncOpenAI, kept: str) -> None:
    server.lines = ["<think>\nSum them.\n</think>\n\nFive." + END, "Six." + END]
    summary: Any = {"reasoning": {"summary": "auto"}} if kept == "summary" else {}
    first = await client.responses.create(
        model="m", input=QUESTION, include=["reasoning.encrypted_content"], store=False, **summary
    )
    check_response(first.model_dump(mode="json", by_alias=True, exclude_unset=True))
    thought, said = first.output
    assert thought.type == "reasoning"
    assert "Sum" not in (thought.encrypted_content or "")
    given: Any = {"summary": [], **{name: thought.model_dump()[name] for name in ("id", "type", kept)}}
    other = {"role": "user", "content": "And 3 + 3?"}
    asked = {"role": "user", "content": "So?"}  # another question, so that only the items say what was thought
    await client.responses.create(model="m", input=[asked, given, said.model_dump(), other], store=False)
    episode = await server.check(calls=2)
    assert episode.messages(episode.calls[1])[1]["reasoning_content"] == "Sum them."


async def test_sealed_reasoning_is_bounded_over_all_items_of_a_request(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": seal_reasoning("x" * (6 << 18))}
    items: Any = [{"role": "user", "content": QUESTION}, sealed, sealed, sealed]
    with pytest.raises(openai.BadRequestError, match="leave out older items") as refused:
        await client.responses.create(model="m", input=items, store=False)
    assert refused.value.param == "input[3].encrypted_content"


async def test_an_answer_may_come_back_in_another_dialect(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = [CALL, "It is 5." + END, "Bye." + END]
    function = {name: ADD[name] for name in ("name", "parameters")}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: Any = [{"type": "function", "function": function}]
    first = await client.chat.completions.create(model="m", messages=messages, tools=tools)
    (made,) = first.choices[0].message.tool_calls or ()
    assert made.type == "function"
    called = {"type": "function_call", "call_id": made.id, "name": "add", "arguments": made.function.arguments}
    history: list[Any] = [*messages, called, {"type": "function_call_output", "call_id": made.id, "output": "5"}]
    second = await client.responses.create(model="m", input=history, tools=[ADD])
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": made.id, "content": "5"}]
    messages += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "Thanks"}]
    await client.chat.completions.create(model="m", messages=messages, tools=tools)
    episode = await server.check(calls=3)
    assert [made.prompt_origin for made in episode.calls] == [PromptOrigin.FRESH, *[PromptOrigin.CONTINUED] * 2]
