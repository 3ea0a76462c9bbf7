"""What `leyden dev` prints: everything that was caught, counted, and one rollout in full."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leyden.episodes import Episode

if TYPE_CHECKING:
    from leyden.local.dev import Caught


def show_caught(console: Console, caught: "Caught", episodes: Sequence[Episode]) -> None:
    """Print what came of a few rollouts."""
    if episodes:
        console.print(f"[bold]one of {caught.rollouts} rollouts[/]  ({episodes[0].rollout.id})", highlight=False)
        console.print(transcript(episodes[0]), highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    mean = caught.mean_reward
    spread = f"mean {mean:.3f}, from {min(caught.rewards):g} to {max(caught.rewards):g}" if mean is not None else "none"
    tools = {name: f"{count}" + _failures(caught, name) for name, count in caught.tools.items()}
    rows = {
        "outcomes": _listed(caught.outcomes),
        "calls by role": _listed(caught.roles),
        "prompts": _listed(caught.prompts),
        "tools called": ", ".join(f"{escape(name)} {count}" for name, count in tools.items()) or "none",
        "rewards": spread,
        "would be trained": (
            f"{caught.trained} rollouts, {caught.calls_trained} of {caught.calls} calls, {caught.tokens_trained} tokens"
        ),
        "would not": _listed(caught.left_out) or "nothing",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    for message in caught.messages:
        console.print(f"[yellow]{escape(message)}[/]", highlight=False, soft_wrap=True)
    if mean is not None and len(set(caught.rewards)) == 1:
        console.print(f"[yellow]every reward is {mean:g}: a group of equal rewards teaches nothing[/]")
    console.print(f"leyden show {caught.run} --home {caught.folder}", highlight=False, soft_wrap=True)


def transcript(episode: Episode) -> str:
    """A rollout as its last call saw it, with its answer and its reward."""
    lines = []
    if episode.calls:
        last = episode.calls[-1]
        for message in (*episode.messages(last), last.response):
            if isinstance(message, dict):
                lines.append(f"  [cyan]{escape(str(message.get('role')))}[/]  {escape(_text(message))}")
    rewards = ", ".join(f"{reward.value:g}" for reward in episode.standing_rewards) or "none"
    outcome = episode.attempt.outcome
    lines.append(f"  [cyan]reward[/] {rewards}  ({outcome.ending if outcome else 'unfinished'})")
    return "\n".join(lines)


def _text(message: Mapping[str, Any]) -> str:
    parts = [str(message["content"])] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        parts.append(f"{call['function']['name']}({call['function']['arguments']})")
    return " ".join(parts)


def _failures(caught: "Caught", name: str) -> str:
    failed = caught.tools_failed.get(name, 0)
    return f" ({failed} failed)" if failed else ""


def _listed(counts: Mapping[str, int]) -> str:
    return escape(", ".join(f"{count} {name}" for name, count in counts.items()))
