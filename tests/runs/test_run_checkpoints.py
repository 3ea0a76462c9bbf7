"""The checkpoints of a run as the models of a configuration."""

from pathlib import Path

import msgspec
import pytest

from leyden.config import policy_configs, read_config, to_toml, trained_policies
from leyden.learner.protocol import TrainerState
from leyden.runs import run_checkpoints
from leyden.runs.checkpoint_files import STATE_FILE, checkpoint_folder, write_checksums
from leyden.runs.run_checkpoints import choose_checkpoint, with_model


def test_policies_that_were_killed_between_their_checkpoints_are_those_of_one_step(tmp_path: Path) -> None:
    config = read_config({"run": "r", "agent": "a", "tasks": "t", "policies": {"one": {"roles": ["x"]}, "two": {}}})
    (tmp_path / "config.toml").write_text(to_toml(config))
    for policy, step, best in (("one", 1, 1), ("one", 2, 2), ("two", 1, 1)):
        folder = checkpoint_folder(tmp_path, policy) / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / STATE_FILE).write_bytes(msgspec.json.encode(TrainerState(step, policy, best_step=best)))
        write_checksums(folder)
    for which in ("best", "last"):
        assert [choose_checkpoint(tmp_path, which, name).name for name in ("one", "two")] == ["step-1"] * 2
    assert choose_checkpoint(tmp_path, "2", "one").name == "step-2"


def test_who_plays_earlier_versions_plays_the_model_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_checkpoints, "find_run", lambda model, home: home / model)
    monkeypatch.setattr(
        run_checkpoints, "find_checkpoint", lambda model, home, step, policy: f"{model}/{policy}/step-9"
    )
    policies = {"player": {"model": "spark"}, "rival": {"of": "player", "roles": "rival"}}
    config = read_config({"run": "r", "agent": "a", "tasks": "t", "policies": policies})
    found = with_model(config, "mine", tmp_path)
    assert {name: own.model for name, own in policy_configs(found).items()} == {
        "player": "mine/player/step-9",
        "rival": "spark",
    }
    assert trained_policies(found) == ["player"]
