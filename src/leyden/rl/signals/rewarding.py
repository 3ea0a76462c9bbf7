"""Signals that a run asks for, as rewards of kind `automatic` on the calls that caused them.

A reward's value is 1: it happened. Its weight is what the run gives for it, annealed; how it is known stands with it.
"""

from collections.abc import Callable, Mapping
from hashlib import blake2b

from msgspec import Struct

from leyden.episodes import Episode
from leyden.records import Reward, RewardKind
from leyden.rl.signals.finding import find
from leyden.rl.signals.signal import Signal, SignalKind

Rule = Callable[[Signal], float | None]
"""A user's own weight of a signal; None where it has no opinion, and the configured one holds."""

SOURCE = "signals"
_LONGEST = 400


class SignalRules(Struct, frozen=True):
    """What a run gives for signals."""

    weights: Mapping[SignalKind, float] = {}
    """By kind; 0, or none: not asked for."""
    rule: Rule | None = None
    anneal_steps: int | None = None
    """Over so many steps the weights fall to 0; None: they stay."""
    exempt: frozenset[str] = frozenset()
    """Tools whose calls may be repeated."""

    @property
    def ask(self) -> bool:
        """Whether a run asks for any signal."""
        return self.rule is not None or any(self.weights.values())

    def weight(self, signal: Signal) -> float | None:
        """What a signal is worth before annealing; None where nobody asks for it."""
        if signal.kind is SignalKind.REPEATED_CALL and signal.tool in self.exempt:
            return None
        opinion = self.rule(signal) if self.rule is not None else None
        if opinion is None:
            return self.weights.get(signal.kind) or None
        return float(opinion)

    def annealing(self, step: int) -> float:
        """What is left of the weights: all in step 1, nothing from step `anneal_steps` + 1 on."""
        if self.anneal_steps is None:
            return 1.0
        return min(1.0, max(0.0, 1 - (step - 1) / self.anneal_steps))


def automatic(episode: Episode, rules: SignalRules, step: int) -> tuple[Reward, ...]:
    """The automatic rewards of an episode in a step; those that are annealed away are there with weight 0.

    Ids follow from what is rewarded, how much and why, so rewards that are recorded twice are there once.
    """
    if not rules.ask:
        return ()
    left = rules.annealing(step)
    asked = ((signal, rules.weight(signal)) for signal in find(episode))
    return tuple(_reward(signal, weight * left + 0.0) for signal, weight in asked if weight is not None)


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
    """How a signal is known, and by what it can be found again."""
    about = [f"tool call {signal.tool_call} ({signal.tool})"] if signal.tool_call is not None else []
    if signal.span is not None:
        about.append(f"span {signal.span.span_id}")
    why = f"{', '.join(about)}: {signal.why}" if about else signal.why
    return why if len(why) <= _LONGEST else f"{why[:_LONGEST]}..."
