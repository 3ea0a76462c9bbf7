"""Copies between the slots of the KV cache, which are made later and together."""

import pytest
import torch

from leyden.engine.torch.kv_cache import KVCache


@pytest.fixture(autouse=True, params=["in turn", "together"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are made as on a CPU, and as on a GPU."""
    if request.param == "together":
        monkeypatch.setattr(KVCache, "_copy_in_turn", KVCache._copy_together)


def make() -> KVCache:
    """Return a cache of five slots in which every number says its slot and its position."""
    cache = KVCache(5, 64, torch.float32, torch.device("cpu"))
    for index in range(2):
        cache.buffer(index, 2, 3)[:] = 100 * torch.arange(5)[:, None, None, None] + torch.arange(64)[:, None]
    return cache


def expected(*copied: tuple[int, int, int]) -> torch.Tensor:
    """What a cache holds after copies of (source, target, length)."""
    held = make().buffers[0].clone()
    for source, target, length in copied:
        held[target, :, :length] = held[source, :, :length].clone()
    return held


def test_copies_are_made_when_they_are_finished() -> None:
    cache = make()
    cache.copy(0, 3, 7)
    cache.copy(1, 4, 9)
    assert torch.equal(cache.buffers[0], expected())
    cache.finish_copies()
    for buffer in cache.buffers:
        assert torch.equal(buffer, expected((0, 3, 7), (1, 4, 9)))


def test_a_copy_of_a_copy_is_one_of_the_original() -> None:
    cache = make()
    cache.copy(0, 3, 7)
    cache.copy(3, 4, 5)
    cache.finish_copies()
    assert torch.equal(cache.buffers[0], expected((0, 3, 7), (0, 4, 5)))


def test_a_slot_that_is_copied_and_then_written_is_copied_first() -> None:
    cache = make()
    cache.copy(0, 3, 7)
    cache.copy(1, 0, 5)
    cache.copy(0, 4, 5)
    cache.finish_copies()
    assert torch.equal(cache.buffers[0], expected((0, 3, 7), (1, 0, 5), (1, 4, 5)))


def test_forgotten_copies_are_not_made() -> None:
    cache = make()
    cache.copy(0, 3, 7)
    cache.forget_copies()
    cache.finish_copies()
    assert torch.equal(cache.buffers[0], expected())


@pytest.mark.parametrize("limit", [1, 6])
def test_many_positions_are_copied_in_parts(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.engine.torch.kv_cache.COPIED_TOGETHER", limit)
    cache = make()
    cache.copy(0, 3, 7)
    cache.copy(1, 4, 9)
    cache.finish_copies()
    assert torch.equal(cache.buffers[0], expected((0, 3, 7), (1, 4, 9)))
