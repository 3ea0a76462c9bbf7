"""Which slot a request is assigned, and which prefixes are reused."""

import asyncio
from array import array
from collections.abc import Iterable
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from randomness import examples

from leyden.engine.protocol import EngineRequest
from leyden.engine.torch.batch import schedule_step
from leyden.engine.torch.kv_cache import KVCache
from leyden.engine.torch.prefix_cache import PrefixCache, SortedSequences, common_prefix_length
from leyden.engine.torch.request import ActiveRequest
from leyden.engine.torch.sampling import SampledToken
from leyden.records import Sampling

LOOP = asyncio.new_event_loop()
"""Of all requests, which nobody reads."""


def make(count: int) -> PrefixCache:
    kv_cache = KVCache(count, 4096, torch.float32, torch.device("cpu"))
    kv_cache.buffer(0, 1, 1)
    kv_cache.reserve(600, [0] * count)
    return PrefixCache(count, kv_cache)


def make_request(session: str, prompt: range | list[int]) -> ActiveRequest:
    request = EngineRequest(tuple(prompt), Sampling(), (), 8, session)
    return ActiveRequest(request, 4096, 10_000, LOOP)


def run(cache: PrefixCache, session: str, prompt: range | list[int]) -> int:
    """Admit, compute and finish one request; what it reused."""
    before = cache.reused
    cache.admit(make_request(session, prompt))
    cache.active[-1].computed = len(prompt)
    cache.release([cache.active[-1]])
    return cache.reused - before


def held(cache: PrefixCache) -> list[tuple[str, int]]:
    return [(slot.session, slot.computed) for slot in cache.slots]


def test_a_conversation_continues_in_its_own_slot() -> None:
    cache = make(3)
    assert run(cache, "a", range(100)) == 0
    assert run(cache, "b", range(1000, 1100)) == 0
    assert run(cache, "a", range(150)) == 100
    assert held(cache) == [("a", 150), ("b", 100), ("", 0)]


def test_at_least_one_token_is_computed() -> None:
    cache = make(2)
    run(cache, "a", range(100))
    assert run(cache, "a", range(100)) == 99
    assert run(cache, "b", range(50)) == 49


def test_another_sessions_prefix_is_copied_from_active_slots_too() -> None:
    cache = make(3)
    cache.admit(make_request("a", range(100)))
    cache.active[0].computed = 80
    cache._kv_cache.buffers[0][0, 0, :, 0] = torch.arange(1024)
    cache.admit(make_request("b", [*range(60), *range(500, 600)]))
    cache._kv_cache.finish_copies()
    assert cache.reused == 60
    assert cache._kv_cache.buffers[0][1, 0, :60, 0].tolist() == list(range(60))
    assert cache._kv_cache.buffers[0][1, 0, 60] == 0


def test_another_branch_of_a_session_does_not_destroy_the_first() -> None:
    cache = make(2)
    run(cache, "a", range(300))
    assert run(cache, "a", [*range(20), *range(500, 600)]) == 20
    assert sorted(held(cache)) == [("a", 120), ("a", 300)]


def test_ended_sessions_are_evicted_first_then_the_least_recently_used() -> None:
    cache = make(3)
    for index, session in enumerate("abc"):
        run(cache, session, range(1000 * index, 1000 * index + 10))
    cache.end_session("b")
    run(cache, "d", range(5000, 5010))
    assert [session for session, _ in held(cache)] == ["a", "d", "c"]
    run(cache, "e", range(6000, 6010))
    assert [session for session, _ in held(cache)] == ["e", "d", "c"]


def test_requests_with_a_common_prefix_wait_for_the_first_to_compute_it() -> None:
    cache = make(3)
    for session in "abc":
        cache.admit(make_request(session, range(100)))
    first, second, third = cache.active
    assert [cache.must_wait(slot) for slot in cache.active] == [False, True, True]
    first.computed = 64
    assert cache.must_wait(second)
    first.computed = 100
    assert not cache.must_wait(second)
    assert second.computed == 99
    cache.release([first, second])
    assert not cache.must_wait(third)
    assert third.computed == 99
    assert cache.reused == 2 * 99


def test_a_request_that_waits_for_a_cancelled_one_computes_the_prefix_itself() -> None:
    cache = make(3)
    for session in "abc":
        cache.admit(make_request(session, range(100)))
    first, second, third = cache.active
    cache.release([first])
    assert not cache.must_wait(second)
    assert cache.must_wait(third)


def test_invalidating_keeps_active_requests() -> None:
    cache = make(2)
    run(cache, "a", range(100))
    cache.admit(make_request("b", range(100)))
    cache.invalidate()
    assert held(cache) == [("", 0), ("b", 0)]
    assert [slot.session for slot in cache.active] == ["b"]


def test_what_differs_after_a_common_prefix_is_computed_at_once_when_the_prefix_is() -> None:
    cache = make(40)
    for question in range(10):
        prompt = [*range(50), 60 + question // 5, *range(1000 * question, 1000 * question + 100)]
        for sample in "abcd":
            cache.admit(make_request(f"{question}-{sample}", prompt))
    assert [cache.must_wait(slot) for slot in cache.active] == [False, *[True] * 39]
    cache.active[0].computed = 151
    waiting = [cache.must_wait(slot) for slot in cache.active]
    assert waiting == [False] * 4 + [False, True, True, True] * 9
    assert [slot.computed for slot in cache.active[:4]] == [151, 150, 150, 150]
    assert [slot.computed for slot in cache.active[4::4]] == [51] * 4 + [50] * 5
    for slot in cache.active[4::4]:
        slot.computed = 151
    assert not any(cache.must_wait(slot) for slot in cache.active)
    assert cache.reused == 4 * 51 + 5 * 50 + 30 * 150


def test_a_prefix_can_be_copied_from_a_slot_that_is_still_to_be_written() -> None:
    cache = make(4)
    cache._kv_cache.buffers[0][0, 0, :, 0] = torch.arange(1024)
    run(cache, "a", range(100))
    for session in "bcd":
        cache.admit(make_request(session, [*range(60), *range(500 * ord(session), 500 * ord(session) + 10)]))
    cache._kv_cache.finish_copies()
    assert cache._kv_cache.buffers[0][1:, 0, :60, 0].tolist() == [list(range(60))] * 3


@given(st.randoms(use_true_random=False))
@settings(max_examples=examples(45), deadline=None)
def test_every_slot_holds_the_tokens_that_it_says(rng: Random) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rng.random() < 0.5:
            patch.setattr(KVCache, "_copy_in_turn", KVCache._copy_together)  # as on a GPU
        use_cache_at_random(rng)


def use_cache_at_random(rng: Random) -> None:
    cache = make(rng.randint(2, 12))
    held = cache._kv_cache.buffers[0][:, 0, :, 0]
    texts = [[rng.randrange(1, 9) for _ in range(120)] for _ in range(3)]
    sessions = 0
    for _ in range(40):
        for _ in range(rng.randint(0, 4)):
            if not cache.full:
                text = rng.choice(texts)
                own = [rng.randrange(1, 9) for _ in range(rng.randint(1, 30))]
                sessions += rng.randrange(2)
                cache.admit(make_request(str(sessions), [*text[: rng.randint(0, 120)], *own]))
        for slot, segment in schedule_step(cache, rng.choice([16, 64, 512])):
            cache._kv_cache.finish_copies()
            held[slot.index, segment.start : segment.end] = torch.tensor([*segment.ids]).float()
            slot.computed = segment.end
            assert slot.request is not None
            if segment.needs_logits and not slot.request.cancelled:
                slot.request.append(SampledToken(rng.randrange(1, 9), -1.0, None, 1.0))
        done = [slot for slot in cache.active if slot.request is not None and slot.request.finish is not None]
        cache.release([*done, *(slot for slot in cache.active if slot not in done and rng.random() < 0.1)])
        if rng.random() < 0.2:
            cache.end_session(str(rng.randint(0, sessions)))
        if rng.random() < 0.05:
            cache.invalidate()
        cache._kv_cache.finish_copies()
        for slot in cache.slots:
            assert held[slot.index, : slot.computed].tolist() == slot.tokens[: slot.computed].tolist()


token_ids = st.lists(st.integers(0, 300).map(lambda id: id if id < 3 else 2**31 - id), max_size=6)


def shared_tokens(one: Iterable[int], other: Iterable[int], limit: int) -> int:
    return common_prefix_length(array("i", one), array("i", other), limit)


def test_common_prefix_lengths() -> None:
    assert shared_tokens([], [1], 5) == 0
    assert shared_tokens([1, 2, 3], [1, 2, 4], 5) == 2
    assert shared_tokens(range(500), range(400), 1000) == 400
    assert shared_tokens(range(500), [*range(130), 0, *range(131, 500)], 1000) == 130
    assert shared_tokens(range(500), range(500), 77) == 77


@given(st.lists(st.tuples(st.integers(0, 5), token_ids), max_size=20), token_ids)
def test_nearest_sequences_come_first(changes: list[tuple[int, list[int]]], wanted: list[int]) -> None:
    index, held = SortedSequences(), dict[int, list[int]]()
    for slot, tokens in changes:
        index.set(slot, array("i", tokens))
        held[slot] = tokens
    found = list(index.nearest(array("i", wanted)))
    shared = {slot: shared_tokens(tokens, wanted, len(wanted)) for slot, tokens in held.items()}
    assert dict(found) == {slot: length for slot, length in shared.items() if length}
    assert [length for _, length in found] == sorted((length for _, length in found), reverse=True)


def test_later_tokens_of_a_request_are_not_part_of_its_sequence() -> None:
    index, tokens = SortedSequences(), array("i", [1, 2])
    index.set(0, tokens)
    tokens.append(3)
    assert list(index.nearest(array("i", [1, 2, 3]))) == [(0, 2)]
    index.set(0, array("i"))
    assert list(index.nearest(array("i", [1, 2, 3]))) == []
