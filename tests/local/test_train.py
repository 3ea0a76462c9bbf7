"""`leyden train` as a user meets it: what it leaves, how it goes on, how it is stopped, and what it refuses."""

import asyncio
import json
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import tomllib
from contextlib import closing
from pathlib import Path

import pytest
from forked_commands import run_command, start_command
from trainings import AGENT, Training, children, line_with
from transformers import AutoModelForCausalLM, AutoTokenizer

from leyden.api.wire import RolloutPage
from leyden.config import ConfigError, override, read_config, read_file
from leyden.extras import install_command
from leyden.learner.checkpoint import read_state
from leyden.local.train import train
from leyden.models.source import BUNDLED
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
    done = subprocess.run(command, cwd=training.folder, capture_output=True, text=True, timeout=300, check=False)
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
    assert "of the model before training, measured once: no checkpoint was better on the held-out tasks" in printed


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


def test_restart_puts_the_earlier_run_aside(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.steps=1", "held_out=0")
    training.finish()
    first = training.metrics()
    assert "the earlier run is now" in training.finish("--restart")
    (aside,) = (path for path in training.run.parent.iterdir() if "before" in path.name)
    assert json.loads((aside / "metrics.jsonl").read_text().splitlines()[0]) == first[0]
    assert len(training.metrics()) == 1


def test_a_run_that_came_to_nothing_may_begin_with_another_configuration(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.steps=1", "held_out=1")
    nowhere = leyden(tmp_path, "train", "small.toml", "server.host=192.0.2.1", "training.group_size=2")
    assert nowhere.returncode == 1
    assert "`server`: cannot listen on 192.0.2.1" in nowhere.stderr
    agent = (tmp_path / "agent.py").read_text()
    (tmp_path / "agent.py").write_text(agent.replace("client.post", "client.pest"))
    broken = leyden(tmp_path, "train", "small.toml", "held_out=1", "training.group_size=2")
    assert "no rollout of 8 different tasks in a row succeeded" in broken.stderr
    (tmp_path / "agent.py").write_text(agent)
    began = leyden(tmp_path, "train", "small.toml", *training.settings)
    assert "what was recorded with the earlier one is now" in began.stderr + began.stdout
    assert [row["rollouts/requested"] for row in training.metrics() if row["step"]] == [6]


def test_a_run_that_somebody_is_at_is_left_alone(tmp_path: Path) -> None:
    training = Training(tmp_path)
    (tmp_path / "slow").touch()
    process = training.start()
    while not children(process.pid, "leyden.client.worker"):
        time.sleep(0.05)
    for more in ("training.group_size=2", "--restart"):
        second = leyden(tmp_path, "train", "small.toml", more)
        assert second.returncode == 1
        assert "another process uses run 'small'" in second.stderr
    (tmp_path / "slow").unlink()
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert [row["step"] for row in training.metrics()] == [0, 1, 2, 3, 4]


def test_one_interrupt_finishes_the_step_and_saves_and_two_stop_at_once(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.steps=50", "checkpoints.every=50", "evaluation.every=0")
    process = training.start()
    line_with(process, " 1/50")
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "finishing this step" in printed
    step = training.metrics()[-1]["step"]
    assert 0 < step < 50
    assert (training.run / f"step-{step}").exists()
    before = training.metrics()[0]["held_out/reward"]
    assert re.search(rf"held-out reward {before:.3f} ± \S+ before, not evaluated since", printed)

    printed = training.finish(f"training.steps={step + 2}")
    assert re.search(rf"step +{step + 1}/{step + 2} .* held-out {before:.3f} ± ", printed), printed
    step += 2

    (tmp_path / "slow").touch()
    process = training.start()
    line_with(process, f"after step {step}")
    line_with(process, "engine: torch")
    while not (tmp_path / "waiting").exists():
        time.sleep(0.05)
    workers = children(process.pid, "leyden.client.worker")
    process.send_signal(signal.SIGINT)
    line_with(process, "finishing this step")
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; continue with: leyden train small.toml training.steps=50" in printed
    (worker,) = workers
    wait_ended(worker)
    rows = [row["step"] for row in training.metrics()]
    assert rows == list(range(len(rows)))


@pytest.mark.slow
def test_an_interrupt_in_the_first_evaluation_does_not_wait_for_its_agents(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.steps=1")
    (tmp_path / "slow").touch()
    process = training.start()
    while not (tmp_path / "waiting").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert "stopping the evaluation; the next start uses the rollouts that are finished" in printed
    assert "run small stopped at step 0 of 1" in printed
    (tmp_path / "slow").unlink()
    assert "step 1/1" in training.finish()


def test_a_second_interrupt_does_not_wait_for_the_update_that_is_computed(tmp_path: Path) -> None:
    training = Training(
        tmp_path, "held_out=0", "training.steps=2", "checkpoints.every=1", "algorithm.credit=credit.py:slow"
    )
    (tmp_path / "credit.py").write_text(SLOW_CREDIT)
    process = training.start()
    line_with(process, "step 1/2")
    while not (tmp_path / "computing").exists():
        time.sleep(0.05)
    (worker,) = children(process.pid, "leyden.client.worker")
    process.send_signal(signal.SIGINT)
    line_with(process, "finishing this step")
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)  # the update takes an hour
    assert process.returncode == 130
    assert "stopped; continue with: leyden train small.toml held_out=0" in printed
    wait_ended(worker)
    (tmp_path / "fast").touch()
    printed = training.finish()
    assert "resuming small after step 1" in printed
    assert [row["step"] for row in training.metrics()] == [1, 2]
    assert [row["rollouts/succeeded"] for row in training.metrics()] == [6, 6]
    with closing(sqlite3.connect(training.run / "leyden.db")) as database:
        assert database.execute("SELECT count(*) FROM attempts WHERE ending = 'succeeded'").fetchone() == (12,)


SLOW_CREDIT = """
import time
from pathlib import Path


def slow(rewards, hyperparameters):
    here = Path(__file__).parent
    if (here / "runs/small/step-1").exists() and not (here / "fast").exists():
        (here / "computing").touch()
        time.sleep(3600)
    return [rewards.total] * len(rewards.steps)
"""


def wait_ended(pid: int) -> None:
    """Wait until a process has ended."""
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.05)


def refusal(folder: Path, *settings: str) -> str:
    """The one line with which a training is refused."""
    config = read_config(override(read_file(folder / "small.toml"), [f"home={folder}/runs", *settings]))
    with pytest.raises(ConfigError) as caught:
        asyncio.run(train(config))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model=nowhere/nothing", "`model`: 'nowhere/nothing' is neither bundled"),
        ("model=runs", "has no config.json"),
        ("tasks=other.jsonl", "`tasks`: "),
        ("agent=agent.py:solv", "did you mean 'solve'"),
        ("reward=agent.py:nothing", "has no 'nothing'"),
        ("algorithm.advantage=grop", "`algorithm.advantage`: there is no 'grop'"),
    ],
)
def test_what_is_wrong_is_one_line_before_any_work(setting: str, says: str, tmp_path: Path) -> None:
    Training(tmp_path)
    (tmp_path / "runs").mkdir()
    assert says in refusal(tmp_path, setting)


def test_too_little_memory_is_reported_before_any_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Training(tmp_path)
    monkeypatch.setattr("leyden.learner.loading.free_memory", lambda: 10 * 2**20)
    assert "takes about 0.029 GiB and 0.0098 are free" in refusal(tmp_path)


def test_a_tokenizer_without_a_chat_template_and_a_bad_line(tmp_path: Path) -> None:
    training = Training(tmp_path)
    shutil.copytree(str(BUNDLED["spark"]), tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer_config.json").write_text("{}")
    assert "has no chat template" in refusal(tmp_path, "model=broken")
    (training.folder / "tasks.jsonl").write_text('{"question": "x"}\n{')
    assert "tasks.jsonl:2: this line is not JSON" in refusal(tmp_path)


def test_the_command_says_it_in_one_line_too(tmp_path: Path) -> None:
    Training(tmp_path)
    done = leyden(tmp_path, "train", "small.toml", "training.stepz=3")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "leyden: `training.stepz` is no key: did you mean `training.steps`?\n"


@pytest.mark.slow
def test_an_agent_that_is_broken_is_not_trained(tmp_path: Path) -> None:
    training = Training(tmp_path)
    (tmp_path / "agent.py").write_text(
        "def solve(task):\n    return task['qestion']\n\n\ndef reward(task):\n    return 1\n"
    )
    done = leyden(training.folder, "train", "small.toml")
    assert done.returncode == 1
    assert re.search(
        r"no rollout of 8 different tasks in a row succeeded; (\d+) of \1 ended agent_error: KeyError: 'qestion'",
        done.stderr,
    )


def test_settings_that_do_nothing_or_name_nothing_are_reported(tmp_path: Path) -> None:
    settings = ("algorithm.gamma=0.5", "training.tasks_per_step=9", 'training.roles=["plannner"]')
    done = leyden(Training(tmp_path).folder, "train", "small.toml", *settings)
    assert done.returncode == 1
    assert '`algorithm.gamma` does nothing with `credit = "identical"`' in done.stderr
    assert re.search(r"a step takes 9 tasks and there are \d+: some come twice", done.stderr)
    assert "calls had the roles none; `training.roles` names those that are trained on. A call has the" in done.stderr
    assert install_command("trace") in done.stderr and "`[roles]`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_user_function_that_fails_ends_the_run_in_one_line(tmp_path: Path) -> None:
    training = Training(tmp_path)
    (tmp_path / "own.py").write_text("def loss(tokens, terms):\n    return -tokens.current.mean(), {}\n")
    done = leyden(training.folder, "train", "small.toml", "algorithm.loss=own.py:loss")
    assert done.returncode == 1
    assert "leyden: `algorithm.loss` returned a tensor of shape () " in done.stderr and "Traceback" not in done.stderr


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


def test_leyden_dev_says_what_was_caught_and_fails_where_nothing_could_be_trained(tmp_path: Path) -> None:
    training = Training(tmp_path)
    done = leyden(training.folder, "dev", "small.toml", "--json")
    assert done.returncode == 0, done.stderr
    caught = json.loads(done.stdout)
    assert caught["outcomes"] == {"succeeded": 8}
    assert (caught["calls"], caught["prompts"]) == (8, {"fresh": 8})
    assert caught["calls_trained"] == 8 - caught["left_out"].get("in a flat group", 0) == 8 - 2 * caught["groups_flat"]
    shown = leyden(training.folder, "dev", "small.toml", "--tasks", "1", "--rollouts", "1")
    assert shown.returncode == 0
    assert "would be trained" in shown.stdout
    (tmp_path / "agent.py").write_text(
        "def solve(task):\n    return 'x'\n\n\ndef reward(task, result):\n    return 1.0\n"
    )
    silent = leyden(training.folder, "dev", "small.toml")
    assert silent.returncode == 1
    assert "no model call reached the gateway: does the agent set its own base URL?" in silent.stderr


def test_leyden_dev_fails_where_no_rollout_succeeded(tmp_path: Path) -> None:
    training = Training(tmp_path)
    fails = AGENT.replace("    return answer.raise", "    raise KeyError(task['q'])\n    return answer.raise")
    (tmp_path / "agent.py").write_text(fails)
    failed = leyden(training.folder, "dev", "small.toml", "--json")
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["calls"] == 8
    assert "leyden: no rollout succeeded; 8 of 8 ended with: KeyError: 'q'" in failed.stderr


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
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0, printed
        _, reported = worker.communicate(timeout=60)
    finally:
        worker.kill()
    assert worker.returncode == 0
    assert "run small is done: 6 attempts: 6 succeeded, mean reward" in reported.decode()
    assert training.metrics()[-1]["rollouts/succeeded"] == 6


def test_a_worker_says_what_it_lacks(tmp_path: Path) -> None:
    Training(tmp_path)
    assert "no server: name it with --server" in leyden(tmp_path, "worker", "small.toml").stderr
    assert "needs a key" in leyden(tmp_path, "worker", "small.toml", "--server", "http://127.0.0.1:9").stderr


@pytest.mark.slow
def test_a_step_in_which_most_rollouts_failed_is_a_warning(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.steps=2", "held_out=0", "workers.processes=1", "training.group_size=6")
    fails = 'def solve(task):\n    if next(rollouts) % 6 > 1:\n        raise KeyError("no luck")\n'
    agent = AGENT.replace("def solve(task):\n", fails).replace("client =", "rollouts = itertools.count()\nclient =")
    (tmp_path / "agent.py").write_text(f"import itertools\n{agent}")
    printed = training.finish()
    assert re.search(r"step 1: \d+ of 12 rollouts failed and have `failure_reward`; .* KeyError: 'no luck'", printed)
    assert printed.count("rollouts failed") == 1 and "leyden show small --outcome agent_error" in printed
