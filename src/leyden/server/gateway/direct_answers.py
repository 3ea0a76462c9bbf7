"""Keeps the latest answers to calls outside rollouts in memory, so that the Responses API can continue them."""

from collections import OrderedDict
from collections.abc import Sequence

from leyden.records import Call

_MAX_KEPT = 1000


class DirectAnswers:
    """The latest calls outside rollouts, each visible to the key that made it only."""

    def __init__(self) -> None:
        self._calls: OrderedDict[tuple[str, str], Call] = OrderedDict()

    def add(self, owner: str, calls: Sequence[Call]) -> None:
        """Keep calls of a key; the oldest calls of all keys are forgotten."""
        for call in calls:
            self._calls[owner, call.id] = call
        while len(self._calls) > _MAX_KEPT:
            self._calls.popitem(last=False)

    def get(self, owner: str, call: str) -> Call | None:
        """Return a call of a key, if it is still kept."""
        return self._calls.get((owner, call))

    def delete(self, owner: str, call: str) -> None:
        """Forget a call."""
        self._calls.pop((owner, call), None)
