"""The model card of an exported model, written from the record of its run, and the upload to the Hugging Face Hub."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile
from typing import Any

from leyden import __version__
from leyden.config import Config, ConfigError
from leyden.estimates import with_error
from leyden.models.source import BUNDLED, find_model
from leyden.orchestrator.report.metrics_log import read_metrics
from leyden.orchestrator.report.plot import metric_points
from leyden.runs.run_folder import RunFolder

_UNKNOWN = "unknown"
_BUNDLED_LICENCE = "apache-2.0"


def write_card(run: Path, config: Config, checkpoint: Path, to: Path) -> None:
    """Write README.md, and the curve of the run, into the folder of an exported model."""
    folder = RunFolder(run)
    metrics = read_metrics(folder.metrics_file, config.policy)
    curve = ""
    if folder.curve.is_file():
        copyfile(folder.curve, to / folder.curve.name)
        curve = f"\n![Rewards over training steps]({folder.curve.name})\n"
    step = int(checkpoint.name.removeprefix("step-"))
    licence = base_licence(config)
    model = Path(config.model).name if Path(config.model).is_absolute() else config.model
    head: dict[str, Any] = {
        "library_name": "transformers",
        "license": licence,
        "tags": ["reinforcement-learning", "agent", "leyden"],
    }
    if config.model not in BUNDLED and model == config.model:
        head["base_model"] = model
    front = "\n".join(f"{key}: {json.dumps(value)}" for key, value in sorted(head.items()))
    algorithm, training = config.algorithm, config.training
    rate = "" if training.learning_rate is None else f", learning rate {training.learning_rate:g}"
    about = {
        "policy": config.policy,
        "base model": f"{model}, licence {licence}",
        "data": f"{Path(config.tasks).name}; held out: {_name(config.held_out)}",
        "agent, reward": f"{_name(config.agent)}, {_name(config.reward or 'the number that the agent returns')}",
        "algorithm": f"credit {algorithm.credit}, advantage {algorithm.advantage}, loss {algorithm.loss}, "
        f"aggregation {algorithm.aggregation}, correction {algorithm.correction}, KL {algorithm.kl:g}",
        "training": f"{step} of {training.steps} steps, each of {training.tasks_per_step} tasks with "
        f"{training.group_size} rollouts{rate}, seed {config.seed}",
        "sampling": f"temperature {config.sampling.temperature:g}",
    }
    rows = "".join(f"| {name} | {value} |\n" for name, value in about.items())
    text = f"""---
{front}
---

# {config.run}

Step {step} of the run `{config.run}`, trained by reinforcement learning with Leyden {__version__}.

| | |
| --- | --- |
{rows}
{_figures(metrics, step)}{curve}"""
    (to / "README.md").write_text(text, encoding="utf-8")


def _figures(metrics: Sequence[dict[str, Any]], step: int) -> str:
    """Return a table of the held-out and test rewards with their standard errors."""
    errors = dict(metric_points(metrics, "held_out/error"))
    measured = metric_points(metrics, "held_out/reward")
    steps = {0: "before training", step: "this model"}
    rows = [
        f"| held-out tasks, step {at}{f', {steps[at]}' if at in steps else ''} | {with_error(reward, errors.get(at))} |"
        for at, reward in measured
    ]
    test_errors = dict(metric_points(metrics, "test/error"))
    rows += [
        f"| test tasks, step {at} | {with_error(reward, test_errors.get(at))} |"
        for at, reward in metric_points(metrics, "test/reward")
    ]
    if not rows:
        return "The run measured no reward on tasks that it was not trained on.\n"
    best = "The best of several steps is chosen by its held-out reward, which is optimistic for it."
    note = f"± is a standard error, clustered by task. {best}"
    return "\n".join(["| mean reward | |", "| --- | --- |", *rows, "", note, ""])


def _name(reference: object) -> str:
    """Return a path without its folders, which say where a person works."""
    return re.sub(r"\S*/", "", str(reference))


def base_licence(config: Config) -> str:
    """Return the licence that the card of the base model names."""
    if config.model in BUNDLED:
        return _BUNDLED_LICENCE
    card = Path(find_model(config.model, config.base).folder) / "README.md"
    head = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8"), re.DOTALL) if card.is_file() else None
    named = re.search(r"^license:\s*([\w.-]+)", head[1], re.MULTILINE) if head else None
    return named[1] if named else _UNKNOWN


def push(folder: Path, name: str) -> str:
    """Upload an exported model to the Hub, as a private repository if there is none of this name; returns its URL."""
    from huggingface_hub import HfApi

    api = HfApi(library_name="leyden", library_version=__version__)
    try:
        url = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Model trained with Leyden")
    except Exception as error:  # of many kinds: no such name, no network, no access
        first, _, _ = str(error).partition("\n")
        raise ConfigError(f"--push {name}: {first} (the model is in {folder}; log in with `hf auth login`)") from error
    return str(url)
