"""`leyden runs` and `leyden show`: list runs, and show a run or one of its rollouts."""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from leyden.api.client import RemoteError
from leyden.api.views import ListedTask, RolloutQuery, RunCard, TaskQuery
from leyden.api.wire import ListedRollout, RolloutDetail, RolloutPage, RunSummary
from leyden.cli.arguments import identifier, integer, run_name
from leyden.cli.dev import message_text
from leyden.cli.policies import policies_table, summarise_policies
from leyden.cli.printing import format_bytes, format_number, plural, print_json, print_table, stdout_console
from leyden.cli.source import add_source, all_runs, open_source
from leyden.config import ConfigError, flattened
from leyden.episodes import Episode
from leyden.estimates import with_error
from leyden.outcomes import Ending
from leyden.records import Attempt, Call, CallCredit, Rollout, RunSettings, Sampling, Span, StepCredits
from leyden.runs.run_folder import folder_size
from leyden.runs.stored_runs import RunSource, StoredRuns
from leyden.store.files.run_lock import INTERRUPTED

_OUTPUT_LINES, _MAX_LINE_LENGTH = 20, 2000
_MAX_INPUT_LENGTH = 60
_LIST_PAGE, _SEARCH_PAGE = 1000, 500
"""Rollouts or tasks of one request."""


def add_runs(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden runs`."""
    add_source(command)
    command.set_defaults(run=_runs)


def add_show(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden show`."""
    command.add_argument("name", metavar="RUN", type=run_name)
    command.add_argument("rollout", metavar="ROLLOUT", type=identifier, nargs="?")
    command.add_argument("--after", metavar="ROLLOUT", type=identifier, help="show the rollouts that follow this one")
    command.add_argument(
        "--outcome", metavar="NAME", type=_outcomes, help="only these outcomes, as in agent_error,timeout"
    )
    command.add_argument("--step", type=integer(0, 2**31 - 1), metavar="N", help="only rollouts of this step")
    command.add_argument("--reward-below", type=float, metavar="X", help="only rollouts with a smaller reward")
    command.add_argument("--tasks", action="store_true", help="list the tasks, those with the fewest successes first")
    command.add_argument("--newest", action="store_true", help="the newest rollouts first")
    command.add_argument("--limit", type=integer(1, 2**31 - 1), default=20, help="how many rows (default: 20)")
    add_source(command)
    command.set_defaults(run=_show)


async def _runs(options: argparse.Namespace) -> None:
    found = await all_runs(options)
    sizes = [None if one.folder is None else folder_size(one.folder) for one in found]
    if options.json:
        listed = zip(found, sizes, strict=True)
        print_json([{**msgspec.to_builtins(one.summary), "card": one.card, "bytes": size} for one, size in listed])
        return
    console = stdout_console()
    if not found:
        database = "the database that --store or LEYDEN_STORE names" if options.store else options.home.absolute()
        console.print(f"no runs yet in {options.server or database}", soft_wrap=True)
        return
    columns = "run started state step groups calls tokens reward of best size rollouts"
    table = Table(*columns.split(), box=box.SIMPLE, pad_edge=False)
    for one, size in zip(found, sizes, strict=True):
        run, card = one.summary, one.card
        table.add_row(
            run.id,
            _time(run.created),
            "-" if card is None else card.state,
            "-" if card is None else card.progress,
            _groups(run),
            str(run.calls),
            str(run.tokens),
            *_rewards_of(run, card),
            "-" if size is None else format_bytes(size),
            _counts(run),
        )
    print_table(console, table)
    console.print(
        "reward: of the last evaluation (held-out), or of the last step (training), or of all rollouts (dev), ± its "
        "standard error; of: how many rollouts it is the mean of",
        soft_wrap=True,
    )


def _rewards_of(run: RunSummary, card: RunCard | None) -> tuple[str, str, str]:
    """Return reward, what it is the mean of, and the best reward with its step."""
    if card is None or card.reward is None:  # no rollout of a step or an evaluation: the mean over all rollouts
        return format_number(run.mean_reward), "-" if run.mean_reward is None else "all", "-"
    best = f"{with_error(card.best, card.best_error)} at {card.best_step}" if card.best_step is not None else "-"
    return with_error(card.reward, card.error), f"{card.counted} {card.measured}", best


async def _show(options: argparse.Namespace) -> None:
    async with open_source(options, options.name) as source:
        if options.tasks:
            await _show_tasks(source, options)
        elif options.rollout is None:
            await _show_run(source, options)
        else:
            await _show_rollout(source, options)


async def _show_run(source: RunSource, options: argparse.Namespace) -> None:
    run, summary, card = await source.get_run(options.name), await source.summarise_run(options.name), None
    with suppress(RemoteError):  # a server that runs without keys refuses it
        card = await source.run_card(options.name)
    query = RolloutQuery(
        ending=options.outcome or "",
        step_from=options.step,
        step_to=options.step,
        reward_below=options.reward_below,
        sort="newest" if options.newest else "oldest",
    )
    filtered = query != RolloutQuery(sort="oldest")
    if filtered and options.after is not None:
        raise ConfigError("--after goes on in the whole list: leave it out beside filters, and raise --limit")
    listed, total = await (_search(source, options, query) if filtered else _list(source, options))
    policies = await summarise_policies(source, options.name, card)
    if options.json:
        by_policy = {"policies": policies} if policies else {}
        print_json({"run": run, "summary": summary, "card": card, **by_policy, "rollouts": listed})
        return
    console = stdout_console()
    counts = _counts(summary) or "no rollouts"
    console.print(f"[bold]{run.id}[/]  started {_time(run.created)}, {counts}", soft_wrap=True)
    reward, of, best = _rewards_of(summary, card)
    rollouts = "rollout" if of.startswith("1 ") else "rollouts"
    rewarded = "no reward" if of == "-" else f"reward {reward} ({of} {rollouts})"
    rewarded += "" if best == "-" else f", best {best}"
    sampled = f"{plural(summary.calls, 'call')}, {plural(summary.tokens, 'sampled token')}"
    console.print(f"{sampled}, {rewarded}", soft_wrap=True)
    usual = flattened(msgspec.to_builtins(RunSettings()) | {"sampling": msgspec.structs.asdict(Sampling())})
    found = flattened(msgspec.to_builtins(run.settings)).items()
    settings = [
        f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in found if value != usual.get(name)
    ]
    console.print(f"settings  {escape(', '.join(settings)) or 'defaults'}", soft_wrap=True)
    if policies:
        print_table(console, policies_table(policies))
    print_table(console, _rollouts(listed, _is_interrupted(source)))
    if filtered:
        onward = f" (--limit {total} shows all)" if len(listed) < total else ""
        console.print(f"{len(listed)} of {total} that match{onward}")
    elif len(listed) == options.limit:
        console.print(f"more: leyden show {run.id} --after {listed[-1].id}", soft_wrap=True)


async def _search(
    source: RunSource, options: argparse.Namespace, query: RolloutQuery
) -> tuple[list[ListedRollout], int]:
    """Return the first rollouts that match, and how many match."""
    found: list[ListedRollout] = []
    while True:
        limit = min(_SEARCH_PAGE, options.limit - len(found))
        query = msgspec.structs.replace(query, offset=len(found), limit=limit)
        page = await source.search_rollouts(options.name, query)
        found += page.rollouts
        if len(page.rollouts) < limit or len(found) == options.limit:
            return found, page.total


async def _list(source: RunSource, options: argparse.Namespace) -> tuple[list[ListedRollout], int]:
    """Return the rollouts after `--after`, in the order in which they were queued."""
    found: list[ListedRollout] = []
    while True:
        limit, after = min(_LIST_PAGE, options.limit - len(found)), found[-1].id if found else options.after or ""
        page = await source.list_rollouts(options.name, RolloutPage(after, limit))
        found += page
        if len(page) < limit or len(found) == options.limit:
            return found, len(found)


async def _show_tasks(source: RunSource, options: argparse.Namespace) -> None:
    if options.rollout is not None:
        raise ConfigError(f"--tasks lists the tasks of a run: leave out {options.rollout}")
    found: list[ListedTask] = []
    while True:
        limit = min(_SEARCH_PAGE, options.limit - len(found))
        page = await source.list_tasks(options.name, TaskQuery(offset=len(found), limit=limit))
        found += page.tasks
        if len(page.tasks) < limit or len(found) == options.limit:
            break
    if options.json:
        print_json({"tasks": found, "total": page.total})
        return
    columns = ("task", "for", "groups", "rollouts", "success", "reward", "flat", "step", "input")
    table = Table(*columns, box=box.SIMPLE, pad_edge=False)
    for task in found:
        table.add_row(
            *(task.id, task.purpose, str(task.groups), str(task.rollouts)),
            *map(format_number, (task.success, task.reward, task.flat)),
            "-" if task.step is None else str(task.step),
            Text(_plain(task.input[:_MAX_INPUT_LENGTH])),
        )
    console = stdout_console()
    print_table(console, table)
    onward = f" (--limit {page.total} shows all)" if len(found) < page.total else ""
    console.print(f"{len(found)} of {plural(page.total, 'task')}{onward}")


async def _show_rollout(source: RunSource, options: argparse.Namespace) -> None:
    run, detail = await source.get_run(options.name), await source.get_rollout(options.name, options.rollout)
    episodes = [await source.get_episode(options.name, attempt.id) for attempt in detail.attempts]
    credits = await source.rollout_credits(options.name, options.rollout)
    if options.json:
        print_json({"rollout": detail.rollout, "task": detail.task, "episodes": episodes, "credits": credits})
        return
    console = stdout_console()
    interrupted = _is_interrupted(source)
    _print_head(console, detail, interrupted)
    for episode in episodes:
        reward = episode.final_reward(run.settings.failure_reward)
        ending = f"{_ending(episode.attempt, interrupted)}, reward {format_number(reward)}"
        console.rule(f"attempt {episode.attempt.number}: {ending}", align="left")
        _print_episode(console, episode, credits)


_OUTCOMES = (*map(str, Ending), "running", "queued")


def _outcomes(text: str) -> str:
    if unknown := [name for name in text.split(",") if name not in _OUTCOMES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no outcome: there are {', '.join(_OUTCOMES)}")
    return text


def _is_interrupted(source: RunSource) -> bool:
    """Whether no process works on a run any more, so that none of its rollouts is running."""
    return isinstance(source, StoredRuns) and source.held is False


def _rollouts(listed: Sequence[ListedRollout], interrupted: bool) -> Table:
    """Build the table of rollouts. It has a column of attempts only if one was retried."""
    retried = any(rollout.attempts > 1 for rollout in listed)
    columns = ("rollout", "task", "for", "state", "reward", "calls", *(("attempts",) if retried else ()), "message")
    table = Table(*columns, box=box.SIMPLE, pad_edge=False)
    for rollout in listed:
        attempts = f"{rollout.attempts} of {rollout.max_attempts}" if rollout.attempts > 1 else ""
        table.add_row(
            rollout.id,
            rollout.task,
            rollout.purpose,
            _state(rollout, interrupted),
            format_number(rollout.reward),
            "-" if rollout.calls is None else str(rollout.calls),
            *((attempts,) if retried else ()),
            Text(_plain(rollout.outcome.message if rollout.outcome else "")),
        )
    return table


def _print_head(console: Console, detail: RolloutDetail, interrupted: bool) -> None:
    rollout = detail.rollout
    head = f"[bold]{rollout.id}[/]  {_state(rollout, interrupted)}, task {rollout.task}, for {rollout.purpose}"
    console.print(head, soft_wrap=True)
    console.print(Text("input  " + _short(detail.task.input)))


def _print_episode(console: Console, episode: Episode, credits: Sequence[StepCredits]) -> None:
    attempt = episode.attempt
    console.print(f"worker {attempt.worker}, started {_time(attempt.started)}", soft_wrap=True)
    if attempt.outcome and attempt.outcome.message:
        console.print(Text(_plain(attempt.outcome.message)))
    for call in episode.calls:
        console.print(f"[bold]call {call.id}[/]  {_facts(episode, call)}", soft_wrap=True)
        for message in call.messages:
            console.print(Text("  > " + _message(message)))
        if call.response is not None:
            console.print(Text("  < " + _message(call.response)))
        for of_step in credits:
            for credit in of_step.calls:
                if (credit.attempt, credit.call) == (attempt.id, call.id):
                    console.print(Text(f"  = step {of_step.step}: {_credit(credit)}"))
    for reward in episode.rewards:
        owner = f"call {reward.call}" if reward.call else f"span {reward.span}" if reward.span else "the attempt"
        console.print(
            f"{reward.kind} reward {escape(reward.name)} = {reward.value:g} (weight {reward.weight:g}) for {owner}, "
            f"from {escape(reward.source)}{'' if reward in episode.effective_rewards else ', replaced'}",
            soft_wrap=True,
        )
    if episode.spans:
        console.print(_span_tree(episode.spans), soft_wrap=False)  # with soft_wrap, rich cuts the lines of a tree
    if episode.output:
        _print_output(console, episode.output)
    if attempt.result is not None:
        console.print(Text("result  " + _short(attempt.result)))


def _print_output(console: Console, output: str) -> None:
    lines = _plain(output).rstrip("\n").split("\n")
    kept = lines[-_OUTPUT_LINES:]
    missing = f" (the last {len(kept)} of {len(lines)} lines; --json has all)" if len(kept) < len(lines) else ""
    console.print(f"[bold]output[/]{missing}")
    for line in kept:
        console.print(Text("  | " + (line if len(line) <= _MAX_LINE_LENGTH else f"{line[:_MAX_LINE_LENGTH]}...")))


def _facts(episode: Episode, call: Call) -> str:
    facts = [
        f"{len(episode.prompt_ids(call))} + {len(call.completion_ids)} tokens",
        f"{call.prompt_origin}{f' ({escape(_plain(call.origin_reason))})' if call.origin_reason else ''}",
        f"finish {escape(_plain(call.finish))}",
    ]
    if role := episode.role(call):
        facts.append(f"role {escape(role)}")
    if call.versions:
        facts.append(f"{call.policy} version {call.versions[-1].number}")
    if call.untrainable:
        facts.append(f"not trained on: {call.untrainable}")
    return ", ".join(facts)


def _credit(credit: CallCredit) -> str:
    numbers = [
        f"{name} {value:.4g}"
        for name, value in (("value", credit.value), ("advantage", credit.advantage), ("weight", credit.weight))
        if value is not None
    ]
    trained = f"not trained on: {_plain(credit.excluded)}" if credit.excluded else f"trained on {credit.tokens} tokens"
    return ", ".join([trained, *numbers])


def _span_tree(spans: tuple[Span, ...]) -> Tree:
    tree = Tree("spans")
    nodes: dict[str, Tree] = {}
    known = {span.span_id for span in spans}
    waiting = sorted(spans, key=lambda span: span.start_ns)
    while waiting:
        ready = [span for span in waiting if span.parent_id not in known or span.parent_id in nodes]
        for span in ready or waiting:  # spans in a parent cycle go to the top
            parent = nodes.get(span.parent_id or "", tree)
            duration_ms = (span.end_ns - span.start_ns) / 1e6
            failed = f" [red]error {escape(_plain(span.status_message))}[/]" if span.status == "error" else ""
            nodes[span.span_id] = parent.add(f"{escape(_plain(span.name))}  {duration_ms:.1f} ms{failed}")
        waiting = [span for span in waiting if span.span_id not in nodes]
    return tree


def _groups(run: RunSummary) -> str:
    unscored = f", {run.groups_unscored} to be scored" if run.groups_unscored else ""
    return f"{run.groups_finished} of {run.groups}{unscored}"


def _counts(run: RunSummary) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(run.rollouts.items()))


def _state(rollout: Rollout, interrupted: bool) -> str:
    if rollout.outcome:
        return str(rollout.outcome.ending)
    return INTERRUPTED if interrupted else str(rollout.state)


def _ending(attempt: Attempt, interrupted: bool) -> str:
    return str(attempt.outcome.ending) if attempt.outcome else INTERRUPTED if interrupted else "running"


def _message(message: Any) -> str:
    if isinstance(message, dict) and isinstance(message.get("content"), str | None):
        return _plain(f"{message.get('role', '?')}: {message_text(message)}")
    return _short(message)


def _short(value: Any, most: int = 2000) -> str:
    text = _plain(msgspec.json.encode(value).decode())
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _plain(text: str) -> str:
    """Replace control characters in an agent's text, so that it cannot control the terminal."""
    return text.translate(_CONTROLS)


_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def _time(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
