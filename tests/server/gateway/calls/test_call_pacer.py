"""Calls that arrive at once begin a few at a time."""

import asyncio

from leyden.server.gateway.calls.call_pacer import CallPacer


async def begun_by_iteration(calls: int, per_iteration: int) -> tuple[list[int], list[int]]:
    """Return in which order calls that arrive together begin, and how many begin in each iteration of the loop."""
    pacer, order, counts = CallPacer(per_iteration), list[int](), list[int]()

    async def call(number: int) -> None:
        await pacer.turn()
        order.append(number)

    tasks = [asyncio.create_task(call(number)) for number in range(calls)]
    while len(order) < calls:
        before = len(order)
        await asyncio.sleep(0)
        counts.append(len(order) - before)
    await asyncio.gather(*tasks)
    return order, counts


async def test_few_calls_begin_in_an_iteration_and_all_in_order() -> None:
    order, counts = await begun_by_iteration(calls=23, per_iteration=4)
    assert order == list(range(23))
    assert max(counts) == 4
    assert sum(counts) == 23


async def test_a_call_by_itself_does_not_wait() -> None:
    pacer = CallPacer()
    for _ in range(3):
        turn = pacer.turn()
        try:
            turn.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waited")
        await asyncio.sleep(0)


async def test_the_place_of_a_call_that_was_cancelled_goes_to_the_next() -> None:
    pacer = CallPacer(per_iteration=1)
    tasks = [asyncio.create_task(pacer.turn()) for _ in range(6)]
    await asyncio.sleep(0)
    for task in tasks[1:4]:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in done] == [False, True, True, True, False, False]
    await asyncio.wait_for(pacer.turn(), 5)
