"""`leyden worker --ray` on a real Ray cluster: a worker on every node while nodes join, fail and leave."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from worker_harness import AGENTS, WorkerHarness, alive

from leyden.api.wire import EventCursor
from leyden.extras import install_command
from leyden.outcomes import Ending
from leyden.server.control.keys import KeyKind

pytest.importorskip("ray")
from ray.cluster_utils import Cluster

LEASE_S = 5.0
TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head with room for one worker. Its folder's name is short, since sockets are in it."""
    with TemporaryDirectory(prefix="ray") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)  # where `auto` finds this cluster, and no other
        patch.delenv("RAY_ADDRESS", raising=False)
        running = Cluster()
        start_node(running, include_dashboard=False)
        yield running
        running.shutdown()


def start_node(cluster: Cluster, **more: Any) -> Any:
    """Ray gives a node half a minute to start, which is little where others compute."""
    for _ in range(3):
        try:
            return cluster.add_node(num_cpus=1, **more)
        except Exception as error:
            failed = error
    raise failed


@contextmanager
def another_node(cluster: Cluster, **variables: str) -> Iterator[Any]:
    node = start_node(cluster, env_vars=variables)
    try:
        yield node
    finally:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Where agents say that they are there."""
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


class Driver:
    """The command as a process, with all that Ray started for it."""

    def __init__(self, harness: WorkerHarness, home: Path, agent: str, *more: str) -> None:
        self.key = harness.server.service.keyring.create(KeyKind.WORKER, 600, run="r")[0]
        (home / "worker.key").write_text(self.key)
        config = home / "r.toml"
        config.write_text(f'agent = "{agent}"\ntasks = "none.jsonl"\nbase = "{AGENTS}"\nworkers.concurrency = 1\n')
        self.output = home / "output"
        command = [sys.executable, "-m", "leyden", "worker", str(config), "--server", harness.server.url]
        command += ["--key-file", str(home / "worker.key"), "--ray", *more]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def workers(self) -> list[psutil.Process]:
        """Ray's processes with workers in them."""
        return [process for process in psutil.Process().children(recursive=True) if _is_worker(process)]

    def family(self, on: Any = None) -> list[psutil.Process]:
        """The workers, and the processes of their agents; on one node or on all."""
        workers = [
            worker
            for worker in self.workers()
            if on is None or raylet(on).pid in [each.pid for each in worker.parents()]
        ]
        return [process for worker in workers for process in (worker, *worker.children(recursive=True))]

    async def ended(self) -> int:
        await until(lambda: self.process.poll() is not None, self)
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def raylet(node: Any) -> subprocess.Popen[bytes]:
    """The process that is Ray on a node."""
    return node.all_processes["raylet"][0].process


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "leyden.client.worker" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start_driver(harness: WorkerHarness, cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Start the command, which finds the cluster by itself unless told."""
    drivers: list[Driver] = []

    def start(agent: str = "posted.py:solve", *more: str) -> Driver:
        drivers.append(Driver(harness, tmp_path, agent, *more))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.close()


async def until(true: Callable[[], Any], driver: Driver | None = None) -> None:
    """Wait for what announces itself to nobody."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(driver.output.read_text() if driver else "") from None


def there(here: Path) -> set[str]:
    """The attempts whose agents have said that they are there."""
    return {file.name for file in here.iterdir()} - {"go"}


async def queue(harness: WorkerHarness, here: Path, *numbers: int) -> None:
    for n in numbers:
        await harness.queue(f"g{n}", {"n": n, "here": str(here)})


async def test_every_suitable_node_has_a_worker_and_one_that_dies_loses_no_rollout_and_disturbs_no_other(
    harness: WorkerHarness, cluster: Cluster, here: Path, start_driver: Callable[..., Driver]
) -> None:
    await harness.open(lease_s=LEASE_S)
    await queue(harness, here, 1)
    with another_node(cluster, UNFIT="1"):
        driver = start_driver("posted.py:solve", "--ray-address", cluster.address)
        await until(lambda: len(there(here)) == 1, driver)
        with another_node(cluster) as node:  # it joins later
            await queue(harness, here, 2)
            await until(lambda: len(there(here)) == 2, driver)
            assert_unseen(driver)
            family = driver.family(on=node)
            assert len(family) > 1
            raylet(node).kill()  # and nobody reaps it yet, as in a container without an init
            lost = await until_lost(harness)
            await until(lambda: not any(map(alive, family)))
            (here / "go").touch()
            episodes = [await harness.episode(f"g{n}") for n in (1, 2)]
    assert [episode.final_reward(0.0) for episode in episodes] == [1.0, 2.0]
    assert [[call.response["content"] for call in episode.calls] for episode in episodes] == [["1"], ["2"]]
    attempts = [(await harness.remote.get_rollout("r", f"g{n}.0")).attempts for n in (1, 2)]
    assert [len(each) for each in attempts] == [1, 2] and lost == "g2.0.1"
    first = [each[0].worker for each in attempts]
    assert len(set(first)) == 2 and attempts[1][1].worker == first[0]
    assert re.search("is left out: .*this machine is not fit for it", driver.output.read_text())


def assert_unseen(driver: Driver) -> None:
    """The worker's key is in no command line, no environment and no file of the cluster's."""
    key = driver.key.encode()
    assert len(driver.workers()) == 2
    for process in psutil.Process().children(recursive=True):
        for file in ("cmdline", "environ"):
            with suppress(ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
                assert key not in Path(f"/proc/{process.pid}/{file}").read_bytes(), process
    logs = [file for file in Path(os.environ["RAY_TMPDIR"]).rglob("*") if file.is_file()]
    assert logs
    for file in logs:
        assert key not in file.read_bytes(), file


async def until_lost(harness: WorkerHarness) -> str:
    """Wait for the end of an attempt; which it was."""
    async with asyncio.timeout(TIMEOUT_S):
        log = await harness.remote.follow_events("r", EventCursor(0, wait=TIMEOUT_S, kind="attempt.ended"))
    (event,) = log.events
    assert event.data["ending"] == Ending.LOST
    return event.subject


@pytest.mark.slow
async def test_a_worker_that_dies_is_started_again_and_stops_on_request(
    harness: WorkerHarness, here: Path, start_driver: Callable[..., Driver]
) -> None:
    await harness.open(lease_s=LEASE_S)
    await queue(harness, here, 1)
    driver = start_driver()
    await until(lambda: there(here) == {"g1.0.1"}, driver)
    (worker,), before = driver.workers(), driver.family()
    worker.kill()
    await until(lambda: there(here) == {"g1.0.1", "g1.0.2"}, driver)
    await until(lambda: not any(map(alive, before)))
    (here / "go").touch()
    assert (await harness.episode("g1")).final_reward(0.0) == 1.0
    family = driver.family()
    assert len(family) > 1
    driver.process.send_signal(signal.SIGTERM)
    assert await driver.ended() == 0, driver.output.read_text()
    await until(lambda: not any(map(alive, family)))


@pytest.mark.slow
async def test_workers_and_agents_end_when_the_command_is_killed(
    harness: WorkerHarness, here: Path, start_driver: Callable[..., Driver]
) -> None:
    await harness.open()
    await queue(harness, here, 1)
    driver = start_driver()
    await until(lambda: there(here), driver)
    family = driver.family()
    assert len(family) > 1
    driver.process.kill()
    await until(lambda: not any(map(alive, family)))


@pytest.mark.parametrize(
    ("agent", "more", "says"),
    [
        ("nothing.py:solve", (), "no node of the cluster can run this: 'nothing.py:solve'"),
        ("posted.py:solve", ("--ray-address", "127.0.0.1:1"), "there is no Ray cluster at '127.0.0.1:1'"),
    ],
)
async def test_what_cannot_work_is_reported_in_one_line(
    harness: WorkerHarness, start_driver: Callable[..., Driver], agent: str, more: tuple[str, ...], says: str
) -> None:
    await harness.open()
    driver = start_driver(agent, *more)
    assert await driver.ended() == 1
    assert driver.output.read_text().splitlines()[-1].startswith(f"leyden: {says}")


def test_without_ray_the_error_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('agent = "a:b"\ntasks = "none.jsonl"\n')
    code = "import sys; sys.modules['ray'] = None; from leyden.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "worker", str(tmp_path / "r.toml"), "--server", "http://127.0.0.1:1", "--ray"],
        env={**os.environ, "LEYDEN_KEY": "k"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (
        1,
        f"leyden: --ray needs Ray: {install_command('ray')}\n",
    )
