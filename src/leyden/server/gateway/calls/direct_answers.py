"""Keeps the latest answers to calls outside rollouts in memory, so that the Responses API can continue them."""

from collections import OrderedDict
from collections.abc import Sequence

from leyden.records import Call

MAX_CALLS, MAX_BYTES = 1000, 16 << 20
"""How many calls are kept, and how much text their requests may have together; tokens take several times as much."""


class DirectAnswers:
    """The latest calls outside rollouts, each visible to the key that made it only."""

    def __init__(self) -> None:
        self._calls: OrderedDict[tuple[str, str], tuple[Call, int]] = OrderedDict()
        """By key and id, a call and the size of its request."""
        self._bytes = 0

    def add(self, owner: str, calls: Sequence[Call], size: int) -> None:
        """Keep the calls of a request of this size; the oldest calls of all keys are forgotten."""
        for call in calls:
            self._calls[owner, call.id] = call, size
            self._bytes += size
        while len(self._calls) > MAX_CALLS or self._bytes > MAX_BYTES:
            self.delete(*next(iter(self._calls)))

    def get(self, owner: str, call: str) -> Call | None:
        """Return a call of a key, if it is still kept."""
        return self._calls.get((owner, call), (None,))[0]

    def delete(self, owner: str, call: str) -> None:
        """Forget a call."""
        _, size = self._calls.pop((owner, call), (None, 0))
        self._bytes -= size
