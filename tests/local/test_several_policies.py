"""A run with policies of two models trains, is killed, resumes, is evaluated and used: real engines, a real server."""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import openai
import pytest
from forked_commands import run_command
from serving import ServerProcess
from sqlalchemy import Connection
from trainings import Training, children, line_with
from transformers import AutoConfig, AutoModelForCausalLM

from leyden.learner.checkpoint import read_state
from leyden.models.source import find_model
from leyden.runs.checkpoint_files import checkpoint_steps
from leyden.store.database import Database
from leyden.store.read import queries

AGENT = """
import os

import httpx

client = httpx.Client(verify=False, timeout=600)


def ask(text, role):
    answer = client.post(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "x-leyden-role": role},
        json={"model": "gpt", "messages": [{"role": "user", "content": text}], "max_tokens": 8},
    )
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]


def solve(task):
    return ask("Is this right? " + ask(task["question"], "writer"), "checker")


def reward(task, result):
    return float(len(result or "") % 2)
"""
POLICIES = """
[policies.writer]
roles = "writer"

[policies.checker]
model = "shallow"
lora = { rank = 2 }
learning_rate = 1e-3
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Training:
    folder = tmp_path_factory.mktemp("policies")
    settings = ("checkpoints.every=1", "evaluation.every=1", "training.tasks_per_step=1", "training.group_size=8")
    training = Training(folder, *settings)
    (folder / "agent.py").write_text(AGENT)
    with (folder / "small.toml").open("a") as file:
        file.write(POLICIES)
    save_shallow(folder / "shallow")
    training.finish("training.steps=2")
    return training


def save_shallow(folder: Path) -> None:
    """Save a model of spark's first layer."""
    spark = find_model("spark", ".").folder
    shutil.copytree(spark, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForCausalLM.from_pretrained(spark, num_hidden_layers=1).save_pretrained(folder)


@contextmanager
def reading(run: Path) -> Iterator[Connection]:
    """Read the store of a run."""
    with closing(Database(run / "leyden.db", readonly=True)) as database, database.reader.begin() as connection:
        yield connection


def test_every_policy_has_its_own_calls_versions_credits_metrics_and_checkpoints(trained: Training) -> None:
    metrics = trained.metrics()
    assert [(line["step"], line["policy"]) for line in metrics] == [
        (step, policy) for step in (0, 1, 2) for policy in ("writer", "checker")
    ]
    assert all(line["rollouts/trained"] == line["calls/trained"] == 8 for line in metrics[2:])
    with reading(trained.run) as connection:
        (episode, *_) = queries.group_episodes(connection, "small", "train-0")
        assert [(call.policy, call.role) for call in episode.calls] == [("writer", "writer"), ("checker", "checker")]
        assert {version.policy for version in queries.latest_versions(connection, "small")} <= {"writer", "checker"}
        credits = queries.rollout_credits(connection, "small", "train-0.0")
    by_policy = {one.policy: [credit.call for credit in one.calls] for one in credits}
    assert by_policy == {call.policy: [call.id] for call in episode.calls}
    for policy in ("writer", "checker"):
        assert checkpoint_steps(trained.run, policy) == [1, 2]
        assert read_state(trained.run / "policies" / policy / "step-2").policy == policy
    checked = run_command("check", "small", "--json", cwd=trained.folder)
    names = [part["name"] for part in json.loads(checked.stdout)]
    checkpoints = [f"policies/{policy}/step-{step}" for policy in ("checker", "writer") for step in (1, 2)]
    assert sorted(names) == sorted(["leyden.db", "records", *checkpoints])


def test_a_run_whose_last_checkpoint_lacks_a_policy_resumes_from_the_step_before(trained: Training) -> None:
    for file in sorted((trained.run / "policies" / "checker" / "step-2").iterdir()):
        file.unlink()
    printed = trained.finish("training.steps=3")
    assert "resuming small after step 1" in printed
    assert checkpoint_steps(trained.run, "checker")[-1] == checkpoint_steps(trained.run, "writer")[-1] == 3
    assert [line["step"] for line in trained.metrics() if line["policy"] == "checker"] == [0, 1, 2, 3]


def test_its_policies_are_evaluated_exported_and_served_by_name(trained: Training) -> None:
    folder = trained.folder
    evaluated = run_command("eval", "small.toml", "--model", "small", "--step", "last", "--json", cwd=folder)
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["counted"] > 0
    refused = run_command("export", "small", "--to", "out", "--step", "last", cwd=folder)
    assert refused.returncode and "name one with --policy: writer, checker" in refused.stderr
    for policy, layers in (("writer", 4), ("checker", 1)):
        words = ("export", "small", "--to", policy, "--step", "last", "--policy", policy)
        assert run_command(*words, cwd=folder).returncode == 0
        assert f"| policy | {policy} |" in (folder / policy / "README.md").read_text()
        assert AutoConfig.from_pretrained(folder / policy).num_hidden_layers == layers
    with ServerProcess(folder / "runs", "--model", "small", "--step", "last") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="anything")
        assert {"writer", "checker"} <= {model.id for model in client.models.list()}
        for policy in ("writer", "checker"):
            answer = client.chat.completions.create(
                model=policy, messages=[{"role": "user", "content": "Hello"}], max_tokens=4
            )
            assert answer.usage is not None and answer.usage.completion_tokens > 0
    assert run_command("prune", "small", "--checkpoints", "--keep", "1", cwd=folder).returncode == 0
    for policy in ("writer", "checker"):
        assert 3 in checkpoint_steps(trained.run, policy)


LOSS = """
import os
import signal
from pathlib import Path

from leyden.rl.loss.ppo_clip import ppo_clip


def loss(tokens, hyperparameters):
    with Path("updates").open("a") as file:
        file.write(".")
    if Path("kill").exists() and Path("updates").stat().st_size == 2:  # one update a step
        Path("kill").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return ppo_clip(tokens, hyperparameters)
"""


def pair(folder: Path) -> Training:
    """A run whose second policy kills it in step 2, if it is told so: the first has trained and published by then."""
    folder.mkdir()
    settings = ("deterministic=true", "checkpoints.every=1", "evaluation.every=0", "held_out=0")
    training = Training(folder, *settings, "training.tasks_per_step=1", "training.group_size=4")
    lots = "from zlib import crc32\n    return crc32(repr(result).encode()) % 997 / 997"  # leave no group flat
    (folder / "agent.py").write_text(AGENT.replace('return float(len(result or "") % 2)', lots))
    (folder / "losses.py").write_text(LOSS)
    with (folder / "small.toml").open("a") as file:
        file.write(POLICIES + '\n[policies.checker.algorithm]\nloss = "losses.py:loss"\n')
    save_shallow(folder / "shallow")
    return training


@pytest.mark.slow
def test_a_run_killed_between_the_updates_of_its_policies_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, killed = pair(tmp_path / "whole"), pair(tmp_path / "killed")
    whole.finish("training.steps=3")
    (killed.folder / "kill").touch()
    process = killed.start("training.steps=3")
    line_with(process, "dashboard:")
    others = children(process.pid)
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL and not (killed.folder / "kill").exists()
    while any(Path(f"/proc/{pid}").exists() for pid in others):
        time.sleep(0.05)
    with reading(killed.run) as connection:
        newest = {one.policy: one.number for one in queries.latest_versions(connection, "small")}
    assert newest.get("writer") == 2 and newest.get("checker", 0) < 2
    assert "resuming small after step 1" in killed.finish("training.steps=3")
    for policy in ("writer", "checker"):
        for name in ("model.safetensors", "optimiser.safetensors"):
            file = Path("policies") / policy / "step-3" / name
            assert (killed.run / file).read_bytes() == (whole.run / file).read_bytes(), file
