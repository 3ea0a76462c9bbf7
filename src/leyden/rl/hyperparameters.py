"""The numbers in the formulas that a run may set. Each is read by the few functions that name it."""

from typing import Literal

from msgspec import Struct


class Hyperparameters(Struct, frozen=True, kw_only=True):
    """What credits, advantages, losses, aggregations and corrections are told beside their data."""

    gamma: float = 1.0
    """`discounted`, `gae`: what a reward is worth one call earlier. All calls are time, trained on or not."""
    lam: float = 0.95
    """`gae`: how far rewards are believed rather than the critic; 1 is rewards alone, 0 the next state's value."""
    spread: Literal["all", "last", "even"] = "all"
    """`stepwise`: the final reward goes whole to every selected call, to the last, or to each an equal part."""
    step_weight: float = 1.0
    """`gigpo`: what the step level counts beside the episode level."""
    clip_low: float = 0.2
    """Losses: a ratio counts from 1 - clip_low."""
    clip_high: float = 0.28
    """Losses: a ratio counts up to 1 + clip_high."""
    clip_dual: float | None = None
    """`ppo_clip`, `gspo`: up to which ratio, more than 1, a bad token is pushed down; None: any."""
    length: int | None = None
    """`constant`: the tokens that every rollout is divided by."""
    correction_low: float = 0.5
    """`masked`: below this ratio of the proximal policy to the sampler nothing is learnt."""
    correction_high: float = 2.0
    """`masked`: above this ratio nothing is learnt; `truncated`: a ratio above counts as this."""
