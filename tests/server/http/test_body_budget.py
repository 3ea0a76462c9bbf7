"""Bodies that are being received: no key holds much memory with them, and none keeps the others from sending."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest

from leyden.api.client import Remote, read_key
from leyden.api.wire import GroupSpec, LeaseRequest, RunSpec
from leyden.records import RunSettings, Task
from leyden.server.http.limits import BodyBudget, RateLimited
from leyden.server.options import ServeOptions
from leyden.server.serve import open_server

MB = 1 << 20


def test_a_key_holds_four_of_the_largest_bodies() -> None:
    budget = BodyBudget(MB)
    with ExitStack() as receiving:
        bodies = [receiving.enter_context(budget.receiving("key")) for _ in range(5)]
        for body in bodies[:4]:
            body.grow(MB // 2)
            body.grow(MB)
        with pytest.raises(RateLimited, match="more than 4 MB of bodies at once"):
            bodies[4].grow(MB)
        with budget.receiving("another") as other:
            other.grow(MB)
    assert budget.total == 0
    with budget.receiving("key") as again:
        again.grow(MB)


def test_many_keys_that_hold_much_do_not_keep_another_from_sending() -> None:
    budget = BodyBudget(MB)
    with ExitStack() as receiving:
        for number in range(100):
            try:
                for _ in range(4):
                    receiving.enter_context(budget.receiving(f"key {number % 8}")).grow(MB)
            except RateLimited:
                pass
        assert 16 * MB <= budget.total <= 32 * MB
        receiving.enter_context(budget.receiving("modest")).grow(MB)
    assert budget.total == 0


def test_small_bodies_do_not_count() -> None:
    budget = BodyBudget(MB)
    with budget.receiving("key") as body:
        body.grow(200 << 10)
        assert budget.total == 0


async def test_a_key_that_sends_many_large_bodies_at_once_is_refused_and_its_neighbour_is_not(tmp_path: Path) -> None:
    async with open_server(ServeOptions(tmp_path, max_body_mb=1)) as server:
        url = server.running.url
        admin = read_key(Path(server.running.admin_key_file))
        async with Remote(url, admin) as remote, aiohttp.ClientSession() as session:
            await remote.create_run(RunSpec("r", RunSettings(lease_s=3600)))
            await remote.enqueue("r", GroupSpec("g", Task("t", None), size=2))
            wild, calm = await remote.lease(LeaseRequest("w", 2))
            release = asyncio.Event()

            async def body() -> object:
                yield b" " * (MB - 1)
                await release.wait()
                yield b" "

            async def send(key: str) -> int:
                headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
                async with session.post(f"{url}/v1/traces", data=body(), headers=headers) as reply:
                    return reply.status

            sending = [asyncio.create_task(send(wild.key)) for _ in range(20)]
            async with asyncio.timeout(60):
                refused = 0
                while refused < 16:
                    done, _ = await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
                    sending = [task for task in sending if task not in done]
                    refused += sum(task.result() == 429 for task in done)
            assert server.service.bodies.total <= 4 * MB
            allowed = asyncio.create_task(send(calm.key))
            await asyncio.sleep(0)
            release.set()
            assert {await task for task in (*sending, allowed)} == {400}  # spaces are no spans
            assert server.service.bodies.total == 0
