"""The first run: a model of two million parameters learns to use a calculator, on this machine, in minutes.

    make demo

The agent requests no temperature, so the model is sampled at 1, in training and in evaluation. Greedy, it is better
before training, so the rise is also given at temperature 0. The last line is one JSON object: held-out reward before
and after, sampled and greedy, optimiser steps, seconds of training; `ratio` is sampled reward after over before. With
`--out FOLDER` it is kept there, with the metrics, the configuration and the curve of the run.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from reporting import add_out, report_result
from rich.console import Console
from rich.markup import escape

import leyden
from leyden.episodes import Episode

HERE = Path(__file__).parent
RUN = "demo"


def main(out: Path | None = None, **settings: Any) -> None:
    """Train, and show what changed. The settings override those of calc.toml."""
    console = Console()
    console.print(f"Training [bold]{HERE.name}/agent.py[/] on spark. Its own code is not touched.\n", highlight=False)
    trained = leyden.train(HERE / "calc.toml", run=RUN, restart=True, **settings)
    greedy = [
        leyden.evaluate(HERE / "calc.toml", run=RUN, agent="agent.py:solve_greedily", model=model, **settings).reward
        for model in ("spark", str(trained.checkpoint))
    ]
    tasks = [json.loads(line)["id"] for line in (HERE / "held_out.jsonl").read_text().splitlines()[:3]]
    for title, step in (("before", 0), ("after", trained.step)):
        console.print(f"\n[bold]The first three held-out tasks, {title}[/]")
        for task in tasks:
            episode, *_ = trained.episodes(f"eval-{step}-{task}")
            console.print(transcript(episode), highlight=False, soft_wrap=True)
    console.print(f"\nreward on the held-out tasks, before and after {trained.step} steps", highlight=False)
    console.print(f"  sampled at temperature 1, as in training   {trained.before:.2f}  {trained.after:.2f}")
    console.print(f"  greedy, at temperature 0                   {greedy[0]:.2f}  {greedy[1]:.2f}")
    console.print(f"curve    {trained.folder / 'curve.png'}", highlight=False, soft_wrap=True)
    console.print(f"the run  {trained.folder}", highlight=False, soft_wrap=True)
    for command, about in next_commands(trained.checkpoint):
        console.print(f"  .venv/bin/{command}   [dim]# {about}[/]", highlight=False, soft_wrap=True)
    report = {
        "ratio": round(trained.after / trained.before, 3) if trained.before else None,
        "before": trained.before,
        "after": trained.after,
        "greedy_before": greedy[0],
        "greedy_after": greedy[1],
        "steps": trained.step,
        "seconds": round(trained.seconds, 1),
    }
    if out is not None:
        keep(trained.folder, out)
    report_result(report, out, command="make demo")


def keep(run: Path, out: Path) -> None:
    """Keep the metrics, the curve and the configuration of a run; paths in it are relative to the repository."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "curve.png"):
        shutil.copy(run / name, out / name)
    config = (run / "config.toml").read_text(encoding="utf-8")
    (out / "config.toml").write_text(config.replace(f"{HERE.parents[1]}/", ""), encoding="utf-8")


def next_commands(checkpoint: Path | None) -> list[tuple[str, str]]:
    """Return commands to go on with and what each is for; their paths are relative to the current folder."""
    here = HERE.relative_to(Path.cwd()) if HERE.is_relative_to(Path.cwd()) else HERE
    config, unseen = here / "calc.toml", here / "unseen.jsonl"
    return [
        (f"leyden show {RUN}", "look at the rollouts"),
        (f"leyden eval {config} --model {checkpoint} --tasks {unseen}", "numbers and phrasings it never saw"),
        (f"leyden export {RUN} --to my-spark", "a folder that transformers loads"),
        (f"leyden dev {config}", "then put your own agent into that file"),
    ]


def transcript(episode: Episode) -> str:
    """Return a rollout in a few lines."""
    last = episode.calls[-1]
    lines = []
    for message in (*episode.messages(last)[1:], last.response):
        calls = [f"calculator({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
        lines.append(f"  {message['role']:>9}  {escape(' '.join(filter(None, [message.get('content'), *calls])))}")
    reward = sum(reward.value for reward in episode.effective_rewards)
    verdict = "[green]right[/]" if reward else "[red]wrong[/]"
    return "\n".join([*lines, f"  {verdict}: the answer is {episode.task.input['answer']}\n"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_out(parser)
    main(parser.parse_args().out)
