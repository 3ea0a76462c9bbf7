"""Counts what rollouts use: model calls, tool calls, and calls that their length limit cut."""

from collections.abc import Collection, Iterable

from msgspec import Struct

from leyden.episodes import Episode
from leyden.rl.signals.tool_calls import tool_calls_of


class CallUsage(Struct):
    """The calls of one or several policies in some rollouts."""

    rollouts: int = 0
    calls: int = 0
    tool_calls: int = 0
    cut: int = 0
    """Calls that ended at a limit of tokens: that of the request, of `sampling.max_tokens` or of the rollout."""

    def add(self, episodes: Iterable[Episode], policies: Collection[str]) -> None:
        """Add rollouts."""
        for episode in episodes:
            calls = [call for call in episode.calls if call.policy in policies]
            self.rollouts += 1
            self.calls += len(calls)
            self.tool_calls += sum(len(tool_calls_of(call, call.response)) for call in calls)
            self.cut += sum(call.finish == "length" for call in calls)

    def metrics(self) -> dict[str, float]:
        """Return calls and tool calls per rollout, and the share of calls that were cut."""
        found = {}
        if self.rollouts:
            found["per_rollout"] = self.calls / self.rollouts
            found["tool_calls_per_rollout"] = self.tool_calls / self.rollouts
        if self.calls:
            found["cut"] = self.cut / self.calls
        return found
