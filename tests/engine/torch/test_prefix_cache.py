"""Who gets which slot, and what is reused."""

import asyncio

import torch

from leyden.engine.protocol import EngineRequest
from leyden.engine.torch.kv_cache import KVCache
from leyden.engine.torch.prefix_cache import PrefixCache, common
from leyden.engine.torch.request import ActiveRequest
from leyden.records import Sampling


def make(count: int) -> PrefixCache:
    rows = KVCache(count, 4096, torch.float32, torch.device("cpu"))
    rows.plane(0, 1, 1)
    rows.reserve(600, [0] * count)
    return PrefixCache(count, rows)


def ask(session: str, prompt: range | list[int]) -> ActiveRequest:
    request = EngineRequest(tuple(prompt), Sampling(), (), 8, session)
    return ActiveRequest(request, 4096, 10_000, asyncio.new_event_loop())


def run(slots: PrefixCache, session: str, prompt: range | list[int]) -> int:
    """Admit, compute and finish one request; what it reused."""
    reused = slots.admit(ask(session, prompt))
    slots.live[-1].computed = len(prompt)
    slots.release([slots.live[-1]])
    return reused


def held(slots: PrefixCache) -> list[tuple[str, int]]:
    return [(slot.session, slot.computed) for slot in slots.all]


def test_common_beginnings() -> None:
    assert common([], [1], 5) == 0
    assert common([1, 2, 3], [1, 2, 4], 5) == 2
    assert common(list(range(500)), list(range(400)), 1000) == 400
    assert common(list(range(500)), [*range(130), 0, *range(131, 500)], 1000) == 130
    assert common(list(range(500)), list(range(500)), 77) == 77


def test_a_conversation_goes_on_in_its_own_slot() -> None:
    slots = make(3)
    assert run(slots, "a", range(100)) == 0
    assert run(slots, "b", range(1000, 1100)) == 0
    assert run(slots, "a", range(150)) == 100
    assert held(slots) == [("a", 150), ("b", 100), ("", 0)]


def test_at_least_one_token_is_computed() -> None:
    slots = make(2)
    run(slots, "a", range(100))
    assert run(slots, "a", range(100)) == 99
    assert run(slots, "b", range(50)) == 49


def test_another_sessions_beginning_is_copied_from_live_slots_too() -> None:
    slots = make(3)
    slots.admit(ask("a", range(100)))
    slots.live[0].computed = 80
    slots._rows.planes[0][0, 0, :, 0] = torch.arange(1024)
    assert slots.admit(ask("b", [*range(60), *range(500, 600)])) == 60
    assert slots._rows.planes[0][1, 0, :60, 0].tolist() == list(range(60))
    assert slots._rows.planes[0][1, 0, 60] == 0


def test_another_branch_of_a_session_does_not_destroy_the_first() -> None:
    slots = make(2)
    run(slots, "a", range(300))
    assert run(slots, "a", [*range(20), *range(500, 600)]) == 20
    assert sorted(held(slots)) == [("a", 120), ("a", 300)]


def test_the_forgotten_go_first_then_the_longest_unused() -> None:
    slots = make(3)
    for index, session in enumerate("abc"):
        run(slots, session, range(1000 * index, 1000 * index + 10))
    slots.forget("b")
    run(slots, "d", range(5000, 5010))
    assert [session for session, _ in held(slots)] == ["a", "d", "c"]
    run(slots, "e", range(6000, 6010))
    assert [session for session, _ in held(slots)] == ["e", "d", "c"]


def test_siblings_wait_for_the_first_to_compute_their_prompt() -> None:
    slots = make(3)
    for session in "abc":
        assert slots.admit(ask(session, range(100))) == 0
    first, second, third = slots.live
    assert [slots.waits(slot) for slot in slots.live] == [False, True, True]
    first.computed = 64
    assert slots.waits(second)
    first.computed = 100
    assert not slots.waits(second)
    assert second.computed == 99
    slots.release([first, second])
    assert not slots.waits(third)
    assert third.computed == 99


def test_a_sibling_whose_leader_went_away_computes_itself() -> None:
    slots = make(3)
    for session in "abc":
        slots.admit(ask(session, range(100)))
    first, second, third = slots.live
    slots.release([first])
    assert not slots.waits(second)
    assert slots.waits(third)


def test_dropping_keeps_who_is_at_work() -> None:
    slots = make(2)
    run(slots, "a", range(100))
    slots.admit(ask("b", range(100)))
    slots.drop()
    assert held(slots) == [("", 0), ("b", 0)]
    assert [slot.session for slot in slots.live] == ["b"]
