"""Detects that a run stands still: its policy is still the starting model, or its rewards stay within their noise.

The policy: its divergence from the start bounds what training can have changed. By Pinsker's inequality the expected
reward of a rollout differs by at most sqrt(KL / 2) of the range of rewards, where KL is that of a whole rollout. The
rewards are judged only after the last step, because a run may learn late: neither the slope of the training reward, nor
how much alike neighbouring steps are, nor the change of the held-out reward exceeds two standard errors.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean
from typing import Any, Self

from leyden.config import TrainingConfig
from leyden.documentation import page

_MIN_UPDATES = 5
"""Updates after the warm-up before the policy is judged."""
_MIN_CHANGE = 0.05
"""The policy stands still if, at its pace, the last step cannot change the reward by this share of its range."""
_MIN_STEPS = 20
"""Steps after the warm-up before rewards are judged."""
_ERRORS = 2.0
_PAGE = f"see {page('when_it_does_not_learn')}"


class StandstillDetector:
    """Follows the metrics of a run."""

    def __init__(self, config: TrainingConfig) -> None:
        self._steps, self._warmup, self._rate = config.steps, config.warmup_steps, config.learning_rate
        self._last = 0
        """The latest step."""
        self._updates = 0
        """After the warm-up."""
        self._divergence: tuple[float, float, int, int] | None = None
        """The latest in nats a token, the tokens of a rollout, and the steps and the updates before it."""
        self._rewards: list[float] = []
        """Of each step, those of the warm-up included: they show where a run began."""
        self._change: tuple[float, float] | None = None
        """The latest change of the held-out reward and its error."""
        self._reported = False

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]], config: TrainingConfig) -> Self:
        """Continue from the metrics of a run that resumes; what they show is not reported again."""
        detector = cls(config)
        for line in lines:
            detector.add_step(line["step"], line)
        return detector

    def add_step(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Add the metrics of a step; return that the policy stands still, the first time that it does."""
        self._last = step
        if (reward := metrics.get("reward/mean")) is not None:
            self._rewards.append(reward)
        if step <= self._warmup:
            return None
        if (kl := metrics.get("training/kl_start")) is not None:  # measured before the updates of the step
            self._divergence = kl, metrics.get("length/rollout", 0.0), step - 1, self._updates
        self._updates += metrics.get("tokens/trained", 0.0) > 0
        if (change := metrics.get("held_out/change")) is not None:
            self._change = change, metrics.get("held_out/change_error", 0.0)
        if self._reported:
            return None
        found = self._policy_stands_still(self._steps - self._warmup)
        self._reported = found is not None
        return found

    @property
    def verdict(self) -> str | None:
        """What stands still, whether or not it was reported before.

        A run that was stopped, or ended by its time limit, is judged by where its pace would have led it.
        """
        if self._last < self._steps:
            return self._policy_stands_still(self._steps - self._warmup)
        return self._policy_stands_still(0) or self._rewards_stand_still()

    def _policy_stands_still(self, planned: int) -> str | None:
        """Judge the policy by how far it will have moved after `planned` updates, at its pace so far."""
        if self._divergence is None or self._divergence[-1] < _MIN_UPDATES:
            return None
        kl, tokens, steps, updates = self._divergence
        change = sqrt(kl * tokens / 2)
        if change * max(1.0, planned / updates) >= _MIN_CHANGE:
            return None
        rate = "" if self._rate is None else f" (now {self._rate:.2g})"
        return (
            f"the policy is still the starting model: after {steps} steps they differ by {kl:.1e} nats a token, "
            f"which can change the expected reward by {change:.1g} of its range at most. Raise "
            f"`training.learning_rate`{rate}; {_PAGE}"
        )

    def _rewards_stand_still(self) -> str | None:
        if len(self._rewards) - self._warmup < _MIN_STEPS:
            return None
        rise, error = _rise(self._rewards)
        if abs(rise) > _ERRORS * error or _likeness(self._rewards) > _ERRORS:
            return None
        held_out = ""
        if self._change is not None:
            change, change_error = self._change
            if abs(change) > _ERRORS * change_error:
                return None
            held_out = f", the held-out reward by {change:+.3f} ± {change_error:.3f}"
        return (
            f"the rewards have not moved beyond their noise in {len(self._rewards)} steps: the training reward by "
            f"{rise:+.3f} ± {error:.3f}{held_out}; {_PAGE}"
        )


def _rise(rewards: Sequence[float]) -> tuple[float, float]:
    """Fit a line to the rewards of steps; return by how much it rises from the first to the last, with its error."""
    last, mean = len(rewards) - 1, fmean(rewards)
    spread = sum((step - last / 2) ** 2 for step in range(last + 1))
    slope = sum((step - last / 2) * (reward - mean) for step, reward in enumerate(rewards)) / spread
    left = sum((reward - mean - slope * (step - last / 2)) ** 2 for step, reward in enumerate(rewards))
    return slope * last, sqrt(left / (last - 1) / spread) * last


def _likeness(rewards: Sequence[float]) -> float:
    """Return by how many standard errors neighbouring steps are more alike than any two steps; von Neumann's test.

    A line does not see a jump in the first steps, nor a rise and a fall. Both leave neighbours alike.
    """
    count, mean = len(rewards), fmean(rewards)
    spread = sum((reward - mean) ** 2 for reward in rewards)
    between = sum((after - before) ** 2 for before, after in pairwise(rewards))
    return (1 - between / (2 * spread)) * sqrt((count**2 - 1) / (count - 2)) if spread else 0.0
