"""What `leyden dev` prints: everything that was caught, counted, and one rollout in full."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leyden.cli.printing import print_table
from leyden.episodes import Episode
from leyden.outcomes import MEANING
from leyden.records import Call, RewardKind

if TYPE_CHECKING:
    from leyden.local.dev import DevReport


def show_caught(console: Console, caught: "DevReport", episodes: Sequence[Episode]) -> None:
    """Print what came of a few rollouts."""
    if episodes:
        console.print(f"[bold]one of {caught.rollouts} rollouts[/]  ({episodes[0].rollout.id})", highlight=False)
        console.print(transcript(episodes[0], caught.failure_reward), highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    mean = caught.mean_reward
    spread = f"mean {mean:.3f}, from {min(caught.rewards):g} to {max(caught.rewards):g}" if mean is not None else "none"
    if caught.failures:
        spread += f", {caught.failures} of {len(caught.rewards)} as failure_reward"
    tools = {name: f"{count}" + _failures(caught, name) for name, count in caught.tools.items()}
    rows = {
        "outcomes": counted(caught.outcomes),
        "calls by role": escape(counted(caught.roles)),
        "prompts": escape(counted(caught.prompts)),
        "tools called": ", ".join(f"{escape(name)} {count}" for name, count in tools.items()) or "none",
        "rewards": spread,
        "would be trained": (
            f"{caught.trained} rollouts, {caught.calls_trained} of {caught.calls} calls, {caught.tokens_trained} tokens"
        ),
        "would not": escape(counted(caught.left_out)) or "nothing",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    print_table(console, table)
    for message in caught.messages:
        console.print(f"[yellow]{escape(message)}[/]", highlight=False, soft_wrap=True)
    if mean is not None and len(set(caught.rewards)) == 1:
        console.print(f"[yellow]every reward is {mean:g}: a group of equal rewards teaches nothing[/]")
    console.print(f"leyden show {caught.run} --home {caught.folder}", highlight=False, soft_wrap=True)


def transcript(episode: Episode, failure_reward: float) -> str:
    """The conversations of a rollout, each as its last call saw it with its answer, and what the rollout earned."""
    lines = []
    last_calls = _last_calls(episode)
    for number, call in enumerate(last_calls, 1):
        role = episode.role(call)
        if role or len(last_calls) > 1:
            which = f"conversation {number} of {len(last_calls)}" + (f", role {role}" if role else "")
            lines.append(f"  [bold]{escape(which)}[/]")
        for message in (*episode.messages(call), call.response):
            if isinstance(message, dict):
                lines.append(f"  [cyan]{escape(str(message.get('role')))}[/]  {escape(_text(message))}")
    lines.append(f"  [cyan]reward[/] {_earned(episode, failure_reward)}")
    return "\n".join(lines)


def _last_calls(episode: Episode) -> list[Call]:
    """Those that no other continues: one that keeps no more than the prompt of another begins a branch of its own."""
    calls = {call.id: call for call in episode.calls}
    continued = {
        call.parent
        for call in episode.calls
        if call.parent is not None and call.kept_messages > len(episode.messages(calls[call.parent]))
    }
    return [call for call in episode.calls if call.id not in continued]


def _earned(episode: Episode, failure_reward: float) -> str:
    outcome = episode.attempt.outcome
    if outcome is None:
        return "none  (unfinished)"
    failed = MEANING[outcome.ending].reward == "failure_reward"
    given = [f"{r.value:g}" for r in episode.effective_rewards if not failed or r.kind is not RewardKind.FINAL]
    if failed:
        given.append(f"{failure_reward:g} (failure_reward)")
    return f"{', '.join(given) or 'none'}  ({outcome.ending})"


def _text(message: Mapping[str, Any]) -> str:
    parts = [str(message["content"])] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        parts.append(f"{call['function']['name']}({call['function']['arguments']})")
    return " ".join(parts)


def _failures(caught: "DevReport", name: str) -> str:
    failed = caught.tools_failed.get(name, 0)
    return f" ({failed} failed)" if failed else ""


def counted(counts: Mapping[str, int]) -> str:
    """Counts in words."""
    return ", ".join(f"{count} {_plural(name) if count != 1 else name}" for name, count in counts.items())


def _plural(name: str) -> str:
    return f"calls:{name[5:]}" if name.startswith("call:") else name
