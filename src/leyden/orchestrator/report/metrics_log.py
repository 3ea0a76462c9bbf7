"""Writes the metrics of each step: a JSON line in the run's folder, the server's metrics, and the configured sinks.

Every line names its policy. A run that resumes from a checkpoint removes the policy's lines of later steps, which are
repeated.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec.structs import asdict

from leyden.api.client import Remote
from leyden.background import start_background
from leyden.episodes import Episode
from leyden.orchestrator.json_lines import append_line, keep_lines, read_lines
from leyden.orchestrator.report.labels import by_label
from leyden.orchestrator.report.sinks import Sink
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.rollouts.evaluation import EvaluationResult
from leyden.records import Metric

_CLOSE_TIMEOUT_S = 10.0


class MetricsLog:
    """Writes the metrics of every step of one policy."""

    def __init__(
        self, path: Path, policy: str, step: int, remote: Remote, run: str, sinks: Sequence[Sink], several: bool = False
    ) -> None:
        """With `several` policies the names of metrics in sinks begin with that of the policy."""
        self._path, self._remote, self._run, self._sinks = path, remote, run, sinks
        self._policy, self._last, self._prefix = policy, step, f"{policy}/" if several else ""
        self._sending: set[asyncio.Task[Any]] = set()
        self._unwritten: deque[Callable[[], None]] = deque()
        # after step 0 all of them, because the first evaluation is repeated
        keep_lines(path, lambda line: line["policy"] != policy or (step > 0 and line["step"] <= step))

    def progress(self, step: int, done: int, total: int, what: str) -> None:
        """Do nothing: metrics are written when a step is done."""

    def step(self, report: StepReport, left_s: float) -> None:
        """Write a step."""
        self._last = report.step
        self._write(report.step, step_metrics(report))

    def measured(self, step: int, measured: EvaluationResult, episodes: Sequence[Episode]) -> None:
        """Write the evaluation before the first step; later ones come with their steps."""
        if step == 0:
            self._write(0, evaluation_metrics(measured))

    def tested(self, step: int, measured: EvaluationResult) -> None:
        """Write the evaluation on the test tasks, on a line of the last step."""
        self._write(self._last, {"test/step": float(step), **evaluation_metrics(measured, "test")})

    def warn(self, message: str) -> None:
        """Do nothing: the metrics show it."""

    async def close(self) -> None:
        """Wait until everything is sent, but not long for a server that does not answer."""
        if self._sending:
            _, unsent = await asyncio.wait(self._sending, timeout=_CLOSE_TIMEOUT_S)
            for task in unsent:
                task.cancel()

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        """Write to the file, to each sink and to the server, once: after an error only what failed is repeated.

        The caller repeats a write that a full disk failed, before it writes anything else.
        """
        if not self._unwritten:
            line = {"step": step, "time": time.time(), "policy": self._policy, **metrics}
            self._unwritten.append(partial(append_line, self._path, line))
            named = {f"{self._prefix}{name}": value for name, value in metrics.items()}
            self._unwritten += (partial(sink.write, step, named) for sink in self._sinks)
            self._unwritten.append(partial(self._send, step, metrics))
        while self._unwritten:
            self._unwritten[0]()
            self._unwritten.popleft()

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        records = [Metric(step, name, value, time.time(), self._policy) for name, value in metrics.items()]
        task = start_background(self._remote.record_metrics(self._run, records), "sending metrics to the server")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


def step_metrics(report: StepReport) -> dict[str, float]:
    """Return the metrics of a step, by name; those that are missing or not finite are left out."""
    accounting, metrics = report.accounting, report.metrics
    found: dict[str, float | None] = {
        "reward/mean": report.reward,
        "reward/deviation": report.spread,
        "reward/own": fmean(report.own_rewards) if report.own_rewards else None,
        "rollouts/requested": accounting.requested,
        "rollouts/trained": accounting.trained,
        "groups/requested": accounting.groups,
        "groups/dropped": accounting.groups_dropped,
        "groups/single": accounting.groups_single,
        "groups/flat": accounting.groups_flat,
        "groups/flat_succeeded": report.flat["succeeded"],
        "groups/flat_failed": report.flat["failed"],
        **{f"tasks/{name}": value for name, value in report.tasks.items()},
        **{f"calls/{name}": value for name, value in report.usage.metrics().items()},
        **report.branches.metrics(),
        "calls/states_shared": fmean(accounting.states_shared) if accounting.states_shared else None,
        "calls/trained": accounting.calls_trained,
        "tokens/sampled": report.sampled,
        "length/call": fmean(report.lengths) if report.lengths else None,
        "length/rollout": fmean(report.rollout_lengths) if report.rollout_lengths else None,
        "staleness/mean": _mean_staleness(report.staleness),
        "staleness/max": max(report.staleness, default=None),
        **{f"staleness/tokens/{behind}": count for behind, count in sorted(report.staleness.items())},
        "tokens/stale": accounting.tokens_stale,
        **{f"reward/part/{name}": fmean(values) for name, values in by_label(report.parts).items()},
        **{f"reward/role/{role}": fmean(rewards) for role, rewards in by_label(report.by_role).items()},
        **{f"reward/kind/{kind}": fmean(rewards) for kind, rewards in by_label(report.by_kind).items()},
        **report.positions.metrics(accounting.credits),
        "tokens/trained": sum(metric.tokens for metric in metrics),
        "tokens/computed": sum(metric.computed for metric in metrics),
        "tokens/saved": sum(metric.saved for metric in metrics),
        "time/sampling_s": report.sampling_s,
        **{f"time/sampling/{name}_s": seconds for name, seconds in report.sampling_split.items()},
        "time/training_s": report.training_s,
        "time/publishing_s": report.publishing_s,
        "time/waiting_s": report.waiting_s if report.overlaps else None,
        "time/evaluation_s": report.evaluation_s or None,
        "publish/bytes": report.publication.transferred_bytes if report.publication is not None else 0,
        **({f"machine/{name}": value for name, value in asdict(report.use).items()} if report.use is not None else {}),
        "training/learning_rate": report.learning_rate,
        "training/kl_start": report.kl_start,
        "training/kl_reference": accounting.kl_reference / accounting.kl_tokens if accounting.kl_tokens else None,
        "training/critic_explained": fmean(accounting.critic_explained) if accounting.critic_explained else None,
        "reward/automatic": fmean(report.automatic) if report.automatic else None,
        **{f"signals/{name}": count for name, count in report.signals.items()},
        **{f"rollouts/{ending}": count for ending, count in accounting.outcomes.items()},
        **{f"rollouts/excluded/{why}": count for why, count in accounting.excluded.items()},
        **{f"calls/excluded/{why}": count for why, count in accounting.calls_excluded.items()},
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
        found |= evaluation_metrics(report.held_out)
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def _mean_staleness(staleness: Mapping[int, int]) -> float | None:
    tokens = sum(staleness.values())
    return sum(behind * count for behind, count in staleness.items()) / tokens if tokens else None


def evaluation_metrics(measured: EvaluationResult, split: str = "held_out") -> dict[str, float]:
    """Return the metrics of an evaluation; `split` names its tasks."""
    found = {f"{split}/{ending}": float(count) for ending, count in measured.outcomes.items()}
    if measured.reward is not None:
        found |= {f"{split}/reward": measured.reward, f"{split}/counted": float(measured.counted)}
    if measured.error is not None:
        found[f"{split}/error"] = measured.error
    if measured.change is not None:
        found[f"{split}/change"] = measured.change.difference
        if measured.change.error is not None:
            found[f"{split}/change_error"] = measured.change.error
    if measured.usage is not None:
        found |= {f"{split}/calls/{name}": value for name, value in measured.usage.metrics().items()}
    return found | {f"{split}/pass_at_{k}": share for k, share in measured.pass_at.items()}


def read_metrics(path: Path, policy: str) -> list[dict[str, Any]]:
    """Read the lines of a policy."""
    return [line for line in read_lines(path) if line["policy"] == policy]
