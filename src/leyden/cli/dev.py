"""Prints the report of `leyden dev`: one rollout in full, and counts of everything that was recorded."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leyden.cli.arguments import default_home
from leyden.cli.printing import plural, print_table
from leyden.episodes import Episode
from leyden.estimates import with_error
from leyden.outcomes import MEANING
from leyden.records import Call, RewardKind

if TYPE_CHECKING:
    from leyden.local.dev import DevReport


def print_report(console: Console, report: "DevReport", episodes: Sequence[Episode]) -> None:
    """Print a report and the first of its episodes."""
    if episodes:
        console.print(f"[bold]one of {plural(report.rollouts, 'rollout')}[/]  ({episodes[0].rollout.id})")
        console.print(transcript(episodes[0], report.failure_reward), soft_wrap=True)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    mean = report.mean_reward
    spread = (
        f"mean {with_error(mean, report.reward_error)}, from {min(report.rewards):g} to {max(report.rewards):g}"
        if mean is not None
        else "none"
    )
    if report.failures:
        spread += f", {report.failures} of {len(report.rewards)} as failure_reward"
    tools = {name: f"{count}" + _failures(report, name) for name, count in report.tools.items()}
    rows = {
        "outcomes": format_counts(report.outcomes),
        "calls by role": escape(format_counts(report.roles)) or "none",
        "prompts": escape(format_counts(report.prompts)) or "none",
        "tools called": ", ".join(f"{escape(name)} {count}" for name, count in tools.items()) or "none",
        "rewards": spread,
        "would be trained": (
            f"{plural(report.trained, 'rollout')}, {report.calls_trained} of {plural(report.calls, 'call')}, "
            f"{plural(report.tokens_trained, 'token')}"
        ),
        "would not": escape(format_counts(report.left_out)) or "nothing",
    }
    if (replay := report.replay) is not None:
        rows["replayed exactly"] = f"{replay.exact} of {plural(replay.prefixes, 'call')}"
    for name, value in rows.items():
        table.add_row(name, value)
    print_table(console, table)
    for message, count in report.messages.items():
        console.print(f"[yellow]{count} × {escape(message)}[/]", soft_wrap=True)
    for difference, count in replay.differences.items() if replay is not None else ():
        console.print(f"[yellow]{count} × left the record: {escape(difference)}[/]", soft_wrap=True)
    if report.groups_flat and report.failures < len(report.rewards):
        flat = f"{report.groups_flat} of {report.groups} groups flat"
        console.print(f"[yellow]{flat}: a group with equal rewards has no learning signal[/]")
    if report.position_bias:
        console.print(f"[yellow]{escape(report.position_bias)}[/]", soft_wrap=True)
    home = report.folder.parent
    where = "" if home == default_home().absolute() else f" --home {home}"
    console.print(f"leyden show {report.run}{where}", soft_wrap=True)


def transcript(episode: Episode, failure_reward: float) -> str:
    """Format the conversations of a rollout, each from its last call, and its rewards."""
    lines = []
    ended = last_calls(episode)
    for number, call in enumerate(ended, 1):
        role = episode.role(call)
        if role or len(ended) > 1:
            which = f"conversation {number} of {len(ended)}" + (f", role {role}" if role else "")
            lines.append(f"  [bold]{escape(which)}[/]")
        for message in (*episode.messages(call), call.response):
            if isinstance(message, dict):
                lines.append(f"  [cyan]{escape(str(message.get('role')))}[/]  {escape(message_text(message))}")
    lines.append(f"  [cyan]reward[/] {_rewards(episode, failure_reward)}")
    return "\n".join(lines)


def last_calls(episode: Episode) -> list[Call]:
    """Return the calls that no other call continues. A call that keeps only its parent's prompt is a new branch."""
    calls = {call.id: call for call in episode.calls}
    continued = {
        call.parent
        for call in episode.calls
        if call.parent is not None and call.kept_messages > len(episode.messages(calls[call.parent]))
    }
    return [call for call in episode.calls if call.id not in continued]


def _rewards(episode: Episode, failure_reward: float) -> str:
    outcome = episode.attempt.outcome
    if outcome is None:
        return "none  (unfinished)"
    failed = MEANING[outcome.ending].reward == "failure_reward"
    given = [f"{r.value:g}" for r in episode.effective_rewards if r.kind is not RewardKind.FINAL]
    final = episode.final_reward(failure_reward)
    if failed:
        given.append(f"{failure_reward:g} (failure_reward)")
    elif final is not None:
        parts = ", ".join(f"{name} {value:g}" for name, value in episode.reward_parts.items())
        given.append(f"{final:g}{f' ({parts})' if parts else ''}")
    return f"{', '.join(given) or 'none'}  ({outcome.ending})"


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, with its tool calls."""
    parts = [str(message["content"])] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            parts.append(f"{function.get('name')}({function.get('arguments')})")
    return " ".join(parts)


def _failures(report: "DevReport", name: str) -> str:
    failed = report.tools_failed.get(name, 0)
    return f" ({failed} failed)" if failed else ""


def format_counts(counts: Mapping[str, int]) -> str:
    """Format counts, such as `2 succeeded, 1 timeout`."""
    return ", ".join(f"{count} {_plural(name) if count != 1 else name}" for name, count in counts.items())


def _plural(name: str) -> str:
    return f"calls:{name[5:]}" if name.startswith("call:") else name
