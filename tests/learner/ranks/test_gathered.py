"""Engines that want the weights of a sharded policy at the same time are sent them in one pass."""

import asyncio
from typing import Any, cast

import pytest
import torch

from leyden.engine.broadcast import Sent
from leyden.engine.protocol import EngineError
from leyden.learner.errors import RankLost
from leyden.learner.ranks import gathered
from leyden.learner.ranks.gathered import GatheredTensors
from leyden.learner.ranks.processes import RankProcesses

DTYPES = {"a": torch.float32}


class ScriptedRanks:
    """Broadcasts nothing, and says to whom it would have."""

    def __init__(self) -> None:
        self.passes: list[list[str]] = []
        self.error: Exception | None = None
        self.refuse: set[str] = set()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def call(self, method: str, *arguments: Any, patient: bool = False) -> list[Any]:
        await asyncio.sleep(0)
        if method != "broadcast":
            return [None]
        self.passes.append(sorted(arguments[0]))
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        refusal = EngineError("it did not take them")
        return [{engine: refusal if engine in self.refuse else Sent({}, 0) for engine in arguments[0]}, None]


@pytest.fixture
async def tensors() -> GatheredTensors:
    tensors = GatheredTensors(cast(RankProcesses, ScriptedRanks()), asyncio.get_running_loop(), merged=True)
    for engine in ("a", "b", "c"):
        await tensors.join(engine, 2)
    return tensors


def scripted(tensors: GatheredTensors) -> ScriptedRanks:
    return cast(ScriptedRanks, tensors._ranks)


async def publish(tensors: GatheredTensors, *engines: str) -> list[Sent | BaseException]:
    sending = (tensors.broadcast(engine, DTYPES) for engine in engines)
    return await asyncio.gather(*sending, return_exceptions=True)


async def test_engines_that_come_one_after_the_other_are_sent_weights_in_one_pass(
    tensors: GatheredTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "_TOGETHER_S", 60.0)
    for _ in range(2):
        first = asyncio.create_task(tensors.broadcast("a", DTYPES))
        await asyncio.sleep(0.05)
        assert not first.done()
        assert await publish(tensors, "b", "c") == [Sent({}, 0)] * 2
        assert await first == Sent({}, 0)
    assert scripted(tensors).passes == [["a", "b", "c"]] * 2


async def test_one_that_does_not_come_is_not_waited_for_for_long(
    tensors: GatheredTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "_TOGETHER_S", 0.01)
    assert await publish(tensors, "a", "c") == [Sent({}, 0)] * 2
    assert await publish(tensors, "b") == [Sent({}, 0)]
    assert scripted(tensors).passes == [["a", "c"], ["b"]]


async def test_all_that_come_while_a_pass_runs_share_the_next(
    tensors: GatheredTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "_TOGETHER_S", 0.01)
    scripted(tensors).may_end.clear()
    sending = []
    for engine in ("a", "b", "c"):
        sending.append(asyncio.create_task(tensors.broadcast(engine, DTYPES)))
        await asyncio.sleep(0.1)
    scripted(tensors).may_end.set()
    await asyncio.gather(*sending)
    assert scripted(tensors).passes == [["a"], ["b", "c"]]


async def test_one_that_took_no_weights_is_not_waited_for_until_it_has_joined_again(tensors: GatheredTensors) -> None:
    ranks = scripted(tensors)
    ranks.refuse = {"b"}
    sent, refused, _ = await publish(tensors, "a", "b", "c")
    assert isinstance(sent, Sent) and isinstance(refused, EngineError)
    ranks.refuse = set()
    await publish(tensors, "a", "c")
    await tensors.join("b", 2)
    await publish(tensors, "a", "b", "c")
    assert ranks.passes == [["a", "b", "c"], ["a", "c"], ["a", "b", "c"]]


async def test_one_that_gives_up_is_sent_nothing(tensors: GatheredTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "_TOGETHER_S", 0.05)
    gone = asyncio.create_task(tensors.broadcast("b", DTYPES))
    await asyncio.sleep(0)
    gone.cancel()
    assert await publish(tensors, "a") == [Sent({}, 0)]
    alone = asyncio.create_task(tensors.broadcast("b", DTYPES))
    await asyncio.sleep(0)
    alone.cancel()
    await asyncio.sleep(0.2)
    assert scripted(tensors).passes == [["a"]] and gone.cancelled() and alone.cancelled()


async def test_all_are_told_that_the_ranks_are_lost(tensors: GatheredTensors) -> None:
    scripted(tensors).error = RankLost("rank 1 hangs")
    assert all(isinstance(end, RankLost) for end in await publish(tensors, "a", "b", "c"))
