"""The AutoGen agent with a calculator runs unchanged outside Leyden and within it; its reward is the right number."""

import json
import lzma
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from example_runs import EXAMPLES, FileServer, load, run_alone, steps_of, train_example
from modelserving import END, call, model_server

TASK = {"question": "Ann has 3 bags of 14 apples. How many apples has she?", "answer": 42}
ROW = {
    "question": "Ann has 3 bags of 14 apples and eats half. How many are left?",
    "answer": "She had 3 * 14 = <<3*14=42>>42.\n42 / 2 = <<42/2=21>>21 are left.\n#### 21",
}
UNTRACEABLE = [
    {"question": "How many?", "answer": "#### 21"},
    {"question": "Ann has 3 bags of 14 apples.", "answer": "3 * 15 = <<3*15=45>>45\n#### 45"},  # 15 from nowhere
    {"question": "Ann has 3 bags of 14 and 3 of 20.", "answer": "3 * 14 = <<3*14=42>>42\n#### 42"},  # which 3?
    {"question": "Ann has 3 bags of 14 apples, 3 times.", "answer": "3 * 14 = <<3*14=42>>42\n#### 42"},
    {"question": "Ann has two bags of 2 apples.", "answer": "2 * 2 = <<2*2=4>>4\n#### 4"},  # the word or the number?
    {"question": "Ann has 3 bags of 14 apples.", "answer": "3 * 14 = <<3*14=42>>42\n#### 43"},  # not the result
    {"question": "Ann has 3 bags of 14 apples.", "answer": "3 * 14 = <<3*14=41>>41\n#### 41"},  # wrong
    {"question": "Ann has 14 apples.", "answer": "<<14=14>>14\n#### 14"},  # nothing is calculated
    {"question": "4 dogs eat 20 apples.", "answer": "4 * 4 = <<4*4=16>>16\n#### 16"},  # their legs
    {"question": "A way of 2 hours, walked 9 times.", "answer": "<<9*2=18>>18 <<18*2=36>>36\n#### 36"},  # and home
    {"question": "Which is the heaviest, 30 bags of 14 or 5 of 60?", "answer": "<<30*14=420>>420\n#### 420"},
]


def say(prompt: str) -> str:
    """A slip, too much at once, the right expression, and then what the calculator said."""
    assert TASK["question"] in prompt
    if "invalid syntax" not in prompt:
        return call("calculator", '{"expression": "3 * 14 ="}') + END
    if "\n42\n" not in prompt:
        return call("calculator", '{"expression": "total = 3 * (10 + 4)"}') + END
    return f"She has 42. #### 42{END}"


async def test_outside_of_leyden_it_needs_only_an_openai_endpoint(tmp_path: Path) -> None:
    async with model_server(tmp_path) as server:
        server.say = say
        await server.new_attempt()
        assert await run_alone(server, "calc", TASK) == "42"
        episode = await server.check(calls=3)
    assert [made.prompt_origin for made in episode.calls] == ["fresh", *2 * ["continued"]]


@pytest.mark.slow
async def test_the_calculator_may_be_a_server_of_the_model_context_protocol(tmp_path: Path) -> None:
    pytest.importorskip("mcp_server_calculator")
    lines = [call("calculate", '{"expression": "3 * 14"}') + END, f"#### 42{END}"]
    async with model_server(tmp_path) as server:
        server.lines = list(lines)
        await server.new_attempt()
        assert await run_alone(server, "calc", TASK, agent="mcp_agent:Solver") == "42"
        episode = await server.check(calls=2)
    assert "42" in str(episode.messages(episode.calls[1])[-1]["content"])


def test_two_training_steps_on_the_bundled_model(tmp_path: Path) -> None:
    trained = train_example("calc", tmp_path)
    assert trained.step == 2
    for row in steps_of(trained):
        assert row["rollouts/succeeded"] == row["rollouts/requested"] == 8
    assert sum(row["tokens/trained"] for row in steps_of(trained)) > 0
    episodes = [episode for group in ("train-0", "train-1", "train-2") for episode in trained.episodes(group)]
    assert {episode.role(made) for episode in episodes for made in episode.calls} == {"solver"}
    assert max(len(episode.calls) for episode in episodes) > 1  # the calculator was used


@pytest.mark.slow
def test_the_calculator_of_a_server_trains_too(tmp_path: Path) -> None:
    pytest.importorskip("mcp_server_calculator")
    trained = train_example("calc", tmp_path, agent="mcp_agent.py:Solver", **{"workers.concurrency": 4})
    assert trained.step == 2
    for row in steps_of(trained):
        assert row["rollouts/succeeded"] == row["rollouts/requested"] == 8
    assert all(episode.tools(made) for episode in trained.episodes("train-0") for made in episode.calls)


@pytest.mark.parametrize(
    ("answer", "said", "earned"),
    [
        (42, "42", 1),
        (42, "42 apples.", 1),
        (1200.5, "$1,200.50", 1),
        (-3, "-3", 1),
        (42, "**42**", 1),
        (42, "41", 0),
        (42, "42 or 43", 0),
        (42, "-42", 0),
        (42, "many", 0),
        (0, "", 0),
    ],
)
def test_the_reward_is_the_right_number(answer: float, said: str, earned: float) -> None:
    assert load("calc", "reward.py:reward")({"answer": answer}, said) == earned


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("7 / 2", "3.5"),
        ("-2 ** 2", "-4"),
        ("0.1 + 0.2", "0.3"),
        ("8 / 2", "4"),
        ("6 × 7 − 8 ÷ 4", "40"),
    ],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert load("calc", "calculator.py:calculate")(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "3 * 14 =",
        "1 / 0",
        "9 ** 9 ** 9",
        "2 ** 1000",
        "1e300 * 1e300",
        "abs(3)",
        "'a' * 9",
        "(-1) ** 0.5",
        "",
        "x",
    ],
)
def test_the_calculator_refuses_what_is_no_arithmetic_or_too_large(expression: str) -> None:
    with pytest.raises(ValueError):
        load("calc", "calculator.py:calculate")(expression)


@pytest.mark.parametrize("downloaded", [False, True])
def test_tasks_are_made_of_a_folder_or_a_download(tmp_path: Path, downloaded: bool) -> None:
    for split in ("train", "test"):
        line = json.dumps(ROW) + "\n"
        (tmp_path / f"{split}.jsonl").write_text(line)
        with lzma.open(tmp_path / f"gsm8k_{split}.jsonl.xz", "wt") as file:
            file.write(line)
    with FileServer(tmp_path) as files:
        source = ["--source", files.url] if downloaded else ["--data", tmp_path]
        subprocess.run([sys.executable, EXAMPLES / "calc" / "prepare.py", *source, tmp_path / "tasks"], check=True)
    for split in ("train", "test"):
        (task,) = map(json.loads, (tmp_path / "tasks" / f"{split}.jsonl").read_text().splitlines())
        bags, apples = map(int, re.findall(r"\d+", task["question"]))
        assert task["id"] == f"{split}-0000"
        assert task["question"] == f"Ann has {bags} bags of {apples} apples and eats half. How many are left?"
        assert task["answer"] == bags * apples / 2
        assert bags * apples >= 1_000_000


@pytest.mark.parametrize("row", UNTRACEABLE)
def test_problems_whose_solution_cannot_be_traced_are_left_out(row: dict[str, str]) -> None:
    assert load("calc", "large_numbers.py:rewrite")(row["question"], row["answer"], Random(0)) is None


@pytest.mark.parametrize(
    ("question", "solution", "kept"),
    [
        ("12 of 30% of 50 days.", "50*30/100 = <<50*30/100=15>>15, 12*15 = <<12*15=180>>180\n#### 180", "30%"),
        ("At 5 pm 40 cars come, each with 4 people.", "40*4 = <<40*4=160>>160\n#### 160", "5 pm"),
        ("Of 60 eggs 2/3 are sold at $8.", "60*2/3 = <<60*2/3=40>>40; 40*8 = <<40*8=320>>320\n#### 320", "2/3"),
    ],
)
def test_percentages_fractions_and_times_keep_their_numbers(question: str, solution: str, kept: str) -> None:
    rewritten, answer = load("calc", "large_numbers.py:rewrite")(question, solution, Random(0))
    assert kept in rewritten
    assert rewritten != question
    assert answer > 1_000_000


async def test_without_the_calculator_the_agent_has_no_tools(tmp_path: Path) -> None:
    async with model_server(tmp_path) as server:
        server.lines = [f"3 * 14 = 42 #### 42{END}"]
        await server.new_attempt()
        assert await run_alone(server, "calc", TASK, agent="agent:solve_alone") == "42"
        episode = await server.check(calls=1)
    assert not episode.tools(episode.calls[0])
