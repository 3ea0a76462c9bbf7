"""`leyden top`: the numbers of the dashboard in the terminal, as they change."""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import suppress

from msgspec import Struct
from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from leyden.api.fleet import EngineView, Fleet
from leyden.api.views import RunCard
from leyden.cli.arguments import run_name
from leyden.cli.printing import plural, print_json, print_table, stdout_console
from leyden.cli.source import Watched, add_source, open_watched
from leyden.config import ConfigError
from leyden.estimates import with_error
from leyden.store.files.run_lock import INTERRUPTED

_METRICS = (
    "reward/mean",
    "reward/own",
    "held_out/change",
    "held_out/change_error",
    "training/entropy",
    "training/kl_sampler_k3",
    "training/clipped_high",
    "groups/requested",
    "groups/flat",
    "time/sampling_s",
    "time/training_s",
    "time/publishing_s",
)


class TopView(Struct, frozen=True):
    """What one refresh shows."""

    runs: tuple[RunCard, ...]
    latest: dict[str, float]
    """The metrics of the last step of the run that something last happened in."""
    fleet: Fleet | None
    policies: dict[str, dict[str, float]] = {}
    """The same by policy, if that run trains several."""


def add_top(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden top`."""
    command.add_argument("name", metavar="RUN", type=run_name, nargs="?", help="only this run")
    command.add_argument("--once", action="store_true", help="print once and end")
    command.add_argument(
        "--every", type=_interval, default=1.0, metavar="S", help="seconds between refreshes (default: 1)"
    )
    add_source(command)
    command.set_defaults(run=_top)


def _interval(text: str) -> float:
    with suppress(ValueError):
        if 0.1 <= float(text) <= 3600:
            return float(text)
    raise argparse.ArgumentTypeError(f"write seconds from 0.1 to 3600, not {text!r}")


async def _top(options: argparse.Namespace) -> None:
    async with open_watched(options) as watched:
        if options.json:
            print_json(await _view(watched, options.name))
            return
        console = stdout_console()
        if options.once or not console.is_terminal:
            view = await _view(watched, options.name)
            print_table(console, _table(view))
            for line in _lines(view):
                console.print(line, markup=False, soft_wrap=True)
            return
        with Live(_draw(await _view(watched, options.name)), console=console, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(options.every)
                live.update(_draw(await _view(watched, options.name)), refresh=True)


async def _view(watched: Watched, only: str | None) -> TopView:
    every = await watched.cards()
    cards = [card for card in every if only in (None, card.id)]
    if only is not None and not cards:
        raise ConfigError(f"no run {only!r}: there are {', '.join(sorted(card.id for card in every)) or 'none yet'}")
    latest: dict[str, dict[str, float]] = {}
    if cards:
        newest = max(cards, key=lambda card: card.last_event)
        for policy, series in (await watched.series(newest, _METRICS)).items():
            latest[policy] = {name: one.values[-1] for name, one in series.items()}
    first = next(iter(latest.values()), {})
    return TopView(tuple(cards), first, await watched.fleet(), latest if len(latest) > 1 else {})


def _draw(view: TopView) -> Group:
    return Group(_table(view), *map(Text, _lines(view)))


def _table(view: TopView) -> Table:
    table = Table("run", "state", "step", "reward", "of", "best", "rollouts", "failed", "tokens", box=box.SIMPLE)
    for card in view.runs:
        total = sum(card.rollouts.values())
        failed = total - sum(card.rollouts.get(name, 0) for name in ("succeeded", "running", "queued", INTERRUPTED))
        best = f"{with_error(card.best, card.best_error)} at {card.best_step}" if card.best_step is not None else "-"
        table.add_row(
            card.id,
            card.state,
            card.progress,
            with_error(card.reward, card.error),
            f"{card.counted} {card.measured}" if card.counted else "-",
            best,
            str(total),
            str(failed),
            f"{card.tokens:,}",
        )
    return table


def _lines(view: TopView) -> Sequence[str]:
    lines = []
    if view.latest:
        newest = max(view.runs, key=lambda card: card.last_event)
        of_run = {f"{newest.id}, {policy}": metrics for policy, metrics in view.policies.items()}
        for name, metrics in (of_run or {newest.id: view.latest}).items():
            lines.append(f"last step of {name}: " + ", ".join(_latest(metrics)))
    if view.fleet is not None:
        fleet = view.fleet
        workers = plural(len(fleet.present_workers()), "worker")
        lines.append(
            f"{workers}, {fleet.running} running, {fleet.queued} queued; in ten minutes "
            f"{plural(fleet.ended, 'attempt')} ended, {fleet.tokens / 600:.0f} sampled tokens a second"
        )
        lines += map(_engine, fleet.engines)
    return lines


def _engine(engine: EngineView) -> str:
    name = f"{engine.run}: {engine.policy}" if engine.run else engine.policy
    facts = [
        "" if engine.version is None else f"version {engine.version}",
        f"{engine.running} running" if engine.slots is None else f"{engine.running} of {engine.slots} slots",
        f"{engine.waiting} waiting",
        f"{plural(engine.calls, 'call')} and {plural(engine.tokens, 'token')} in a minute",
        f"{engine.failed} failed" if engine.failed else "",
        "held" if engine.held else "",
    ]
    return f"engine {name} ({engine.location}): {', '.join(filter(None, facts))}"


def _latest(metrics: dict[str, float]) -> list[str]:
    names = {
        "reward/mean": "training reward",
        "reward/own": "its own",
        "training/entropy": "entropy",
        "training/kl_sampler_k3": "KL to the sampler",
        "training/clipped_high": "clipped high",
    }
    found = [f"{label} {metrics[name]:.3g}" for name, label in names.items() if name in metrics]
    if "held_out/change" in metrics:
        change = with_error(metrics["held_out/change"], metrics.get("held_out/change_error"))
        found.insert(1, f"held-out change since the start {change}")
    if "groups/flat" in metrics:
        of = f" of {metrics['groups/requested']:.0f}" if "groups/requested" in metrics else ""
        found.append(f"{metrics['groups/flat']:.0f}{of} groups flat")
    for phase in ("sampling", "training", "publishing"):
        if (seconds := metrics.get(f"time/{phase}_s")) is not None:
            found.append(f"{phase} {seconds:.1f} s")
    return found
