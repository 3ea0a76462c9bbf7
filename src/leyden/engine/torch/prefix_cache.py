"""Which row of keys and values serves whom, and what earlier rows are good for.

A slot keeps what was computed in it until somebody else needs the room. A new request takes over the slot of its own
conversation, or copies the longest beginning that any other slot shares with it, and computes at least one token.
"""

from collections.abc import Iterable, Sequence

from leyden.engine.torch.kv_cache import KVCache
from leyden.engine.torch.request import ActiveRequest

WORTH = 16
"""Tokens that a request must save to wait for another that is about to compute them."""
BLOCK = 64


class Slot:
    """One row: `tokens[:computed]` are in it."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.tokens: list[int] = []
        self.computed = 0
        self.session = ""
        self.forgotten = True
        self.used = 0
        """When it was last given away, in a clock of our own."""
        self.completion: ActiveRequest | None = None
        self.awaited: tuple[ActiveRequest, int] | None = None
        """A sibling that is computing so many tokens which this one needs, too."""


class PrefixCache:
    """The fixed set of slots."""

    def __init__(self, count: int, rows: KVCache, reuse: bool = True) -> None:
        self.all = [Slot(row) for row in range(count)]
        self._reuse = reuse
        self.live: list[Slot] = []
        """Those at work, in the order in which they were admitted."""
        self._rows = rows
        self._clock = 0

    @property
    def full(self) -> bool:
        """Whether there is no room for one more."""
        return len(self.live) == len(self.all)

    def admit(self, completion: ActiveRequest) -> int:
        """Give it a slot; how many tokens of its prompt are there already. Not when full."""
        slot = self._own(completion) or min((slot for slot in self.all if slot.completion is None), key=_worthless)
        self._clock += 1
        slot.session, slot.forgotten = completion.request.session, False
        slot.computed = min(common(slot.tokens, completion.tokens, slot.computed), len(completion.tokens) - 1)
        slot.tokens, slot.completion, slot.used = completion.tokens, completion, self._clock
        self.live.append(slot)
        return self.share(slot)

    def share(self, slot: Slot) -> int:
        """Copy the best beginning that another slot has, or wait for one that is on its way; what is there now."""
        slot.awaited = None
        if not self._reuse:
            slot.computed = 0
            return 0
        need = slot.tokens[:-1]
        best, length = slot, slot.computed
        awaited, hoped = None, length
        for other in self.all:
            if other is slot or not other.tokens:
                continue
            same = common(other.tokens, need, len(need))
            if (there := min(same, other.computed)) > length:
                best, length = other, there
            if other.completion is not None and other.used < slot.used and same > hoped:
                awaited, hoped = other.completion, same
        if best is not slot:
            self._rows.copy(best.row, slot.row, length)
            slot.computed = length
        if awaited is not None and hoped >= length + WORTH:
            slot.awaited = awaited, hoped
        return length

    def waits(self, slot: Slot) -> bool:
        """Whether it still waits for a sibling; when that is over, it has what the sibling computed."""
        if slot.awaited is None:
            return False
        completion, length = slot.awaited
        for other in self.live:
            if other.completion is completion and other.computed < length:
                return True
        self.share(slot)
        return slot.awaited is not None

    def release(self, gone: Iterable[Slot]) -> None:
        """Their requests are over; what they computed stays."""
        for slot in gone:
            slot.completion = slot.awaited = None
        self.live = [slot for slot in self.live if slot.completion is not None]

    def forget(self, session: str) -> None:
        """Nobody will go on with this session."""
        for slot in self.all:
            slot.forgotten |= slot.session == session

    def drop(self) -> None:
        """Nothing that was computed holds any longer."""
        for slot in self.all:
            slot.computed = 0
            slot.awaited = None
            if slot.completion is None:
                slot.tokens, slot.session, slot.forgotten, slot.used = [], "", True, 0

    def _own(self, completion: ActiveRequest) -> Slot | None:
        """An idle slot of the same session, or of one that is over, most of which is the beginning of the prompt."""
        best, length = None, 0
        for slot in self.all:
            if slot.completion is None and (slot.forgotten or slot.session == completion.request.session):
                same = common(slot.tokens, completion.tokens, slot.computed)
                if same > length and 2 * same >= slot.computed:
                    best, length = slot, same
        return best


def common(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """How many tokens two sequences begin with alike, up to a limit."""
    limit = min(limit, len(one), len(other))
    at = 0
    while at < limit and one[at : at + BLOCK] == other[at : at + BLOCK]:
        at += BLOCK
    while at < limit and one[at] == other[at]:
        at += 1
    return min(at, limit)


def _worthless(slot: Slot) -> tuple[bool, bool, int, int]:
    """What goes first: the empty, the forgotten, the longest unused; of equals the first row."""
    return bool(slot.computed), not slot.forgotten, slot.used, slot.row
