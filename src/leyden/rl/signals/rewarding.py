"""Turns the signals that a run gives a weight into rewards of kind `automatic` on the calls that caused them.

A reward's value is 1, its weight is the run's weight of the signal after annealing, and `why` is the evidence.
"""

from collections.abc import Callable, Mapping
from hashlib import blake2b

from msgspec import Struct

from leyden.episodes import Episode
from leyden.records import Reward, RewardKind
from leyden.rl.signals.finding import find
from leyden.rl.signals.signal import Signal, SignalKind

Rule = Callable[[Signal], float | None]
"""A user's function that returns the weight of a signal; None keeps the configured weight."""

SOURCE = "signals"
_MAX_WHY = 400


class SignalRules(Struct, frozen=True):
    """The weights that a run gives to signals."""

    weights: Mapping[SignalKind, float] = {}
    """By kind; a signal with weight 0 or without a weight gives no reward."""
    rule: Rule | None = None
    anneal_steps: int | None = None
    """The weights fall to 0 over this many steps; None: they stay."""
    exempt: frozenset[str] = frozenset()
    """Tools that may be called repeatedly."""

    @property
    def enabled(self) -> bool:
        """Whether any signal can give a reward."""
        return self.rule is not None or any(self.weights.values())

    def weight(self, signal: Signal) -> float | None:
        """Return the weight of a signal before annealing; None if it gives no reward."""
        if signal.kind is SignalKind.REPEATED_CALL and signal.tool in self.exempt:
            return None
        weight = self.rule(signal) if self.rule is not None else None
        if weight is None:
            return self.weights.get(signal.kind) or None
        return float(weight)

    def annealing(self, step: int) -> float:
        """Return the factor of all weights: 1 in step 1, falling linearly to 0 in step `anneal_steps` + 1."""
        if self.anneal_steps is None:
            return 1.0
        return min(1.0, max(0.0, 1 - (step - 1) / self.anneal_steps))


def automatic(episode: Episode, rules: SignalRules, step: int) -> tuple[Reward, ...]:
    """Return the automatic rewards of an episode in a step; those that are annealed away have weight 0.

    Ids are derived from call, name, weight and evidence, so recording the same reward twice has no effect.
    """
    if not rules.enabled:
        return ()
    factor = rules.annealing(step)
    weighted = ((signal, rules.weight(signal)) for signal in find(episode))
    return tuple(_reward(signal, weight * factor + 0.0) for signal, weight in weighted if weight is not None)


def _reward(signal: Signal, weight: float) -> Reward:
    why = _why(signal)
    digest = blake2b(f"{signal.call.id}/{signal.name}/{weight!r}/{why}".encode(), digest_size=12).hexdigest()
    return Reward(
        id=f"signal-{digest}",
        value=1.0,
        kind=RewardKind.AUTOMATIC,
        name=signal.name,
        weight=weight,
        source=SOURCE,
        call=signal.call.id,
        why=why,
    )


def _why(signal: Signal) -> str:
    """Describe the evidence, with the tool call and the span that it is about."""
    about = [f"tool call {signal.tool_call} ({signal.tool})"] if signal.tool_call is not None else []
    if signal.span is not None:
        about.append(f"span {signal.span.span_id}")
    why = f"{', '.join(about)}: {signal.why}" if about else signal.why
    return why if len(why) <= _MAX_WHY else f"{why[:_MAX_WHY]}..."
