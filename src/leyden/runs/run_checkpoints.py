"""Finds the run that a model is named after, and its checkpoints, without importing torch."""

import os
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from leyden.config import Config, ConfigError, policy_configs, trained_policies
from leyden.config.schema import STORE_VARIABLE
from leyden.models.source import BUNDLED
from leyden.runs.checkpoint_files import (
    STATE_FILE,
    checkpoint_folder,
    checkpoint_steps,
    common_steps,
    find_damage,
    read_best_step,
)
from leyden.runs.run_folder import stored_config
from leyden.runs.run_names import STORE_NAME, denied, is_run_folder, may_have, run_folders


def find_run(model: str, home: Path) -> Path | None:
    """Return the folder of the run that a model is named after: by its name in the home folder, or by its path.

    The name of a bundled model is never that of a run.
    """
    if model in BUNDLED:
        return None
    return find_run_folder(home, model) or (Path(model) if is_run_folder(Path(model)) else None)


def find_checkpoint(model: str, home: Path, step: str | None = None, policy: str | None = None) -> str | None:
    """Return the path of the best checkpoint, or that of `step`, of the run that a model is named after, if any.

    `policy` is one of its policies; None: the only one.
    """
    run = find_run(model, home)
    if run is not None:
        return str(choose_checkpoint(run, step or "best", policy).absolute())
    if step is not None:
        raise ConfigError(f"--step is for runs, and {model} is not the name or the folder of one")
    return None


def choose_policy(run: Path, policy: str | None) -> str:
    """Return the name of a policy that a run trains; None: the only one."""
    trained = trained_policies(stored_config(run))
    if policy in trained or (policy is None and len(trained) == 1):
        return policy or trained[0]
    which = "it trains several" if policy is None else f"it does not train {policy}"
    raise ConfigError(f"{run}: {which}: name one with --policy: {', '.join(trained)}")


def choose_checkpoint(run: Path, which: str, policy: str | None = None) -> Path:
    """Return the folder of the best, the last or a numbered checkpoint of a policy that a run trains.

    Best and last are steps of which all policies of the run have one.
    """
    policy = choose_policy(run, policy)
    folder, steps = checkpoint_folder(run, policy), checkpoint_steps(run, policy)
    common = common_steps(run, trained_policies(stored_config(run)))
    if not common:
        raise ConfigError(f"{run} has no checkpoint yet: train it for `checkpoints.every` steps, or to its end")
    if which == "last":
        step = common[-1]
    elif which == "best":
        best = read_best_step(folder / f"step-{common[-1]}" / STATE_FILE)
        if best == 0:
            raise ConfigError(
                "no checkpoint is better than the model before training: take the last one with --step last"
            )
        step = common[-1] if best is None else best
    else:
        number = which.removeprefix("step-")
        if not number.isdigit():
            raise ConfigError(f"--step {which}: write best, last, or the number of a step")
        step = int(number)
    if step not in steps:
        raise ConfigError(f"{run} has no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
    checkpoint = folder / f"step-{step}"
    if (damage := find_damage(checkpoint)) is not None:
        raise ConfigError(f"the checkpoint {checkpoint} is damaged: {damage}; name another with --step")
    return checkpoint


def with_model(config: Config, model: str, home: Path, step: str | None = None) -> Config:
    """Return a configuration with another model: any, or the checkpoints of a run.

    Of several policies, those that are trained have the checkpoints of the run's policies of their names. Those that
    play earlier versions play the model before training, as in the run's own evaluations.
    """
    if not config.policies:
        return replace(config, model=find_checkpoint(model, home, step) or model)
    if find_run(model, home) is None:
        raise ConfigError(
            f"--model {model} is one model, and there are several `policies`: name a run that has them, or set "
            "`policies.NAME.model`"
        )
    found = {name: find_checkpoint(model, home, step, name) for name in trained_policies(config)}
    first = {name: own.model for name, own in policy_configs(config).items() if config.policies[name].of is not None}
    policies = {
        name: replace(policy, model=found[name])
        if name in found
        else replace(policy, of=None, trained=False, model=first[name])
        if name in first
        else policy
        for name, policy in config.policies.items()
    }
    return replace(config, policies=policies)


def known_runs(home: Path) -> list[str]:
    """Return the names of the runs in a home folder."""
    return [folder.name for folder in run_folders(home)]


def find_run_folder(home: Path, run: str) -> Path | None:
    """Return the folder of the run of a name; None if there is no such run, or it has no folder."""
    return _by_name(home, may_have(run_folders(home), run)).get(run)


def require_run_folder(home: Path, run: str) -> Path:
    """Return the folder of the run of a name; if it has none, raise an error with the runs that have one."""
    if (folder := find_run_folder(home, run)) is not None:
        return folder
    if (refusal := denied(home, run)) is not None:
        raise ConfigError(refusal)
    known = ", ".join(_by_name(home, run_folders(home)))
    there = f"; there are {known}" if known else ""
    raise ConfigError(f"there is no run {run!r} with a folder in {home}{there}")


def _by_name(home: Path, folders: Sequence[Path]) -> dict[str, Path]:
    """Return some folders of a home folder by the names of their runs, without those whose run has none."""
    if not folders or not (os.environ.get(STORE_VARIABLE) or (home / STORE_NAME).exists()):
        return {folder.name: folder for folder in folders}  # without importing SQLAlchemy
    from leyden.runs.stored_runs import common_ids, name_of_folder

    taken = common_ids(home)
    names = ((name_of_folder(folder, taken) if folder.name in taken else folder.name) for folder in folders)
    return {name: folder for name, folder in zip(names, folders, strict=True) if name is not None}
