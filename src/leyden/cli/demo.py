"""`leyden demo`: a model of two million parameters learns to use a calculator, on this machine, in minutes.

The agent requests no temperature, so the model is sampled at 1, in training and in evaluation. Greedy, it is better
before training, so the rise is also given at temperature 0.
"""

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from leyden.cli.dev import transcript
from leyden.cli.printing import print_commands, print_json, stdout_console
from leyden.cli.train import add_settings, configuration, needs_torch
from leyden.config import ConfigError
from leyden.extras import install_command

if TYPE_CHECKING:
    from leyden.local.train import TrainingResult

FOLDER = (Path(__file__).parents[1] / "demo").resolve()
"""The agent, its tasks and its configuration: in a clone, `examples/calc_plain`."""
RUN = "demo"


def add_demo(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden demo`."""
    add_settings(command)
    command.set_defaults(run=_demo, config=FOLDER / "calc.toml")


async def _demo(options: argparse.Namespace) -> None:
    needs_torch()
    if find_spec("openai") is None:
        raise ConfigError(f"the agent of the demo needs openai: {install_command('demo')}")
    from leyden.local.evaluate import evaluate_model
    from leyden.local.train import train

    console = Console(stderr=True) if options.json else stdout_console()
    console.print(f"Training [bold]{FOLDER.name}/agent.py[/] on spark. Its own code is not touched.\n", highlight=False)
    options.settings = [f"run={RUN}", *options.settings]
    trained = await train(configuration(options), restart=True)
    if trained.step < trained.steps or trained.after is None:
        console.print(f"stopped at step {trained.step} of {trained.steps}: leyden demo starts anew", highlight=False)
        return
    options.settings.append("agent=agent.py:solve_greedily")
    greedy = configuration(options)
    rewards = [(await evaluate_model(greedy, model)).reward for model in ("spark", str(trained.checkpoint))]
    _print_result(console, trained, rewards)
    if options.json:
        print_json(
            {
                "before": trained.before,
                "after": trained.after,
                "greedy_before": rewards[0],
                "greedy_after": rewards[1],
                "steps": trained.step,
                "seconds": round(trained.seconds, 1),
                "folder": trained.folder,
            }
        )


def _print_result(console: Console, trained: "TrainingResult", greedy: list[float | None]) -> None:
    """Print the first held-out tasks before and after training, the rewards, and how to go on."""
    tasks = [json.loads(line)["id"] for line in (FOLDER / "held_out.jsonl").read_text().splitlines()[:3]]
    for title, step in (("before", 0), ("after", trained.step)):
        console.print(f"\n[bold]The first three held-out tasks, {title}[/]")
        for task in tasks:
            for episode in trained.episodes(f"eval-{step}-{task}")[:1]:
                console.print(transcript(episode, 0.0), highlight=False, soft_wrap=True)
                console.print(f"  the answer is {episode.task.input['answer']}\n", highlight=False)
    console.print(f"\nreward on the held-out tasks, before and after {trained.step} steps", highlight=False)
    console.print(f"  sampled at temperature 1, as in training   {_two(trained.before)}  {_two(trained.after)}")
    console.print(f"  greedy, at temperature 0                   {_two(greedy[0])}  {_two(greedy[1])}")
    console.print(f"curve    {trained.folder / 'curve.png'}", highlight=False, soft_wrap=True)
    console.print(f"the run  {trained.folder}", highlight=False, soft_wrap=True)
    print_commands(console, next_commands(trained.checkpoint))


def next_commands(checkpoint: Path | None) -> list[tuple[str, str]]:
    """Return commands to go on with and what each is for; their paths are relative to the current folder."""
    here = FOLDER.relative_to(Path.cwd()) if FOLDER.is_relative_to(Path.cwd()) else FOLDER
    return [
        (f"leyden show {RUN}", "look at the rollouts"),
        (
            f"leyden eval {here / 'calc.toml'} --model {checkpoint} --tasks {here / 'unseen.jsonl'}",
            "numbers and phrasings it never saw",
        ),
        (f"leyden export {RUN} --to my-spark", "a folder that transformers loads"),
        ("leyden init my-agent", "this agent in a folder of its own, to put yours in its place"),
    ]


def _two(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:.2f}"
