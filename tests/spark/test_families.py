"""What spark is taught from: problems with right answers, and none in it that RL trains on or is measured by."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from leyden.rendering.chatml import ChatMLRenderer
from leyden.rendering.factory import renderer_for
from leyden.rendering.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "spark"))

from conversations import FAMILIES, Conversation, conversation, plain  # noqa: E402
from families import arithmetic, lookup, sql  # noqa: E402
from families.phrasings import PHRASINGS  # noqa: E402
from families.problem import Split, split_of  # noqa: E402

TOKENIZER = Tokenizer.load(ROOT / "src/leyden/models/spark")
SPLITS: tuple[Split, ...] = ("teach", "train", "held_out", "unseen")
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@cache
def taught() -> list[Conversation]:
    return [conversation(Random(f"test/{index}")) for index in range(1500)]


def make_tasks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tasks", ROOT / "examples/calc_plain/make_tasks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digest(conversations: list[Conversation]) -> str:
    return hashlib.sha256(repr([list(one) for one in conversations]).encode()).hexdigest()


def test_a_seed_gives_the_same_conversations_in_every_process() -> None:
    program = (
        "import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
        "from test_families import digest, conversation, Random\n"
        "print(digest([conversation(Random(f'test/{index}')) for index in range(200)]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program, str(ROOT / "spark"), str(Path(__file__).parent)],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == digest(taught()[:200])


def test_nothing_reserved_is_taught() -> None:
    keys = {key for one in taught() for key in one.keys}
    assert len(keys) > 1500
    assert {split_of(key) for key in keys} == {"teach"}


@each_family
def test_splits_share_no_problem(family: ModuleType) -> None:
    rng = Random(1)
    keys = {split: {family.problem(rng, split).key for _ in range(200)} for split in SPLITS}
    for split, other in (("teach", "train"), ("teach", "held_out"), ("teach", "unseen"), ("train", "held_out")):
        assert not keys[split] & keys[other]
    assert not keys["train"] & keys["unseen"]


def test_the_examples_tasks_are_as_their_script_makes_them_and_none_is_taught(tmp_path: Path) -> None:
    tasks = make_tasks()
    tasks.make(tmp_path)
    said = {message["content"] for one in taught() for message in one.messages if message["role"] == "user"}
    for name in tasks.FILES:
        made = (tmp_path / name).read_bytes()
        assert made == (ROOT / "examples/calc_plain" / name).read_bytes(), "run examples/calc_plain/make_tasks.py"
        problems = tasks.problems(*tasks.FILES[name])
        assert all(split_of(problem.key) != "teach" for problem in problems)
        assert not {problem.question for problem in problems} & said


def test_unseen_tasks_have_sentences_and_numbers_that_tasks_to_train_on_lack() -> None:
    tasks = make_tasks()
    train, unseen = (tasks.problems(split, 100) for split in ("train", "unseen"))
    phrasing = {one.text: one.seen for one in PHRASINGS}
    assert {phrasing[problem.key.split("|")[1]] for problem in train} == {True}
    assert {phrasing[problem.key.split("|")[1]] for problem in unseen} == {False}
    assert max(number for problem in train for number in problem.facts["numbers"]) < 100
    assert all(max(problem.facts["numbers"]) >= 100 for problem in unseen)


def test_arithmetic_answers_are_what_the_calculator_says() -> None:
    rng = Random(2)
    for _ in range(300):
        problem = arithmetic.problem(rng, "train")
        signs = [arithmetic.CUES[cue].operation for cue in problem.facts["cues"]]
        value = str(problem.facts["numbers"][0])
        for sign, number in zip(signs, problem.facts["numbers"][1:], strict=True):
            value = arithmetic.calculate(f"{value} {sign} {number}")
        assert value == str(problem.answer)
        assert arithmetic.check(problem, f"So it is. #### {value}")
        assert not arithmetic.check(problem, f"#### {int(value) + 1}")
        assert not arithmetic.check(problem, "####")


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 + 3 * 4", "14"), ("(2 + 3) * 4", "20"), ("7 / 2", "3.5"), ("8 / 2", "4"), ("3 - 5", "-2")],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert arithmetic.calculate(expression) == value


@pytest.mark.parametrize("expression", ["2 +", "", "2 ** 9", "open('x')", "True + 1", "1 / 0", "9" * 5000, "(" * 500])
def test_the_calculator_refuses_what_is_no_arithmetic(expression: str) -> None:
    assert arithmetic.calculate(expression).startswith("Error: ")


def test_sql_answers_are_what_the_database_says() -> None:
    rng = Random(3)
    for _ in range(100):
        problem = sql.problem(rng, "train")
        found = sql.tool(problem)(sql.query(problem, sql.right(problem.facts)))
        assert str(problem.answer) in found
        assert sql.check(problem, f"#### {problem.answer}")
        assert not sql.check(problem, "#### nobody")
    assert sql.tool(problem)("SELECT name FROM nowhere") == "Error: no such table: nowhere"
    assert sql.tool(problem)(f"DELETE FROM {problem.facts['table']}").startswith("Error: ")


def test_lookup_answers_are_what_the_documents_say() -> None:
    rng = Random(4)
    for _ in range(100):
        problem = lookup.problem(rng, "train")
        search, names = lookup.tool(problem), problem.facts["names"]
        found = search(names[0]) + search(names[-1])
        assert all(part in found for part in str(problem.answer).split(" and "))
        assert lookup.check(problem, f"It is {problem.answer}. #### {problem.answer}")
        assert not lookup.check(problem, f"#### {search(names[0])}")
    assert search("xyzzy") == "No results found."


@each_family
def test_teachers_err_and_are_right_often_enough(family: ModuleType) -> None:
    rng = Random(5)
    name = next(name for name, one in FAMILIES.items() if one is family)
    right = 0
    for _ in range(600):
        problem = family.problem(rng, "teach")
        right += family.check(problem, family.teach(problem, rng, plain(name, problem)[1], "hash")[-1]["content"])
    assert 0.25 < right / 600 < 0.45


def test_conversations_are_rendered_as_the_template_does_and_read_back_as_they_were() -> None:
    renderer = renderer_for(TOKENIZER)
    assert isinstance(renderer, ChatMLRenderer)
    for messages, tools, _ in taught()[:150]:
        ids = TOKENIZER.apply_chat_template(messages, tools=tools or None)
        assert renderer.render_ids(messages, tools=[tool["function"] for tool in tools] or None) == ids
        turns = re.findall(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", TOKENIZER.decode(ids), re.DOTALL)
        spoken = [message for message in messages if message["role"] == "assistant"]
        for text, message in zip(turns, spoken, strict=True):
            parsed = renderer.parse_response(TOKENIZER.encode(text + "<|im_end|>"))
            assert parsed.content == message["content"]
            calls = [call["function"] for call in message.get("tool_calls", ())]
            assert [{"name": call.name, "arguments": call.arguments} for call in parsed.tool_calls] == calls
            offered = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in tools}
            assert all(call["arguments"].keys() == offered[call["name"]].keys() for call in calls)
