"""The latest call is the one that was made here, or by what was started here."""

import asyncio
import contextvars

from leyden.client.tracing.context import latest_call, record_call


def test_a_call_of_a_task_is_also_the_latest_of_its_creator() -> None:
    async def ask(call: str) -> None:
        record_call(call)

    async def agent() -> list[str | None]:
        found = [latest_call()]
        record_call("mine")
        found.append(latest_call())
        await asyncio.create_task(ask("the child's"))
        found.append(latest_call())
        return found

    assert contextvars.copy_context().run(asyncio.run, agent()) == [None, "mine", "the child's"]


def test_branches_do_not_see_each_others_calls() -> None:
    async def branch(name: str, both: asyncio.Barrier) -> str | None:
        assert latest_call() is not None  # of whoever started it
        record_call(name)
        await both.wait()
        return latest_call()

    async def agent() -> list[str | None]:
        record_call("first")
        both = asyncio.Barrier(2)
        return await asyncio.gather(branch("a", both), branch("b", both))

    assert contextvars.copy_context().run(asyncio.run, agent()) == ["a", "b"]
