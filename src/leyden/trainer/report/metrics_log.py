"""What a run leaves to read: a line of JSON a step in its folder, always; the server's metrics; other places if asked.

On a run that goes on from a checkpoint, lines of later steps are taken out: those steps happen again.
"""

import asyncio
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from leyden.background import start_background
from leyden.episodes import Episode
from leyden.records import Metric
from leyden.remote import Remote
from leyden.trainer.loop import StepReport
from leyden.trainer.report.sinks import Sink
from leyden.trainer.rollouts.evaluation import EvaluationResult


class MetricsLog:
    """Writes down every step."""

    def __init__(self, path: Path, step: int, remote: Remote, run: str, sinks: Sequence[Sink]) -> None:
        self._path, self._remote, self._run, self._sinks = path, remote, run, sinks
        self._sending: set[asyncio.Task[Any]] = set()
        _forget_after(path, step)

    def progress(self, step: int, done: int, asked: int, what: str) -> None:
        """Nothing is written down of a step that is not done."""

    def step(self, report: StepReport, left_s: float) -> None:
        """Write down a step."""
        self._write(report.step, step_metrics(report))

    def measured(self, step: int, measured: EvaluationResult, episodes: Sequence[Episode]) -> None:
        """Write down the measurement before the first step; later ones come with their steps."""
        if step == 0:
            self._write(0, held_out_metrics(measured))

    async def close(self) -> None:
        """Wait until everything is where it belongs."""
        await asyncio.gather(*self._sending, return_exceptions=True)
        for sink in self._sinks:
            sink.close()

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        line = json.dumps({"step": step, "time": time.time(), **metrics})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        for sink in self._sinks:
            sink.write(step, metrics)
        records = [Metric(step, name, value, time.time()) for name, value in metrics.items()]
        task = start_background(self._remote.record_metrics(self._run, records), "sending metrics to the server")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


def step_metrics(report: StepReport) -> dict[str, float]:
    """A step in numbers, by name. What there is none of, or is no number, is left out."""
    accounting, metrics = report.accounting, report.metrics
    found: dict[str, float | None] = {
        "reward/mean": report.reward,
        "reward/deviation": report.spread,
        "rollouts/asked": accounting.asked,
        "rollouts/trained": accounting.trained,
        "groups/asked": accounting.groups,
        "groups/dropped": accounting.groups_dropped,
        "groups/single": accounting.groups_single,
        "groups/flat": accounting.groups_flat,
        "calls/states_shared": fmean(accounting.states_shared) if accounting.states_shared else None,
        "calls/trained": accounting.calls_trained,
        "tokens/sampled": report.sampled,
        "tokens/trained": sum(metric.tokens for metric in metrics),
        "tokens/computed": sum(metric.computed for metric in metrics),
        "time/sampling_s": report.sampling_s,
        "time/training_s": report.training_s,
        "time/publishing_s": report.publishing_s,
        "publish/bytes": sum(publication.transferred_bytes for publication in report.publications),
        "training/learning_rate": report.learning_rate,
        "training/kl_reference": fmean(accounting.kl_reference) if accounting.kl_reference else None,
        "training/critic_explained": fmean(accounting.critic_explained) if accounting.critic_explained else None,
        "reward/automatic": fmean(report.automatic) if report.automatic else None,
        **{f"signals/{name}": count for name, count in report.signals.items()},
        **{f"rollouts/{ending}": count for ending, count in accounting.outcomes.items()},
        **{f"rollouts/excluded/{why}": count for why, count in accounting.excluded.items()},
        **{f"calls/left/{why}": count for why, count in accounting.calls_excluded.items()},
    }
    measured = [
        {"loss": metric.loss, "grad_norm": metric.grad_norm, "critic_loss": metric.critic_loss, **metric.statistics}
        for metric in metrics
    ]
    for name in dict.fromkeys(name for one in measured for name in one):
        values = [value for one in measured if (value := one.get(name)) is not None]
        joined = max if name.endswith("_max") else min if name.endswith("_min") else fmean
        found[f"training/{name}"] = joined(values) if values else None
    if report.held_out is not None:
        found |= held_out_metrics(report.held_out)
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def held_out_metrics(measured: EvaluationResult) -> dict[str, float]:
    """A measurement in numbers."""
    found = {f"held_out/{ending}": float(count) for ending, count in measured.outcomes.items()}
    if measured.reward is not None:
        found["held_out/reward"] = measured.reward
    return found


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """What was written down, a step a row. A line that a crash cut short is not there."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _forget_after(path: Path, step: int) -> None:
    kept = [row for row in read_metrics(path) if row["step"] <= step] if step else []  # step 0 is measured anew
    draft = path.with_suffix(".draft")
    draft.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    draft.replace(path)
