"""Assigns slots of the KV cache to requests, and reuses the prefixes that are already in them.

A slot keeps its contents until another request needs the slot. A new request takes over the slot of its own session, or
copies the longest prefix that any other slot shares with it. At least one token of each prompt is computed.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from leyden.engine.torch.kv_cache import KVCache
from leyden.engine.torch.request import ActiveRequest


class SortedSequences:
    """Token sequences by slot; sorted, so that those with the longest common prefix are neighbours."""

    def __init__(self) -> None:
        self._sorted: list[tuple[bytes, int]] = []
        self._sequences: dict[int, bytes] = {}

    def set(self, slot: int, tokens: "array[int]") -> None:
        """Replace the sequence of a slot; an empty one removes it. Later changes of `tokens` are not seen."""
        old = self._sequences.pop(slot, None)
        if old is not None:
            del self._sorted[bisect_left(self._sorted, (old, slot))]
        if tokens:
            self._sequences[slot] = tokens.tobytes()
            insort(self._sorted, (self._sequences[slot], slot))

    def nearest(self, tokens: "array[int]") -> Iterator[tuple[int, int]]:
        """Yield slots and how many tokens their sequences share with this one: the longest first, and none without."""
        wanted = tokens.tobytes()

        def shared(position: int) -> int:
            if not 0 <= position < len(self._sorted):
                return 0
            return common_prefix_length(self._sorted[position][0], wanted, len(tokens))

        right = bisect_left(self._sorted, (wanted, -1))
        left = right - 1
        before, after = shared(left), shared(right)
        while before or after:
            if before >= after:
                yield self._sorted[left][1], before
                left -= 1
                before = shared(left)
            else:
                yield self._sorted[right][1], after
                right += 1
                after = shared(right)


def common_prefix_length(one: "bytes | array[int]", other: "bytes | array[int]", limit: int) -> int:
    """Return how many tokens, each a C `int`, two sequences begin with together, at most `limit`."""
    left, right = np.frombuffer(one, np.intc), np.frombuffer(other, np.intc)
    length = min(limit, len(left), len(right))
    differ = left[:length] != right[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


MIN_SAVED_TOKENS = 16
"""A request waits for another one that is computing their common prefix only if that saves this many tokens."""
MAX_CANDIDATES = 16
"""Slots that are considered for a request: those with the longest common prefixes."""


class Slot:
    """One slot of the KV cache, which holds the keys and values of `tokens[:computed]`."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.tokens = array("i")
        self.computed = 0
        self.session = ""
        self.session_ended = True
        self.last_used = 0
        """When it was last assigned, by a counter."""
        self.request: ActiveRequest | None = None
        self.unread = False
        """Whether the device has sampled a token that is not in `tokens` yet."""
        self.waiting_for: tuple[Slot, ActiveRequest, int] | None = None
        """Another slot whose request is computing this many tokens of a common prefix."""


class PrefixCache:
    """A fixed number of slots and the prefixes in them."""

    def __init__(self, slots: int, kv_cache: KVCache, enabled: bool = True) -> None:
        """If not `enabled`, every request computes its whole prompt."""
        self.slots = [Slot(index) for index in range(slots)]
        self.active: list[Slot] = []
        """Slots with a request, in order of admission."""
        self._enabled = enabled
        self._kv_cache = kv_cache
        self._index = SortedSequences()
        """The prompts of active slots, and all that idle ones hold."""
        self._clock = 0
        self._idle: list[Slot] | None = None
        """Slots without a request in the order of eviction; None when the order has to be determined anew."""
        self.reused = 0
        """Prompt tokens of all requests that did not have to be computed."""

    @property
    def full(self) -> bool:
        """Whether every slot has a request."""
        return len(self.active) == len(self.slots)

    def admit(self, request: ActiveRequest) -> None:
        """Assign a slot; must not be full."""
        if self._idle is None:
            self._idle = sorted((slot for slot in self.slots if slot.request is None), key=_eviction_order)
        slot = self._slot_to_continue(request) or self._idle[0]
        self._idle.remove(slot)
        self._clock += 1
        slot.session, slot.session_ended = request.request.session, False
        slot.computed = min(common_prefix_length(slot.tokens, request.tokens, slot.computed), len(request.tokens) - 1)
        slot.tokens, slot.request, slot.last_used = request.tokens, request, self._clock
        self.active.append(slot)
        self._index.set(slot.index, slot.tokens)
        self._reuse_prefix(slot, slot, slot.computed)

    def must_wait(self, slot: Slot) -> bool:
        """Whether a slot still waits for a common prefix; reuses the prefix once it is computed."""
        if slot.waiting_for is None:
            return False
        other, request, length = slot.waiting_for
        if other.request is not request:
            self._reuse_prefix(slot, slot, slot.computed)
        elif other.computed >= length:
            self._reuse_prefix(slot, other, length)
        return slot.waiting_for is not None

    def _reuse_prefix(self, slot: Slot, best: Slot, length: int) -> None:
        """Reuse the longest prefix that any slot holds, or wait for a longer one that is being computed.

        `best` is known to hold `length` tokens.
        """
        slot.waiting_for = None
        if not self._enabled or (slot.request is not None and slot.request.needs_prompt_logprobs):
            slot.computed = 0
            return
        expected = length
        for index, common in islice(self._index.nearest(slot.tokens[:-1]), MAX_CANDIDATES):
            if common <= length or common + MIN_SAVED_TOKENS <= expected:
                break
            for other, shared in _chain(self.slots[index], common):
                if (available := min(shared, other.computed)) > length and other is not slot:
                    best, length = other, available
                if other.request is not None and other.last_used < slot.last_used and shared > expected:
                    waits_for = other.waiting_for[2] if other.waiting_for is not None else 0
                    if shared >= waits_for + MIN_SAVED_TOKENS:
                        slot.waiting_for, expected = (other, other.request, shared), shared
        if expected >= length + MIN_SAVED_TOKENS:
            return
        slot.waiting_for = None
        if best is not slot:
            self._kv_cache.copy(best.index, slot.index, length)
            slot.computed = length
        self.reused += length

    def release(self, slots: Iterable[Slot]) -> None:
        """Detach the requests of some slots; the slots keep their contents."""
        for slot in slots:
            slot.request, slot.waiting_for, slot.unread = None, None, False
            self._index.set(slot.index, slot.tokens[: slot.computed])
        self._idle = None
        self.active = [slot for slot in self.active if slot.request is not None]

    def end_session(self, session: str) -> None:
        """Let the slots of a session be evicted first."""
        for slot in self.slots:
            slot.session_ended |= slot.session == session
        self._idle = None

    def invalidate(self) -> None:
        """Discard everything computed, because the weights changed. Active requests keep their slots and start anew."""
        self._index, self._idle = SortedSequences(), None
        self._kv_cache.forget_copies()
        for slot in self.slots:
            slot.computed = 0
            if slot.request is None:
                slot.tokens, slot.session, slot.session_ended, slot.last_used = array("i"), "", True, 0
        for slot in self.active:
            self._reuse_prefix(slot, slot, 0)
            self._index.set(slot.index, slot.tokens)

    def _slot_to_continue(self, request: ActiveRequest) -> Slot | None:
        """Return the idle slot, of this session or of an ended one, with the longest common prefix.

        At least half of its contents must be that prefix, so that another branch of the session is not overwritten.
        """
        for index, common in islice(self._index.nearest(request.tokens), MAX_CANDIDATES):
            slot = self.slots[index]
            idle = slot.request is None and (slot.session_ended or slot.session == request.request.session)
            if idle and 2 * common >= slot.computed:
                return slot
        return None


def _chain(slot: Slot, common: int) -> Iterator[tuple[Slot, int]]:
    """Yield a slot, the one that it waits for, and so on, with how many of `common` tokens each has or will have."""
    while True:
        yield slot, common
        if slot.waiting_for is None:
            return
        other, request, length = slot.waiting_for
        if other.request is not request:
            return
        slot, common = other, min(common, length)


def _eviction_order(slot: Slot) -> tuple[bool, bool, int, int]:
    """Order empty slots first, then those of ended sessions, then the least recently used; ties by index."""
    return bool(slot.computed), not slot.session_ended, slot.last_used, slot.index
