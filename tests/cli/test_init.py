"""`leyden init` writes what runs: an example that trains, or what an agent of any framework lacks."""

import asyncio
import inspect
import json
import sys
import tomllib
from pathlib import Path

import pytest
from forked_commands import run_command
from modelserving import END, model_server

from leyden.cli import parser
from leyden.cli.agent_source import recognise
from leyden.config import ConfigError, read_config, read_file
from leyden.local.preflight import check_inputs
from leyden.user_code.loading import load_callable

OPENAI = """
from openai import OpenAI
client = OpenAI()

def ask(text: str) -> str:
    reply = client.chat.completions.create(model="any", messages=[{"role": "user", "content": text}])
    return reply.choices[0].message.content
"""
AGENTS = {
    "openai": OPENAI + "def solve(task):\n    return ask(task['question'])\n",
    "openai, of a text": OPENAI + "def answer(question: str) -> str:\n    return ask(question)\n",
    "openai, of a question": OPENAI + "def answer(question):\n    return ask(question)\n",
    "openai, another key": OPENAI + "def run(row):\n    return ask(row['prompt'])\n",
    "anthropic": """
from anthropic import AsyncAnthropic
client = AsyncAnthropic()

async def answer(question: str) -> str:
    said = {"role": "user", "content": question}
    reply = await client.messages.create(model="any", max_tokens=50, messages=[said])
    return reply.content[0].text
""",
    "langgraph": """
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
model = ChatOpenAI(model="any")

async def respond(state):
    return {"messages": [await model.ainvoke(state["messages"])]}

builder = StateGraph(MessagesState)
builder.add_node("respond", respond)
builder.add_edge(START, "respond")
builder.add_edge("respond", END)
graph = builder.compile()
""",
    "openai-agents": """
from agents import Agent, function_tool

@function_tool
def run(expression: str) -> str:
    return expression

agent = Agent(name="calc", model="gpt-4.1", tools=[run])
""",
    "autogen": """
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
assistant = AssistantAgent("calc", OpenAIChatCompletionClient(model="gpt-4o"))
""",
}


async def init(*arguments: str) -> None:
    options = parser("init").parse_args(["init", *arguments])
    await options.run(options)


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_of_any_framework_gets_what_it_lacks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{name.replace('-', '_').replace(', ', '_').replace(' ', '_')}_agent.py"
    path.write_text(AGENTS[name])
    await init("--from", str(path))
    framework = name.partition(",")[0]
    assert f"recognised: {framework}, " in capsys.readouterr().out
    config = read_config({**read_file(path.with_suffix(".toml")), "home": str(tmp_path / "runs")})
    check_inputs(config)
    async with model_server(tmp_path) as server:
        server.say = lambda prompt: f"It is 61.{END}"
        await server.new_attempt()
        for variable in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"):
            monkeypatch.setenv(variable, server.url + ("/v1" if variable.startswith("OPENAI") else ""))
        for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
            monkeypatch.setenv(variable, server.key)
        monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        task = json.loads((tmp_path / "tasks.jsonl").read_text().splitlines()[0])
        agent = load_callable(config.agent, config.base)
        is_async = inspect.iscoroutinefunction(agent)
        result = await (agent(task) if is_async else asyncio.to_thread(agent, task))
        episode = await server.check(calls=1)
    assert config.reward is not None and load_callable(config.reward, config.base)(task, result) == 1.0
    assert "Omar has 89 flowers" in json.dumps(episode.messages(episode.calls[0]))


def test_a_crew_and_programs_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "crew.py").write_text("from crewai import Agent, Crew\nteam = Crew(agents=[Agent()], tasks=[])\n")
    found = recognise(tmp_path / "crew.py")
    assert (found.framework, found.name, found.is_function) == ("crewai", "team", False)
    (tmp_path / "script.py").write_text("import json, sys\nprint(json.loads(sys.stdin.readline()))\n")
    assert recognise(tmp_path / "script.py").name == "python script.py"
    assert recognise(tmp_path / "agent.mjs").name == "node agent.mjs"
    (tmp_path / "lit.py").write_text("import agentlightning as agl\n@agl.rollout\ndef solve(task, llm): ...\n")
    with pytest.raises(ConfigError, match="is an agent of Agent Lightning: write a function of the task"):
        recognise(tmp_path / "lit.py")
    (tmp_path / "only.py").write_text("import openai\ndef _shorten(text): ...\ndef ask(question: str): ...\n")
    assert (recognise(tmp_path / "only.py").name, recognise(tmp_path / "only.py").takes_text) == ("ask", True)
    (tmp_path / "two.py").write_text("def ask(question): ...\ndef clean(text): ...\n")
    with pytest.raises(ConfigError, match=r"may take a task \(ask, clean\): call the agent `solve`"):
        recognise(tmp_path / "two.py")
    (tmp_path / "pick.py").write_text("class Pick:\n    async def __call__(self, task): return task['text']\n")
    found = recognise(tmp_path / "pick.py")
    assert (found.name, found.question, found.takes_text) == ("Pick", "text", False)
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="has no function that takes a task"):
        recognise(tmp_path / "empty.py")


async def test_nothing_is_overwritten_and_an_address_of_its_own_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = tmp_path / "mine.py"
    agent.write_text(AGENTS["openai"].replace("OpenAI()", "OpenAI(base_url='http://host/v1')"))
    await init("--from", str(agent), "--model", "Qwen/Qwen3-0.6B")
    assert "mine.py gives a client a base_url" in capsys.readouterr().out
    assert tomllib.loads((tmp_path / "mine.toml").read_text())["model"] == "Qwen/Qwen3-0.6B"
    with pytest.raises(ConfigError, match=r"exists: move it away"):
        await init("--from", str(agent))


async def test_tasks_and_a_reward_that_are_there_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(AGENTS["openai"])
    (tmp_path / "tasks.jsonl").write_text('{"question": "mine"}\n')
    await init("--from", str(tmp_path / "mine.py"))
    said = capsys.readouterr().out
    assert "tasks.jsonl: left as you have it" in said and "reward.py: put your own in place of the example" in said
    assert (tmp_path / "tasks.jsonl").read_text() == '{"question": "mine"}\n'
    assert (tmp_path / "mine.toml").exists() and (tmp_path / "reward.py").exists()


async def test_the_example_trains_on_the_bundled_model(tmp_path: Path) -> None:
    await init(str(tmp_path / "first try"))
    size = ["training.steps=1", "training.tasks_per_step=2", "training.group_size=2", "held_out=0"]
    done = run_command("train", "first try/first-try.toml", *size, cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "runs/first-try/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["rollouts/succeeded"] == rows[-1]["rollouts/requested"] == 4, done.stderr
