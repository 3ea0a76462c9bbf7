"""`leyden train` as a user meets it: what it leaves, and how it goes on."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from forked_commands import run_command, start_command
from trainings import AGENT, Training, line_with
from transformers import AutoModelForCausalLM, AutoTokenizer

from leyden.api.wire import RolloutPage
from leyden.learner.checkpoint import read_state
from leyden.records import Call
from leyden.server.control.keys import KeyKind, Keyring
from leyden.store.database import Database
from leyden.store.read import queries


def leyden(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, cwd=folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = Training(tmp_path_factory.mktemp("trained"))
    command = [sys.executable, "-m", "leyden", "train", "small.toml"]
    done = subprocess.run(command, cwd=training.folder, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    training.printed = done.stdout + done.stderr
    return training


def test_a_run_leaves_its_configuration_metrics_curve_and_checkpoints(trained: Training) -> None:
    config = tomllib.loads((trained.run / "config.toml").read_text())
    assert config["training"]["learning_rate"] == 1e-3
    assert config["algorithm"]["advantage"] == "grpo"  # what was not written is written out
    assert (trained.run / "curve.png").read_bytes().startswith(b"\x89PNG")
    metrics = trained.metrics()
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4]
    assert all(row["rollouts/requested"] == row["rollouts/trained"] == 6 for row in metrics[1:])
    assert [row["step"] for row in metrics if "held_out/reward" in row] == [0, 2, 4]
    updates = [row["training/kl_sampler_k3"] for row in metrics[1:] if row["tokens/trained"]]  # others were worth 0
    assert updates and max(map(abs, updates)) < 1e-6  # the sampler is the policy
    assert {"step-2", "step-4"} <= {path.name for path in trained.run.iterdir()}


def test_each_call_of_a_run_says_what_it_was_worth_or_why_it_was_left_out(trained: Training) -> None:
    shown = [
        json.loads(leyden(trained.folder, "show", "small", f"train-{group}.0", "--json").stdout) for group in (0, 1)
    ]
    for one in shown:
        (step,) = one["credits"]
        assert (step["step"], step["policy"]) == (1, "policy")
        calls = one["episodes"][0]["calls"]
        assert [credit["call"] for credit in step["calls"]] == [call["id"] for call in calls]
        for credit, call in zip(step["calls"], calls, strict=True):
            assert credit["value"] in (0.0, 1.0)
            trained_on = len(call["completion_ids"]) if credit["advantage"] else 0
            assert credit.get("tokens", 0) == trained_on
            assert credit.get("excluded", "") == ("" if trained_on else "its advantage is 0")


def test_whether_it_learned_is_said_with_errors_and_in_pairs(trained: Training) -> None:
    closing = r"held-out reward \S+ ± \S+ before, \S+ ± \S+ after \(mean of 2 rollouts\): \S+ ± \S+ in pairs of tasks"
    assert re.search(closing, trained.printed), trained.printed
    assert re.search(r"held out \(± \S+, 2 rollouts each\)", trained.printed)
    assert re.search(r"\d of 2 groups flat  entropy \S+", trained.printed)
    metrics = trained.metrics()
    assert [row["step"] for row in metrics if "held_out/change" in row] == [2, 4]
    for row in metrics[1:]:
        assert row["length/rollout"] == row["length/call"] > 0  # one call each
        assert (row["staleness/mean"], row["staleness/max"]) == (0, 0)


def test_a_report_is_one_file_with_curves_accounts_samples_and_configuration(trained: Training) -> None:
    done = leyden(trained.folder, "report", "small", "--to", "mine.html")
    assert done.returncode == 0, done.stderr
    page = (trained.folder / "mine.html").read_text()
    for part in (
        "<svg",
        "mean advantage by turn",
        "before training",
        "after step 4",
        "rollouts/requested",
        "learning_rate = 0.001",
        "torch",
    ):
        assert part in page, part
    assert "What is " in page  # what the agent asked
    assert "<script" not in page and "http://" not in page.replace("http://127.0.0.1", "") and "src=" not in page


def test_top_shows_the_numbers_of_the_pages(trained: Training) -> None:
    shown = leyden(trained.folder, "top", "--once")
    assert re.search(r"small +finished +4/4 .* 2 held-out", shown.stdout), (shown.stdout, shown.stderr)
    assert re.search(r"last step of small: training reward .* of 2 groups flat, sampling", shown.stdout)
    document = json.loads(leyden(trained.folder, "top", "small", "--json").stdout)
    assert [card["id"] for card in document["runs"]] == ["small"]


@pytest.mark.slow
def test_a_run_ends_at_its_time_limit_as_if_the_step_were_its_last(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.steps=1000", "training.time_limit_s=0.001", "evaluation.every=500")
    training.finish()
    metrics = training.metrics()
    assert [row["step"] for row in metrics] == [0, 1]
    assert "held_out/reward" in metrics[-1]
    assert (training.run / "step-1").exists()


def test_a_run_that_is_done_has_nothing_left_to_do(trained: Training) -> None:
    before = trained.metrics()
    assert "is done" in trained.finish()
    assert trained.metrics() == before


def test_a_run_resumes_for_more_steps_but_not_with_another_meaning(trained: Training) -> None:
    refused = leyden(trained.folder, "train", "small.toml", "run=small", "--json", "training.group_size=5")
    assert refused.returncode == 1
    assert "`training.group_size` is not what run 'small' started with" in refused.stderr
    more = leyden(trained.folder, "train", "small.toml", "training.steps=5")
    assert "resuming small after step 4" in more.stderr, more.stderr
    assert re.search(r"engine: \w+ \(.+\)", more.stderr)
    assert [row["step"] for row in trained.metrics()] == [0, 1, 2, 3, 4, 5]


def test_an_exported_run_is_a_model_and_can_be_measured(trained: Training) -> None:
    done = leyden(trained.folder, "export", "small", "--to", "exported", "--step", "last", "--json")
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(trained.folder / "exported")
    assert str(model.dtype) == "torch.bfloat16"
    (trained.folder / "ordinary").touch()
    modes = {file.stat().st_mode for file in (trained.folder / "exported").iterdir()}
    assert modes == {(trained.folder / "ordinary").stat().st_mode}
    unknown = leyden(trained.folder, "export", "nope", "--to", "other")
    assert "there is no run 'nope' with a folder in runs; there are small" in unknown.stderr
    tokenizer = AutoTokenizer.from_pretrained(trained.folder / "exported")
    assert tokenizer.chat_template
    measured = leyden(trained.folder, "eval", "small.toml", "--model", "exported", "--json")
    assert "exported" in measured.stderr.partition("loading torch and ")[2].partition("\n")[0]
    assert measured.returncode == 0, measured.stderr
    report = json.loads(measured.stdout)
    assert (report["tasks"], report["counted"], report["outcomes"]) == (2, 2, {"succeeded": 2})
    shown = leyden(trained.folder, "show", "small")
    assert "succeeded" in shown.stdout
    assert "small" in leyden(trained.folder, "runs").stdout


def test_of_equals_the_later_is_the_best(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.steps=1")
    agent = (tmp_path / "agent.py").read_text()
    (tmp_path / "agent.py").write_text(agent.replace('float(len(result or "") % 2)', "1.0"))
    process = training.start()
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 1 and "run small ended without an update" in printed  # nothing was trained
    assert printed.splitlines()[-1].startswith("leyden: run small made no update in 1 step, so nothing was trained")
    (listed,) = json.loads(leyden(tmp_path, "runs", "--json").stdout)
    assert listed["card"]["state"] == "unchanged"
    (line,) = training.metrics()[1:]
    assert (line["groups/flat_succeeded"], line["groups/flat_failed"]) == (2, 0)
    done = leyden(tmp_path, "export", "small", "--to", "exported", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checkpoint"].endswith("step-1")


JUDGED = """


def judged(task, result, episode):
    kind, _, rest = episode.rollout.group.partition("-")
    if kind == "eval":
        return {"0": 0.5, "1": 1.0}.get(rest.partition("-")[0], 0.0)
    return float(len(result or "") % 2)
"""


def calls_of_tests(run: Path) -> list[Call]:
    """Return the calls of the rollouts of test tasks."""
    database = Database(str(run / "leyden.db"), readonly=True)
    with database.reader.begin() as connection:
        listed = queries.list_rollouts(connection, "small", RolloutPage(limit=1000))
        tested = {rollout.group for rollout in listed if rollout.group.startswith("test-")}
        episodes = [one for group in tested for one in queries.group_episodes(connection, "small", group)]
    database.close()
    return [call for episode in episodes for call in episode.calls]


def test_a_run_that_collapses_warns_keeps_its_best_checkpoint_and_tests_that(tmp_path: Path) -> None:
    settings = ("reward=agent.py:judged", "held_out=3", "test=2", "training.steps=3", "evaluation.every=1")
    training = Training(tmp_path, *settings, "evaluation.rollouts=2", "checkpoints.every=1", "checkpoints.keep=1")
    (tmp_path / "agent.py").write_text(AGENT + JUDGED)
    printed = training.finish()
    assert (
        "step 2: the held-out reward has collapsed: it is 0.000, and was 1.000 at step 1. Step 1 was the best"
        in printed
    )
    assert printed.count("has collapsed") == 1
    assert "best checkpoint: step 1, held-out reward 1.000 ± 0.000 (optimistic" in printed
    assert {path.name for path in training.run.glob("step-*")} == {"step-1", "step-3"}
    *steps, test = training.metrics()
    assert [line["held_out/reward"] for line in steps] == [0.5, 1.0, 0.0, 0.0]
    assert all(line["held_out/error"] == 0 and line["held_out/counted"] == 6 for line in steps)
    assert [line["held_out/pass_at_2"] for line in steps] == [0.0, 1.0, 0.0, 0.0]
    assert (test["step"], test["test/step"], test["test/counted"]) == (3, 1, 4)
    assert f"test reward {test['test/reward']:.3f}" in printed
    document = json.loads(leyden(tmp_path, "compare", "small", "small", "--steps", "0", "1", "--json").stdout)
    assert (document["result"]["difference"], document["result"]["tasks"]) == (0.5, 3)
    said = leyden(tmp_path, "compare", "small", "small", "--steps", "1", "3").stdout
    assert "small at step 1: reward 1.000 ± 0.000 (6 rollouts)" in said
    assert "small at step 3 minus small at step 1: -1.000 ± 0.000, in pairs over 3 tasks" in said
    version = read_state(training.run / "step-1").version
    assert {run.number for call in calls_of_tests(training.run) for run in call.versions} == {
        version
    }  # its weights, and not the last ones
    training.finish()
    assert len(training.metrics()) == 5  # measured once


@pytest.mark.slow  # tests/orchestrator/test_loop.py has it with a scripted learner
def test_where_no_step_is_better_the_model_before_training_is_tested(tmp_path: Path) -> None:
    settings = (
        "reward=agent.py:judged",
        "held_out=2",
        "test=2",
        "training.steps=1",
        "evaluation.every=1",
        "training.group_size=8",
    )
    training = Training(tmp_path, *settings)
    (tmp_path / "agent.py").write_text(AGENT + JUDGED.replace('"0": 0.5, "1": 1.0', '"0": 1.0, "1": 0.5'))
    printed = training.finish()
    *_, test = training.metrics()
    assert (test["step"], test["test/step"]) == (1, 0)
    assert read_state(training.run / "step-1").version == 1
    assert {run.number for call in calls_of_tests(training.run) for run in call.versions} == {0}
    assert f"test reward {test['test/reward']:.3f}" in printed
    assert "step 1: the held-out reward has collapsed: it is 0.500, and was 1.000 at step 0" in printed
    assert "no checkpoint was better on the held-out tasks than the model before training" in printed
    assert "of the model before training, measured once" in printed


@pytest.mark.slow
def test_a_run_whose_entropy_collapses_warns_and_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    training = Training(tmp_path, "held_out=0", "checkpoints.every=1", "checkpoints.keep=1")
    training.finish("training.steps=1")
    (line,) = training.metrics()
    earlier = json.dumps({**line, "training/entropy": 20 * line["training/entropy"]}) + "\n"
    (training.run / "metrics.jsonl").write_text(5 * earlier)  # as if it had begun with more
    printed = training.finish("training.steps=3")
    (said,) = re.findall("step ([23]): the entropy has collapsed: it is .* at the start", printed)
    assert f"No tasks are held out; the checkpoint of step {int(said) - 1} is kept" in printed
    assert {path.name for path in training.run.glob("step-*")} == {f"step-{int(said) - 1}", "step-3"}


def test_restart_puts_the_earlier_run_aside(trained: Training, tmp_path: Path) -> None:
    shutil.copytree(trained.folder, tmp_path, dirs_exist_ok=True)
    training = Training(tmp_path, "training.steps=1", "held_out=0")
    first = training.metrics()
    assert "the earlier run is now" in training.finish("--restart")
    (aside,) = (path for path in training.run.parent.iterdir() if "before" in path.name)
    assert json.loads((aside / "metrics.jsonl").read_text().splitlines()[0]) == first[0]
    assert len(training.metrics()) == 1


def test_garbage_collection_leaves_out_what_the_first_step_has_loaded(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.steps=2", "algorithm.loss=own.py:loss", "held_out=0")
    (tmp_path / "own.py").write_text(
        "import gc\n\n\ndef loss(tokens, terms):\n"
        "    with open('frozen', 'a') as file:\n        print(gc.get_freeze_count(), file=file)\n"
        "    return -tokens.current * tokens.advantages, {}\n"
    )
    training.finish()
    counts = [int(line) for line in (tmp_path / "frozen").read_text().split()]
    assert counts[-1] > counts[0] + 1000


def test_the_same_from_python(tmp_path: Path) -> None:
    script = """
import os

import httpx
import leyden


def solve(task):
    answer = httpx.post(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
        json={"model": "any", "messages": [{"role": "user", "content": task["q"]}], "max_tokens": 4},
        timeout=600,
    )
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]


if __name__ == "__main__":
    trained = leyden.train(
        agent=solve,
        reward=lambda task, result: float(len(result) % 2),
        tasks=[{"q": str(n)} for n in range(6)],
        held_out=0,
        training={"steps": 1, "tasks_per_step": 2, "group_size": 2, "learning_rate": 1e-4},
    )
    print(trained.run, trained.step, trained.folder)
"""
    (tmp_path / "mine.py").write_text(script)
    done = run_command("mine.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"solve 1 {tmp_path / 'runs' / 'solve'}"


def test_agents_may_run_elsewhere(tmp_path: Path) -> None:
    training = Training(tmp_path, "workers.processes=0", "training.steps=1", "held_out=0")
    process = training.start()
    line_with(process, "engine: torch")
    waiting = line_with(process, "waiting for workers")
    settings = "workers.processes=0 training.steps=1 held_out=0"
    assert waiting.startswith(f"waiting for workers: leyden worker small.toml {settings} --server http://127.0.0.1:")
    in_nine_years = Keyring.from_file(training.run / "secret", lambda: time.time() + 9 * 365 * 86_400)
    assert in_nine_years.verify((training.run / "worker.key").read_text().strip()).kind is KeyKind.WORKER
    _, *command = shlex.split(waiting.partition("waiting for workers: ")[2])
    worker = start_command(*command, cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed
        _, reported = worker.communicate(timeout=300)
    finally:
        worker.kill()
    assert worker.returncode == 0
    assert "run small is done: 6 attempts: 6 succeeded, mean reward" in reported.decode()
    assert training.metrics()[-1]["rollouts/succeeded"] == 6


@pytest.mark.slow
def test_a_step_in_which_most_rollouts_failed_is_a_warning(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.steps=2", "held_out=0", "workers.processes=1", "training.group_size=6")
    fails = 'def solve(task):\n    if next(rollouts) % 6 > 1:\n        raise KeyError("no luck")\n'
    agent = AGENT.replace("def solve(task):\n", fails).replace("client =", "rollouts = itertools.count()\nclient =")
    (tmp_path / "agent.py").write_text(f"import itertools\n{agent}")
    printed = training.finish()
    assert re.search(r"step 1: \d+ of 12 rollouts failed and have `failure_reward`; .* KeyError: 'no luck'", printed)
    assert printed.count("rollouts failed") == 1 and "leyden show small --outcome agent_error" in printed
