"""Renders a report as one HTML page. Everything that an agent wrote is escaped, and the page has no script."""

import time
from collections.abc import Mapping, Sequence
from html import escape
from math import floor, isfinite, log10
from typing import Any

import msgspec
from msgspec import Struct

from leyden.api.views import RunCard, Series
from leyden.cli.printing import plural
from leyden.cli.report.samples import SamplePair, SampleRollout
from leyden.config import document_to_toml
from leyden.estimates import with_error
from leyden.records import Run

WIDTH, HEIGHT = 520, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 24
COLOURS = ("#2f6fde", "#d9822b", "#2e9e6b", "#b0479a", "#6c757d", "#c0392b", "#8e6cc9")
_MAX_POINTS = 400
_CHARTS = {
    "flat and dropped groups": {
        "groups/flat": "flat",
        "groups/flat_succeeded": "all succeeded alike",
        "groups/flat_failed": "all failed alike",
        "groups/dropped": "dropped",
    },
    "tasks drawn by difficulty, share": {
        "tasks/chance": "chance that rewards differ",
        "tasks/informative": "groups whose rewards did",
    },
    "rollouts that continue another one": {
        "branches/reward": "mean reward",
        "branches/diverged": "share that left the record",
    },
    "calls of a rollout": {
        "calls/per_rollout": "model calls",
        "calls/tool_calls_per_rollout": "tool calls",
        "held_out/calls/per_rollout": "model calls, held out",
        "held_out/calls/tool_calls_per_rollout": "tool calls, held out",
    },
    "share of calls cut by length": {"calls/cut": "training", "held_out/calls/cut": "held out"},
    "divergence from the starting model": {"training/kl_start": "on its own samples"},
    "entropy": {"training/entropy": "entropy"},
    "KL divergence": {"training/kl_sampler_k3": "to the sampler", "training/kl_reference": "to the reference"},
    "clipped tokens": {"training/clipped_low": "clipped low", "training/clipped_high": "clipped high"},
    "staleness, versions": {"staleness/mean": "mean", "staleness/max": "most"},
    "length, tokens": {"length/call": "of a call", "length/rollout": "of a rollout"},
    "tokens": {"tokens/sampled": "sampled", "tokens/trained": "trained on"},
    "tokens of the training step": {"tokens/computed": "computed", "tokens/saved": "saved"},
    "time of a step, s": {
        "time/sampling_s": "sampling",
        "time/training_s": "training",
        "time/publishing_s": "publishing",
    },
    "gradient norm": {"training/grad_norm": "gradient norm"},
}
"""Charts by title, each with the labels of its metrics."""
_BY_LABEL = (
    ("reward/role/", "reward by role"),
    ("reward/kind/", "reward by kind of task"),
    ("advantage/role/", "mean advantage by role"),
    ("advantage/turn/", "mean advantage by turn, from 0"),
    ("length/role/", "length of a call by role, tokens"),
    ("length/turn/", "length of a call by turn, from 0, tokens"),
)
"""Charts with a line for each label: the prefix of the metrics, and the title."""
_ACCOUNTS = ("rollouts/", "groups/", "calls/excluded/", "calls/trained", "tokens/sampled", "tokens/trained")
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:1120px;margin:2rem auto;padding:0 1rem}
h1{margin:0}h2{margin-top:2.5rem}figure{margin:0}figcaption{font-weight:600}svg{width:100%}pre{font-size:12.5px}
.soft,.legend,.facts dt{opacity:.7;font-size:13px}
.facts{display:flex;flex-wrap:wrap;gap:.5rem 2rem}.facts dd{margin:0;font-weight:600}
.charts{display:grid;gap:1.5rem;grid-template-columns:repeat(auto-fill,minmax(340px,1fr))}
svg text{font-size:11px;fill:currentColor}.grid{stroke:currentColor;opacity:.15}
.legend span{margin-right:1rem}
.legend i{display:inline-block;width:.7em;height:.7em;margin-right:.35em;border-radius:2px}
table{border-collapse:collapse}td{padding:.15rem 1rem .15rem 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:1rem}
@media(max-width:700px){.pair{grid-template-columns:1fr}}
pre,.said{white-space:pre-wrap;overflow-wrap:anywhere}.said b{display:block;opacity:.7;font-size:12px}
.sample{border:1px solid #8884;border-radius:6px;padding:.6rem .8rem}
"""


class Line(Struct, frozen=True):
    """One curve; `errors` draws a bar at each point."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    errors: Sequence[float] = ()


def draw(lines: Sequence[Line]) -> str:
    """Return a chart of some curves over steps."""
    lines = [_thin(line) for line in lines if line.steps]
    highs = [v + e for line in lines for v, e in zip(line.values, _errors(line), strict=True) if isfinite(v)]
    lows = [v - e for line in lines for v, e in zip(line.values, _errors(line), strict=True) if isfinite(v)]
    if not highs:
        return ""
    low, high = min(lows), max(highs)
    if low == high:
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low) / 2, high + abs(high) / 2)
    last = max(1, *(line.steps[-1] for line in lines))

    def x(step: float) -> float:
        return _LEFT + step / last * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for tick in ticks(low, high):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.3g}</text>')
    for step in (0, last):
        anchor = "start" if step == 0 else "end"
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">step {step}</text>')
    for line, colour in zip(lines, COLOURS * len(lines), strict=False):
        points = list(zip(line.steps, line.values, _errors(line), strict=True))
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value, _ in points if isfinite(value))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for step, value, error in points if line.errors else ():
            top, bottom = y(value + error), y(value - error)
            parts.append(
                f'<line x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{top:.1f}" y2="{bottom:.1f}" stroke="{colour}"/>'
            )
            parts.append(f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5" fill="{colour}"/>')
    return "".join([*parts, "</svg>", _legend(lines)])


def ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers between two values."""
    raw = (high - low) / 4
    unit = 10.0 ** floor(log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    first = -(-low // step)
    found = []
    while first * step <= high + step * 1e-9:
        found.append(first * step)
        first += 1
    return found


def _errors(line: Line) -> Sequence[float]:
    return line.errors or [0.0] * len(line.values)


def _thin(line: Line) -> Line:
    stride = -(-len(line.steps) // _MAX_POINTS)
    if stride <= 1:
        return line
    return Line(line.name, line.steps[::stride], line.values[::stride], line.errors[::stride])


def _legend(lines: Sequence[Line]) -> str:
    names = (
        f'<span><i style="background:{colour}"></i>{escape(line.name)}</span>'
        for line, colour in zip(lines, COLOURS * len(lines), strict=False)
    )
    return f'<p class="legend">{"".join(names)}</p>'


def render_report(
    run: Run,
    card: RunCard,
    policies: Mapping[str, Mapping[str, Series]],
    samples: Sequence[SamplePair],
    environment: Mapping[str, str],
) -> str:
    """Return the page; `policies` has the metrics of each policy."""
    titles = {name: f"<h3>{escape(name)}</h3>" if len(policies) > 1 else "" for name in policies}
    body = [
        f"<h1>{escape(run.id)}</h1>",
        f'<p class="soft">{escape(card.model or "")} · written {time.strftime("%Y-%m-%d %H:%M")}</p>',
        _facts(card, next(iter(policies.values()))),
        "<h2>Curves</h2>",
        *(f'{titles[name]}<div class="charts">{"".join(_charts(one))}</div>' for name, one in policies.items()),
        "<h2>Accounts</h2>",
        '<p class="soft">Sums over all steps: what became of every rollout, group and call.</p>',
        *(titles[name] + _table(_accounts(one)) for name, one in policies.items()),
        "<h2>Samples</h2>",
        '<p class="soft">Chosen, not typical: the held-out tasks whose reward changed most.</p>',
        "".join(map(_pair, samples)) or '<p class="soft">There are not two evaluations of the same task.</p>',
        "<h2>Configuration</h2>",
        f"<pre>{escape(_toml(run.config))}</pre>",
        "<h2>Environment</h2>",
        _table([(name, str(value)) for name, value in environment.items()])
        or '<p class="soft">The folder of the run, which has it, is not here.</p>',
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.id)} · Leyden</title><style>{_STYLE}</style></head><body>"
    )
    return head + "".join(body) + "</body></html>\n"


def _facts(card: RunCard, series: Mapping[str, Series]) -> str:
    change = series.get("held_out/change")
    errors = series.get("held_out/change_error")
    kind = "held-out reward" if card.held_out else "reward"
    facts = {
        "state": card.state,
        "step": f"{card.step} of {card.steps}" if card.steps else str(card.step),
        kind: f"{with_error(card.reward, card.error)} (mean of {plural(card.counted, 'rollout')})",
        "best": "-" if card.best_step is None else f"{with_error(card.best, card.best_error)} at step {card.best_step}",
        "rollouts": f"{sum(card.rollouts.values())}",
        "calls": f"{card.calls}",
        "sampled tokens": f"{card.tokens}",
    }
    if len(card.policies) > 1:
        facts["versions"] = ", ".join(f"{policy} {version}" for policy, version in card.policies.items())
    if change is not None:
        error = errors.values[-1] if errors is not None else None
        facts["change since the start, in pairs"] = ("+" if change.values[-1] > 0 else "") + with_error(
            change.values[-1], error
        )
    items = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{"".join(items)}</dl>'


def _charts(series: Mapping[str, Series]) -> list[str]:
    found = []
    names = {"reward/mean": "training", "reward/own": "training, its own"}
    rewards = [Line(label, *_points(series[name])) for name, label in names.items() if name in series]
    if (held_out := series.get("held_out/reward")) is not None:
        by_step = dict(zip(*_points(series["held_out/error"]), strict=True)) if "held_out/error" in series else {}
        rewards.append(Line("held out", *_points(held_out), tuple(by_step.get(step, 0.0) for step in held_out.steps)))
    found.append(_figure("reward", rewards))
    counts = (name for name in series if name.startswith("rollouts/") and name.count("/") == 1)
    outcomes = [name for name in counts if name not in ("rollouts/requested", "rollouts/trained")]
    ended = [Line(name.partition("/")[2], *_points(series[name])) for name in outcomes]
    found.append(_figure("outcomes of a step", ended))
    for title, metrics in _CHARTS.items():
        lines = [Line(label, *_points(series[name])) for name, label in metrics.items() if name in series]
        found.append(_figure(title, lines))
    for prefix, title in _BY_LABEL:
        lines = [Line(name.removeprefix(prefix), *_points(series[name])) for name in series if name.startswith(prefix)]
        found.append(_figure(title, lines))
    return found


def _points(series: Series) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return series.steps, series.values


def _figure(title: str, lines: Sequence[Line]) -> str:
    chart = draw(lines)
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>" if chart else ""


def _accounts(series: Mapping[str, Series]) -> list[tuple[str, str]]:
    names = sorted(name for name in series if name.startswith(_ACCOUNTS))
    return [(name, f"{sum(series[name].values):,.0f}") for name in names]


def _table(rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    cells = "".join(f'<tr><td>{escape(name)}</td><td class="n">{escape(value)}</td></tr>' for name, value in rows)
    return f"<table>{cells}</table>"


def _pair(pair: SamplePair) -> str:
    sides = "".join(f'<div class="sample">{_sample(one)}</div>' for one in (pair.before, pair.after))
    return f'<h3>task {escape(pair.task)}</h3><div class="pair">{sides}</div>'


def _sample(sample: SampleRollout) -> str:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.3f}"
    when = "before training" if sample.step == 0 else f"after step {sample.step}"
    said = "".join(f'<div class="said"><b>{escape(role)}</b>{escape(text)}</div>' for role, text in sample.messages)
    return f"<p><b>{when}</b>: {reward}, {escape(sample.outcome)}</p>{said}"


def _toml(config: Any) -> str:
    """Return a configuration as TOML, as a user writes it."""
    if not isinstance(config, dict):
        return msgspec.json.format(msgspec.json.encode(config)).decode()
    return document_to_toml(config)
