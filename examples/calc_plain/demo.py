"""The first run: a model of two million parameters learns to use a calculator, on this machine, in minutes.

    make demo

The last line is one JSON object: held-out reward before and after, optimiser steps, seconds.
"""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

import leyden
from leyden.episodes import Episode

HERE = Path(__file__).parent
RUN = "demo"


def main() -> None:
    """Train, and show what changed."""
    console = Console()
    console.print(f"Training [bold]{HERE.name}/agent.py[/] on spark. Its own code is not touched.\n", highlight=False)
    trained = leyden.train(HERE / "calc.toml", run=RUN, restart=True)
    tasks = [json.loads(line)["id"] for line in (HERE / "held_out.jsonl").read_text().splitlines()[:3]]
    for title, step in (("before", 0), ("after", trained.step)):
        console.print(f"\n[bold]The first three held-out tasks, {title}[/]")
        for task in tasks:
            (episode,) = trained.episodes(f"eval-{step}-{task}")
            console.print(transcript(episode), highlight=False, soft_wrap=True)
    console.print(f"\nheld-out reward {trained.before:.2f} before, {trained.after:.2f} after {trained.step} steps")
    console.print(f"curve    {trained.folder / 'curve.png'}", highlight=False, soft_wrap=True)
    console.print(f"the run  {trained.folder}", highlight=False, soft_wrap=True)
    config = f"{HERE.relative_to(Path.cwd()) if HERE.is_relative_to(Path.cwd()) else HERE}/calc.toml"
    for command, about in (
        (f"leyden show {RUN}", "look at the rollouts"),
        (
            f"leyden eval {config} --model {trained.checkpoint} --tasks unseen.jsonl",
            "numbers and phrasings it never saw",
        ),
        (f"leyden export {RUN} --to my-spark", "a folder that transformers loads"),
        (f"leyden dev {config}", "then put your own agent into that file"),
    ):
        console.print(f"  .venv/bin/{command}   [dim]# {about}[/]", highlight=False, soft_wrap=True)
    report = {
        "before": trained.before,
        "after": trained.after,
        "steps": trained.step,
        "seconds": round(trained.seconds, 1),
    }
    sys.stdout.write(json.dumps(report) + "\n")


def transcript(episode: Episode) -> str:
    """A rollout in a few lines."""
    last = episode.calls[-1]
    lines = []
    for message in (*episode.messages(last)[1:], last.response):
        calls = [f"calculator({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
        lines.append(f"  {message['role']:>9}  {escape(' '.join(filter(None, [message.get('content'), *calls])))}")
    reward = sum(reward.value for reward in episode.effective_rewards)
    verdict = "[green]right[/]" if reward else "[red]wrong[/]"
    return "\n".join([*lines, f"  {verdict}: the answer is {episode.task.input['answer']}\n"])


if __name__ == "__main__":
    main()
