"""A run with two policies trains, is killed, resumes, is evaluated and used, with real engines and a real server."""

import json

import openai
import pytest
from forked_commands import run_command
from serving import ServerProcess
from trainings import Training

from leyden.learner.checkpoint import read_state
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
    training.finish("training.steps=2")
    return training


def test_every_policy_has_its_own_calls_versions_credits_metrics_and_checkpoints(trained: Training) -> None:
    metrics = trained.metrics()
    assert [(line["step"], line["policy"]) for line in metrics] == [
        (step, policy) for step in (0, 1, 2) for policy in ("writer", "checker")
    ]
    assert all(line["rollouts/trained"] == line["calls/trained"] == 8 for line in metrics[2:])
    database = Database(trained.run / "leyden.db", readonly=True)
    with database.reader.begin() as connection:
        (episode, *_) = queries.group_episodes(connection, "small", "train-0")
        assert [(call.policy, call.role) for call in episode.calls] == [("writer", "writer"), ("checker", "checker")]
        assert {version.policy for version in queries.latest_versions(connection, "small")} <= {"writer", "checker"}
        credits = queries.rollout_credits(connection, "small", "train-0.0")
    database.close()
    by_policy = {one.policy: [credit.call for credit in one.calls] for one in credits}
    assert by_policy == {call.policy: [call.id] for call in episode.calls}
    for policy in ("writer", "checker"):
        assert checkpoint_steps(trained.run, policy) == [1, 2]
        assert read_state(trained.run / "policies" / policy / "step-2").policy == policy


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
    for policy in ("writer", "checker"):
        words = ("export", "small", "--to", policy, "--step", "last", "--policy", policy)
        assert run_command(*words, cwd=folder).returncode == 0
        assert f"| policy | {policy} |" in (folder / policy / "README.md").read_text()
    with ServerProcess(folder / "runs", "--model", "small", "--step", "last") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="anything")
        assert {"writer", "checker"} <= {model.id for model in client.models.list()}
        for policy in ("writer", "checker"):
            answer = client.chat.completions.create(
                model=policy, messages=[{"role": "user", "content": "Hello"}], max_tokens=4
            )
            assert answer.usage is not None and answer.usage.completion_tokens > 0
