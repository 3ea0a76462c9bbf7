"""The SQL agent runs unchanged outside Leyden and within it, and its reward is execution match."""

import json
import lzma
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from example_runs import load, run_alone, steps_of, train_example
from modelserving import END, model_server
from worker_harness import WorkerHarness

from leyden.config import read_file
from leyden.rl.signals import SignalKind, find

EXAMPLE = Path(__file__).parents[2] / "examples" / "sql"
QUESTION, GOLD = "Who is 30 years old?", "SELECT name FROM singer WHERE age = 30"
ROLES = ["writer", "checker", "rewriter", "checker"]
LENGTH_REWARD = """
def reward(result):
    return len(result) % 7 / 7
"""


def say(prompt: str) -> str:
    """The writer misspells a column, the checker sees the error, the rewriter repairs the query."""
    if "You are the writer" in prompt:
        return f"```sql\nSELECT nme FROM singer WHERE age = 30;\n```{END}"
    if "You are the checker" in prompt:
        wrong = "no such column: nme" in prompt
        return ("There is no column nme.\nVERDICT: WRONG" if wrong else "VERDICT: CORRECT") + END
    assert "There is no column nme." in prompt
    return f"The column is called name:\n\n{GOLD}\n\nIt was misspelt.{END}"


def named(reference: str) -> Any:
    return load("sql", reference)


async def test_outside_of_leyden_it_needs_only_an_openai_endpoint(tmp_path: Path, singers: str) -> None:
    async with model_server(tmp_path) as server:
        server.say = say
        await server.new_attempt()
        answer = await run_alone(server, "sql", {"question": QUESTION, "database": singers})
        episode = await server.check(calls=4)
    assert answer == GOLD
    prompt = "".join(message["content"] for message in episode.messages(episode.calls[0]))
    assert "CREATE TABLE singer ( id INTEGER PRIMARY KEY, name TEXT, age INTEGER);\n-- 1, 'Ann', 30" in prompt
    assert QUESTION in prompt


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(True, id="by the rules of the TOML"),
        # tests/client/tracing/test_instrumentation.py has a graph whose nodes are roles
        pytest.param(False, id="by the nodes of the graph", marks=pytest.mark.slow),
    ],
)
async def test_the_three_roles_are_caught(harness: WorkerHarness, singers: str, rules: bool) -> None:
    await harness.open(roles=read_file(EXAMPLE / "sql.toml")["roles"] if rules else {})
    harness.server.say = say
    await harness.queue("g", {"question": QUESTION, "database": singers, "query": GOLD})
    with harness.worker("agent.py:solve", base=str(EXAMPLE), reward="reward.py:reward"):
        episode = await harness.episode("g")
    assert episode.final_reward(-1.0) == 1.0, episode.attempt.outcome
    assert [episode.role(call) for call in episode.calls] == ROLES
    assert all(call.role == (role if rules else None) for call, role in zip(episode.calls, ROLES, strict=True))
    assert episode.attempt.result == GOLD


async def test_a_query_that_fails_is_never_accepted_and_the_rounds_end(harness: WorkerHarness, singers: str) -> None:
    await harness.open()
    harness.server.say = lambda prompt: f"VERDICT: CORRECT{END}" if "the checker" in prompt else f"SELECT nothing{END}"
    await harness.queue("g", {"question": QUESTION, "database": singers, "query": GOLD})
    with harness.worker("agent.py:solve", base=str(EXAMPLE), reward="reward.py:reward"):
        episode = await harness.episode("g")
    assert [episode.role(call) for call in episode.calls] == ["writer", "checker", "rewriter", "checker", "rewriter"]
    assert episode.final_reward(-1.0) == 0.0
    failures = [signal for signal in find(episode) if signal.kind is SignalKind.TOOL_FAILED]
    assert [failure.role for failure in failures] == ["writer", "rewriter", "rewriter"]
    assert all('nothing": syntax error' in failure.why for failure in failures)


@pytest.mark.slow  # other examples are trained in the quick tests, and here the roles are caught
def test_two_training_steps_on_the_bundled_model(tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLE / "make_tasks.py", tmp_path], check=True)
    trained = train_example("sql", tmp_path, tasks=tmp_path / "train.jsonl")
    assert trained.step == 2
    for row in steps_of(trained):
        assert row["rollouts/succeeded"] == row["rollouts/requested"] == 8
        assert row["calls/excluded/role not selected"] >= 8  # each rollout has a checker
    assert sum(row["tokens/trained"] for row in steps_of(trained)) > 0
    assert max(row["reward/mean"] for row in steps_of(trained)) > 0  # the bundled model writes SQL


@pytest.mark.slow
def test_two_training_steps_train_the_writer_and_the_rewriter(tmp_path: Path, singers: str) -> None:
    tasks = [{"question": f"Who is {age} years old?", "database": singers, "query": GOLD} for age in range(25, 33)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    (tmp_path / "length.py").write_text(LENGTH_REWARD)
    settings = {"model": "spark", "reward": f"{tmp_path}/length.py:reward", "sampling.max_tokens": 16}
    settings |= {"tasks": tmp_path / "tasks.jsonl", "workers.processes": 1}
    trained = train_example("sql", tmp_path, "sql.toml", **settings)
    assert trained.step == 2
    for row in steps_of(trained):
        assert row["rollouts/succeeded"] == row["rollouts/requested"] == 8
        assert row["calls/excluded/role not selected"] >= 8  # each rollout has a checker
        assert row["tokens/trained"] > 0


@pytest.mark.parametrize(
    ("query", "earned"),
    [
        (GOLD, 1),
        ("SELECT name FROM singer WHERE id IN (3, 1) ORDER BY id DESC", 1),
        ("SELECT name FROM singer WHERE id = 1", 0),
        ("SELECT name, age FROM singer WHERE age = 30", 0),
        ("SELECT name FROM singer WHERE age = 30 UNION ALL SELECT 'Ann'", 0),
        ("SELECT nme FROM singer", 0),
        ("no SQL at all", 0),
        ("", 0),
        ("DELETE FROM singer", 0),
        ("SELECT name FROM singer; SELECT 1", 0),
    ],
)
def test_the_reward_is_execution_match(singers: str, query: str, earned: float) -> None:
    assert named("reward.py:reward")({"database": singers, "query": GOLD}, query) == earned


def test_a_gold_query_that_fails_is_no_zero(singers: str) -> None:
    with pytest.raises(Exception, match="no such column: nme"):
        named("reward.py:reward")({"database": singers, "query": "SELECT nme FROM singer"}, GOLD)


@pytest.mark.parametrize(
    ("gold", "found", "ordered", "same"),
    [
        ([(1,), (2,)], [(2,), (1,)], False, True),
        ([(1,), (2,)], [(2,), (1,)], True, False),
        ([(1,), (1,), (2,)], [(1,), (2,), (2,)], False, False),
        ([(1,), (1,)], [(1,)], False, False),
        ([(1, "a"), (2, "b")], [("b", 2), ("a", 1)], False, True),
        ([(1, "a"), (2, "b")], [("a", 1), ("b", 2)], True, True),
        ([(1, "a"), (2, "b")], [("b", 1), ("a", 2)], False, False),
        ([(1, 2), (2, 1), (3, 3)], [(2, 1), (1, 2), (3, 3)], False, True),
        ([(0, 1, 1), (1, 0, 1)], [(1, 1, 0), (1, 0, 1)], False, True),
        ([(0.1 + 0.2,)], [(0.3,)], False, True),
        ([(2,)], [(2.0,)], False, True),
        ([(None,)], [(0,)], False, False),
        ([(1,)], [("1",)], False, False),
        ([], [], True, True),
    ],
)
def test_results_are_equal_under_any_order_of_columns(
    gold: list[Any], found: list[Any], ordered: bool, same: bool
) -> None:
    assert named("reward.py:same_result")(gold, found, ordered) is same


@pytest.mark.parametrize(
    ("query", "ordered"),
    [
        ("SELECT a FROM b ORDER  BY c", True),
        ("SELECT a FROM (SELECT a FROM b ORDER BY c LIMIT 3)", False),
        ("SELECT a FROM b WHERE c IN (SELECT max(c) FROM b) order by a LIMIT 1", True),
        ("SELECT a FROM b WHERE c = 'order by (x'", False),
    ],
)
def test_only_the_outermost_order_counts(query: str, ordered: bool) -> None:
    assert named("reward.py:is_ordered")(query) is ordered


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("INSERT INTO singer VALUES (9, 'Eve', 1)", "not authorized"),
        ("ATTACH DATABASE 'other.sqlite' AS other", "not authorized"),
        ("PRAGMA writable_schema = 1", "not authorized"),
        ("CREATE TEMP TABLE t (a)", "not authorized"),
        ("SELECT load_extension('x')", "not authorized"),
        ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n", "longer than 0.2 s"),
        ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n", "more than 50 rows"),
        ("SELECT zeroblob(100000000)", "too big"),
        ("SELECT 'a\x00b'", "null character"),
    ],
)
def test_a_query_can_only_read_and_within_limits(singers: str, query: str, message: str, tmp_path: Path) -> None:
    before, began = Path(singers).read_bytes(), time.monotonic()
    with pytest.raises(Exception, match=message):
        named("execution.py:execute")(singers, query, limit_s=0.2, row_limit=50)
    assert time.monotonic() - began < 60  # the queries would run for ever
    assert Path(singers).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["singers.sqlite"]


@pytest.mark.parametrize(
    ("answer", "query"),
    [
        ("```sql\nSELECT 1;\n```", "SELECT 1"),
        ("```SQL SELECT ';' ; SELECT 2", "SELECT ';'"),
        ("Sure:\n```sqlite\nSELECT 1\nFROM a\n```\nor\n```sql\nSELECT 2\n```", "SELECT 1\nFROM a"),
        ("```\nWITH a AS (SELECT 1) SELECT * FROM a\n```", "WITH a AS (SELECT 1) SELECT * FROM a"),
        ("The query is:\n\nselect a\nfrom b;\n\nIt selects a.", "select a\nfrom b"),
        ("SELECT 1", "SELECT 1"),
        ("Query: SELECT it's", "SELECT it's"),
        ("I do not know.", "I do not know."),
        ("", ""),
    ],
)
def test_a_query_is_read_from_a_fenced_block_or_plain_text(answer: str, query: str) -> None:
    assert named("agent.py:parse_query")(answer) == query


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("VERDICT: CORRECT", True),
        ("Not correct at all.\nVERDICT: **WRONG**", False),
        ("This is incorrect.", False),
        ("It was wrong, and is correct now.", True),
        ("No opinion", True),
    ],
)
def test_the_last_verdict_counts(answer: str, accepted: bool) -> None:
    assert named("agent.py:parse_verdict")(answer) is accepted


def test_tasks_are_made_of_rows_whose_gold_result_is_there(tmp_path: Path, singers: str) -> None:
    data, folder = tmp_path / "spider", tmp_path / "tasks"
    data.mkdir()
    for split in ("train", "dev"):
        golds = ("ok", "empty", "error", "no_db", "ok")
        rows = [{"question": QUESTION, "query": GOLD, "db_id": "singers", "gold": gold} for gold in golds]
        with lzma.open(data / f"{split}.json.xz", "wt") as file:
            json.dump(rows, file)
    with tarfile.open(data / "database.tar.xz", "w:xz") as archive:
        archive.add(singers, "database/singers/singers.sqlite")
    subprocess.run([sys.executable, EXAMPLE / "prepare.py", "--data", data, folder], check=True)
    for split in ("train", "dev"):
        tasks = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        assert [task["id"] for task in tasks] == [f"{split}-0000", f"{split}-0004"]
        assert named("reward.py:reward")(tasks[0], GOLD) == 1.0
