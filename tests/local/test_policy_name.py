"""A run whose policy has a name of the user's trains, resumes, is evaluated, exported, checked and served."""

import json
import tomllib
from pathlib import Path

import openai
import pytest
from forked_commands import run_command
from serving import ServerProcess
from trainings import Training
from transformers import AutoModelForCausalLM

from leyden.api.views import SeriesQuery
from leyden.config import ConfigError, read_config
from leyden.learner.checkpoint import read_state
from leyden.local.serve import find_served
from leyden.runs.checkpoint_files import checkpoint_steps
from leyden.store.database import Database
from leyden.store.read import queries, views

DOCUMENT = {"run": "r", "agent": "a.py:solve", "tasks": "t.jsonl"}


@pytest.mark.slow  # test_several_policies.py has a run with policies of such names
def test_a_run_of_another_policy_trains_resumes_and_is_used(tmp_path: Path) -> None:
    settings = (
        "policy=writer",
        "checkpoints.every=1",
        "evaluation.every=1",
        "training.tasks_per_step=1",
        "training.group_size=8",
    )
    training = Training(tmp_path, *settings)
    training.finish("training.steps=1")
    assert "resuming small after step 1" in training.finish("training.steps=2")
    assert tomllib.loads((training.run / "config.toml").read_text())["policy"] == "writer"
    folder = training.run / "policies" / "writer"
    assert checkpoint_steps(training.run, "writer") == [1, 2]
    assert not list(training.run.glob("step-*"))
    assert read_state(folder / "step-2").policy == "writer"
    metrics = training.metrics()
    assert [(line["step"], line["policy"]) for line in metrics] == [(0, "writer"), (1, "writer"), (2, "writer")]
    assert all(line["rollouts/trained"] == 8 for line in metrics[1:])

    database = Database(training.run / "leyden.db", readonly=True)
    with database.reader.begin() as connection:
        (episode, *_) = queries.group_episodes(connection, "small", "train-0")
        assert [call.policy for call in episode.calls] == ["writer"]
        assert [version.policy for version in queries.latest_versions(connection, "small")] == ["writer"]
        assert {one.policy for one in queries.rollout_credits(connection, "small", "train-0.0")} == {"writer"}
        assert views.read_series(connection, "small", SeriesQuery(100, "held_out/reward"))["held_out/reward"].steps == (
            0,
            1,
            2,
        )
    database.close()

    checked = run_command("check", "small", "--json", cwd=tmp_path)
    names = [part["name"] for part in json.loads(checked.stdout)]
    assert names == ["leyden.db", "records", "policies/writer/step-1", "policies/writer/step-2"]
    exported = run_command("export", "small", "--to", "exported", "--step", "last", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    evaluated = run_command("eval", "small.toml", "policy=writer", "--model", str(folder / "step-2"), cwd=tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    (measured,) = (tmp_path / "runs").glob("small.eval-*")
    assert measured.name == "small.eval-small-policies-writer-step-2"
    assert run_command("prune", "small", "--checkpoints", "--keep", "1", cwd=tmp_path).returncode == 0
    kept = checkpoint_steps(training.run, "writer")
    assert 2 in kept
    with ServerProcess(tmp_path / "runs", "--model", "small", "--step", "last") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="anything")
        answer = client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "What is 2 plus 3?"}], max_tokens=4
        )
        assert answer.usage is not None and answer.usage.completion_tokens > 0
    assert find_served("small", tmp_path / "runs", "last")[0].source.folder == folder / "step-2"


@pytest.mark.parametrize("name", ["upstream", "fixed", "a/b", "..", "", "step 1"])
def test_a_name_that_cannot_be_a_policy_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="policy"):
        read_config({**DOCUMENT, "policy": name})


def test_routes_name_the_policy() -> None:
    document = {**DOCUMENT, "policy": "writer", "routes": {"small-*": "writer"}}
    assert read_config(document).routes == {"small-*": "writer"}
    with pytest.raises(ConfigError, match="write writer, upstream or"):
        read_config({**document, "routes": {"small-*": "policy"}})
