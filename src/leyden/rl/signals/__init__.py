"""Automatic intermediate rewarding: derives rewards of calls from what the record of an episode shows.

`find` detects signals in an episode (failed tools, arguments that break a schema, answers that were cut off, ...), each
with the call that caused it. `automatic` turns those that a run gives a weight into rewards. Both are pure: the same
episode gives the same signals and rewards, with the same ids.
"""

from leyden.rl.signals.finding import find
from leyden.rl.signals.rewarding import Rule, SignalRules, automatic
from leyden.rl.signals.signal import Signal, SignalKind

__all__ = ["Rule", "Signal", "SignalKind", "SignalRules", "automatic", "find"]
