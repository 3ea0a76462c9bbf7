"""Automatic intermediate rewarding: what the record of an episode shows by itself, turned into rewards of calls.

`find` reads signals off an episode (tools that failed, arguments that break a schema, answers that were cut, ...), each
with the call that caused it; `automatic` makes rewards of those that a run asks for. Both are pure: the same episode
gives the same signals and the same rewards, with the same ids.
"""

from leyden.rl.signals.finding import find
from leyden.rl.signals.rewarding import Rule, SignalRules, automatic
from leyden.rl.signals.signal import Signal, SignalKind

__all__ = ["Rule", "Signal", "SignalKind", "SignalRules", "automatic", "find"]
