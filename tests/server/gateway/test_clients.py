"""The conversation that every client here has, unmodified: two sums at once, the answer, then a second question.

Whatever a framework makes of our answers on the way, each of its calls continues the one before, token for token.
"""

import asyncio
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from modelserving import END, ModelServer, call, model_server

from leyden.records import PromptOrigin

SYSTEM = "You can add."
FIRST, SECOND = "What is 2 + 3, and 4 + 5?", "And 10 + 20?"
ANSWERS = ["They are 5 and 9.", "It is 30: «dreißig» 🎉"]
LINES = [
    "I shall add them. " + call("add", '{"b":3,  "a": 2}') + call("add", '{"a": 4, "b": 5}') + END,
    ANSWERS[0] + END,
    call("add", '{"a": 10, "b": 20}') + END,
    ANSWERS[1] + END,
]
NPM = Path(__file__).parent / "npm"
# These cannot share our environment: autogen-core wants protobuf 5, litellm openai 2 (or a certifi newer than ours).
APART = ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5", "litellm[mcp]==1.106.0", "openai==2.54.0")
streamed_and_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModelServer]:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    async with model_server(tmp_path) as running:
        await running.new_attempt()
        running.lines = list(LINES)
        yield running


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def check(server: ModelServer, seen: list[str], stream: bool) -> None:
    """The record holds what the model said and the client saw, and each turn begins with the tokens of the last."""
    episode = await server.check(calls=4)
    assert seen == ANSWERS
    assert {made.request.get("stream", False) for made in episode.calls} == {stream}
    assert [made.prompt_origin for made in episode.calls] == [PromptOrigin.FRESH, *[PromptOrigin.CONTINUED] * 3]
    assert [made.parent for made in episode.calls[1:]] == [made.id for made in episode.calls[:-1]]
    assert [server.tokenizer.decode(made.completion_ids) for made in episode.calls] == LINES
    whole = server.tokenizer.decode(episode.prompt_ids(episode.calls[-1]))
    results = [text.partition("</tool_response>")[0].strip() for text in whole.split("<tool_response>")[1:]]
    assert results == ["5", "9", "30"]


async def talk_to_graph(model: Any, stream: bool) -> list[str]:
    """LangGraph's agent, with a memory of its own."""
    from langchain.agents import create_agent
    from langgraph.checkpoint.memory import InMemorySaver

    agent = create_agent(model, tools=[add], system_prompt=SYSTEM, checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "1"}}
    seen = []
    for question in (FIRST, SECOND):
        asked: Any = {"messages": [{"role": "user", "content": question}]}
        if not stream:
            answer = await agent.ainvoke(asked, thread)
            seen.append(answer["messages"][-1].text)
            continue
        texts: dict[str | None, str] = {}
        async for chunk, _ in agent.astream(asked, thread, stream_mode="messages"):
            texts[chunk.id] = texts.get(chunk.id, "") + chunk.text
        seen.append(list(texts.values())[-1])
    return seen


@streamed_and_not
async def test_langgraph_on_openai(server: ModelServer, stream: bool) -> None:
    from langchain_openai import ChatOpenAI

    where: Any = {"base_url": f"{server.url}/v1", "api_key": server.key}
    model = ChatOpenAI(model="spark", streaming=stream, **where)
    await check(server, await talk_to_graph(model, stream), stream)


@streamed_and_not
async def test_langgraph_on_anthropic(server: ModelServer, stream: bool) -> None:
    from langchain_anthropic import ChatAnthropic

    where: Any = {"base_url": server.url, "api_key": server.key}
    model = ChatAnthropic(model="spark", max_tokens=500, streaming=stream, **where)
    await check(server, await talk_to_graph(model, stream), stream)


@streamed_and_not
@pytest.mark.parametrize("api", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
async def test_openai_agents(server: ModelServer, stream: bool, api: str) -> None:
    import agents
    from agents import Agent, RunConfig, Runner, function_tool
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key) as client:
        model = getattr(agents, api)("spark", client)
        agent = Agent("adder", instructions=SYSTEM, model=model, tools=[function_tool(add)])
        untraced = RunConfig(tracing_disabled=True)
        said: Any = []
        seen = []
        for question in (FIRST, SECOND):
            said.append({"role": "user", "content": question})
            if stream:
                result = Runner.run_streamed(agent, said, run_config=untraced)
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, said, run_config=untraced)
            said = result.to_input_list()
            seen.append(result.final_output)
    await check(server, seen, stream)


async def ask_autogen(url: str, key: str, stream: bool, system: str, questions: list[str]) -> list[str]:
    """AutoGen's assistant, which keeps its own context. (This source is run where AutoGen is installed.)"""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    can = {"vision": False, "function_calling": True, "json_output": False, "structured_output": False}
    model_info = {**can, "family": "unknown"}
    client = OpenAIChatCompletionClient(model="spark", base_url=f"{url}/v1", api_key=key, model_info=model_info)
    # Its other way to go on after tools, reflect_on_tool_use, leaves them out of the request: that is another prompt.
    talk: Any = {"system_message": system, "max_tool_iterations": 2, "model_client_stream": stream}
    agent = AssistantAgent("adder", client, tools=[add], **talk)
    seen = []
    for question in questions:
        if stream:
            *_, result = [event async for event in agent.run_stream(task=question)]
        else:
            result = await agent.run(task=question)
        seen.append(result.messages[-1].content)
    await client.close()
    return seen


async def ask_litellm(url: str, key: str, stream: bool, system: str, questions: list[str]) -> list[str]:
    """A loop over litellm's two functions, one for each question. (See above.)"""
    import litellm

    number = {"type": "number"}
    parameters = {"type": "object", "properties": {"a": number, "b": number}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    messages: list[Any] = [{"role": "system", "content": system}]
    request: Any = {"model": "openai/spark", "api_base": f"{url}/v1", "api_key": key, "stream": stream, "tools": tools}
    for question, wait in zip(questions, (False, True), strict=True):
        messages.append({"role": "user", "content": question})
        while messages[-1]["role"] != "assistant":
            request["messages"] = messages
            answer = await litellm.acompletion(**request) if wait else litellm.completion(**request)
            if stream:
                chunks = [chunk async for chunk in answer] if wait else list(answer)
                answer = litellm.stream_chunk_builder(chunks, messages=messages)
            message = answer.choices[0].message
            messages.append(message.model_dump())
            for made in message.tool_calls or ():
                result = str(sum(json.loads(made.function.arguments).values()))
                messages.append({"role": "tool", "tool_call_id": made.id, "content": result})
    return [said["content"] for said in messages if said["role"] == "assistant" and not said.get("tool_calls")]


@pytest.mark.slow  # installs an environment
@streamed_and_not
@pytest.mark.parametrize("ask", [ask_autogen, ask_litellm])
async def test_clients_of_another_environment(server: ModelServer, stream: bool, ask: Callable[..., Any]) -> None:
    home = await asyncio.to_thread(installed, "python", " ".join(APART).encode(), _install_python)
    parts = ["import asyncio, json, sys", "from typing import Any", inspect.getsource(ask)]
    script = "\n".join([*parts, f"print(json.dumps(asyncio.run({ask.__name__}(**json.load(sys.stdin)))))"])
    seen = await run(server, stream, home / "bin" / "python", "-c", script, LITELLM_LOCAL_MODEL_COST_MAP="True")
    await check(server, seen, stream)


@streamed_and_not
async def test_openai_from_npm(server: ModelServer, stream: bool) -> None:
    if not shutil.which("npm") or not shutil.which("node"):
        pytest.skip("this machine has no npm and node")
    sources = b"".join(path.read_bytes() for path in sorted(NPM.glob("*.*")))
    home = await asyncio.to_thread(installed, "npm", sources, _install_npm)
    await check(server, await run(server, stream, "node", home / "talk.mjs"), stream)


async def run(server: ModelServer, stream: bool, *command: str | Path, **environment: str) -> list[str]:
    """Have the conversation in another process; the answers it saw."""
    asked = {"url": server.url, "key": server.key, "stream": stream, "system": SYSTEM, "questions": [FIRST, SECOND]}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, env={**os.environ, **environment}
    )
    out, err = await process.communicate(json.dumps(asked).encode())
    assert process.returncode == 0, err.decode()
    seen: list[str] = json.loads(out.splitlines()[-1])
    return seen


def installed(name: str, recipe: bytes, install: Callable[[Path], None]) -> Path:
    """A client in a folder of its own, installed once for each recipe and moved to its place only when whole."""
    bench = Path(__file__).parents[3] / ".bench"
    home = bench / f"client-{name}-{blake2b(recipe, digest_size=4).hexdigest()}"
    if not home.exists():
        bench.mkdir(exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f"new-{name}-", dir=bench))
        try:
            install(new)
            new.rename(home)
        except OSError:
            if not home.exists():  # another test process may have been faster
                raise
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return home


def _install_python(home: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    subprocess.run([home / "bin" / "python", "-m", "pip", "install", "--quiet", *APART], check=True)


def _install_npm(home: Path) -> None:
    shutil.copytree(NPM, home, dirs_exist_ok=True)
    subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=home, check=True, capture_output=True)
