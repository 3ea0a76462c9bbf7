"""Services have one user at a time, replaced when they die, and end with their worker."""

import asyncio
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from modelserving import eventually
from worker_harness import AGENTS, WorkerHarness, alive, gone, hosts_of, kill

from leyden.backoff import Backoff
from leyden.client.services import pool
from leyden.client.services.pool import ServiceFailed
from leyden.client.services.registry import ServiceRegistry
from leyden.config.schema import ServiceConfig

SITE = ServiceConfig(command=f"{sys.executable} -m http.server {{port}} --bind 127.0.0.1", count=2)


class Thing:
    """A service that is a Python object."""

    made = 0

    def __init__(self) -> None:
        Thing.made += 1
        self.is_healthy, self.closed = True, False

    def healthy(self) -> bool:
        if self.is_healthy is None:
            raise RuntimeError("the health check fails")
        return self.is_healthy

    def close(self) -> None:
        self.closed = True


def things(monkeypatch: pytest.MonkeyPatch, name: str = "Thing", **config: Any) -> ServiceRegistry:
    """Services that are made in this module."""
    monkeypatch.setattr(pool, "_START_BACKOFF", Backoff(0.001, 0.001))
    monkeypatch.setitem(sys.modules, "things_of_a_test", sys.modules[__name__])
    Thing.made = 0
    service = ServiceConfig(make=f"things_of_a_test:{name}", **config)
    return ServiceRegistry.objects({"thing": service, "other": service}, ["thing"], ".")


async def test_each_service_has_one_user_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with things(monkeypatch, count=2) as services:
        assert (Thing.made, services.capacity()) == (2, 2)
        async with services.acquire(["thing", "nobody"]) as one, services.acquire(["thing"]) as two:
            assert one["thing"] is not two["thing"] and one.keys() == {"thing"}
            third = asyncio.create_task(services.acquire(["thing"]).__aenter__())
            done, _ = await asyncio.wait({third}, timeout=0.1)
            assert not done
        acquired = (await third)["thing"]
        assert acquired in (one["thing"], two["thing"]) and Thing.made == 2
    assert not acquired.closed and sum(thing["thing"].closed for thing in (one, two)) == 1  # not the acquired one


@pytest.mark.parametrize("healthy", [False, None])
async def test_an_unhealthy_service_is_replaced_before_it_is_acquired(
    healthy: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with things(monkeypatch) as services:
        async with services.acquire(["thing"]) as acquired:
            acquired["thing"].is_healthy = healthy
        async with services.acquire(["thing"]) as another:
            assert another["thing"] is not acquired["thing"] and acquired["thing"].closed


class Moody(Thing):
    """Can be made once only."""

    def __init__(self) -> None:
        super().__init__()
        if Thing.made > 1:
            raise OSError("no disk")


class Broken:
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no disk")


async def test_a_service_that_cannot_be_started_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceFailed, match="service 'thing' cannot be started: OSError: no disk"):
        await things(monkeypatch, "Broken").__aenter__()
    async with things(monkeypatch, "Moody") as services:
        async with services.acquire(["thing"]) as acquired:
            acquired["thing"].is_healthy = False
        for _ in range(2):  # the pool does not shrink
            with pytest.raises(ServiceFailed, match="no disk"):
                await services.acquire(["thing"]).__aenter__()


# Commands


def refused(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) != 0


async def test_a_command_is_acquired_by_its_address_and_replaced_when_it_dies(tmp_path: Path) -> None:
    me = psutil.Process()
    async with ServiceRegistry.commands({"site": SITE}, str(tmp_path)) as services:
        family = me.children(recursive=True)
        async with services.acquire(["site"]) as acquired:
            port = acquired["site"].rpartition(":")[2]
            (serving,) = [p for p in family if port in p.cmdline() and "http.server" in p.cmdline()[2]]
            kill(serving)
        await eventually(lambda: refused(int(port)))  # its last threads may live a moment longer
        async with services.acquire(["site"]) as one, services.acquire(["site"]) as two:
            assert one["site"] != two["site"]
            new = {process.pid for process in me.children(recursive=True)} - {process.pid for process in family}
            assert new  # perhaps at the old one's port
        family += me.children(recursive=True)
    await gone([process for process in family if "http.server" in "".join(process.cmdline() if alive(process) else [])])


async def test_a_command_is_ready_when_it_says_so(tmp_path: Path) -> None:
    talking = f"{sys.executable} -u -c \"import time; time.sleep(0.3); print('up at {{port}}'); time.sleep(600)\""
    service = ServiceConfig(command=talking, ready="up at {port}", address="x:{port}")
    async with (
        ServiceRegistry.commands({"talker": service}, str(tmp_path)) as services,
        services.acquire(["talker"]) as acquired,
    ):
        assert acquired["talker"].startswith("x:")
    answering = ServiceConfig(command=SITE.command, ready="http://127.0.0.1:{port}/there")
    async with ServiceRegistry.commands({"site": answering}, str(tmp_path)) as services, services.acquire(["site"]):
        pass


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (ServiceConfig(command=f"{sys.executable} {AGENTS}/serviced.py serve {{port}}"), "exit status 3: cannot bind"),
        (ServiceConfig(command="sleep 600", ready="never", start_limit_s=0.2), r"not ready within 0\.2 s"),
        (ServiceConfig(command="nobody-has-this-program {port}"), "there is no 'nobody-has-this-program'"),
    ],
)
async def test_a_command_that_does_not_come_up_says_why(
    config: ServiceConfig, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_START_BACKOFF", Backoff(0.001, 0.001))
    with pytest.raises(ServiceFailed, match=says):
        await ServiceRegistry.commands({"site": config}, str(tmp_path)).__aenter__()
    await gone([p for p in psutil.Process().children(recursive=True) if "sleep" in p.name()])


# With a worker


@pytest.mark.parametrize("agent", ["solve", "solve_async", "Agent"])
async def test_a_python_agent_acquires_the_services_it_takes_by_name(
    agent: str, harness: WorkerHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICED", str(tmp_path))
    await harness.open()
    await harness.queue("g", {}, size=12)
    database = ServiceConfig(
        make="serviced.py:make_slowly" if agent == "solve_async" else "serviced.py:Database", count=3
    )
    options: dict[str, Any] = {"processes": 2, "concurrency": 12, "services": {"db": database}}
    with harness.worker(f"serviced.py:{agent}", reward="serviced.py:score", **options) as worker:
        found = await harness.episodes("g")
        worker.stop()
        await asyncio.to_thread(worker.process.wait, 60)
    assert [episode.attempt.outcome and episode.attempt.outcome.message for episode in found] == [""] * 12
    assert [episode.final_reward(0.0) for episode in found] == [1.0] * 12
    made = marked(tmp_path, "made")
    assert {episode.attempt.result for episode in found} <= made
    in_each = Counter(name.partition("-")[0] for name in made)
    # three over two hosts, of which a busy machine may start one too late, and the reward function's own in the worker
    assert sorted(in_each.values()) in ([1, 2, 3], [1, 3], [2, 3])
    assert marked(tmp_path, "closed") == made


def marked(folder: Path, how: str) -> set[str]:
    return {file.name.removeprefix(f"{how}-") for file in folder.glob(f"{how}-*")}


async def test_a_service_that_becomes_unhealthy_is_replaced_while_the_worker_runs(
    harness: WorkerHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICED", str(tmp_path))
    await harness.open()
    with harness.worker(
        "serviced.py:solve", reward="moody.py:score_slowly", services={"db": ServiceConfig(make="serviced.py:Database")}
    ):
        names = []
        for name, task in (("a", {}), ("b", {"do": "hurt"}), ("c", {})):
            await harness.queue(name, task)
            names.append((await harness.episode(name)).attempt.result)
    assert names[0] == names[1] != names[2]


async def test_commands_and_endpoints_acquire_addresses_and_the_reward_receives_the_same(
    harness: WorkerHarness,
) -> None:
    await harness.open()
    await harness.queue("g", {}, size=4)
    services = {"site": SITE, "grader": ServiceConfig(command=SITE.command, agent=False)}
    command = f"{sys.executable} serviced.py"
    with harness.worker(command, reward="serviced.py:same_site", services=services, concurrency=4) as worker:
        found = await harness.episodes("g")
        family = hosts_of(worker)
        assert sum("http.server" in " ".join(p.cmdline()) for p in family) == 3
        worker.process.kill()  # without a chance to clean up
        await gone(family)
    assert [(episode.attempt.result["grader"], episode.final_reward(0.0)) for episode in found] == [(False, 1.0)] * 4
    assert len({episode.attempt.result["site"] for episode in found}) <= 2
    posted: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        posted.append(await request.json())
        return web.json_response({"site": posted[-1]["services"]["site"], "status": "200"})

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await (tcp := web.TCPSite(runner, "127.0.0.1", 0)).start()
    await harness.queue("h", {})
    with harness.worker(f"{tcp.name}/", reward="serviced.py:same_site", services=services):
        assert (await harness.episode("h")).final_reward(0.0) == 1.0
    await runner.cleanup()
    assert posted[0]["services"].keys() == {"site"}


async def test_a_python_agent_acquires_the_address_of_a_command(harness: WorkerHarness) -> None:
    await harness.open()
    await harness.queue("g", {}, size=3)
    one = {"site": ServiceConfig(command=SITE.command)}  # for both hosts
    with harness.worker("serviced.py:visit", reward="serviced.py:same_site", services=one, processes=2) as worker:
        found = await harness.episodes("g")
        serving = [p for p in hosts_of(worker) if "http.server" in " ".join(p.cmdline())]
        for process in serving:
            kill(process)
        await gone(serving)
        await harness.queue("again", {}, size=2)
        found += await harness.episodes("again")
    assert [episode.final_reward(0.0) for episode in found] == [1.0] * 5


async def test_a_worker_whose_services_cannot_be_started_says_why(
    harness: WorkerHarness, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.open()
    broken, database = ServiceConfig(make="serviced.py:broken"), ServiceConfig(make="serviced.py:Database")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("serviced.py:solve", {"services": {"db": broken}}, "service 'db' cannot be started: OSError: no disk"),
        ("serviced.py:solve", {}, "and with services by name (there are none)"),
        ("serviced.py:solve", {"services": {"db": database}, "processes": 2}, "each of 2 processes needs at least one"),
        ("sh -c true", {"services": {"db": database}}, "the agent does not run in Python"),
        ("serviced.py:solve", {"services": {"db": ServiceConfig(make="serviced.py:nobody")}}, "has no 'nobody'"),
    ]
    for agent, options, says in cases:
        with harness.worker(agent, **options) as worker:
            assert await asyncio.to_thread(worker.process.wait, 60) == 2
        assert says in capfd.readouterr().err
