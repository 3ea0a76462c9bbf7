"""Fixtures: a real store, and a real server in its own process."""

import gc
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before torch is imported, also by the commands that tests start. Models are tiny and cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see leyden.process.resources
# Every HTTP client reads the certificates that it trusts, 50 ms of CPU; tests have no use for them.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "data" / "certificate.pem")
sys.path.insert(0, str(Path(__file__).parent))

from databases import Postgres, empty_store, running_postgres
from forked_commands import FORKING_PYTHON, start_fork_server
from randomness import is_fixed
from serving import ServerProcess

from leyden.api.client import Remote
from leyden.store.store import Store

# Random examples are the same for everybody; `make test-all` draws new ones with --hypothesis-profile=random, and
# `make seeds` of cheap tests twice as many as `make test`, from the seeds that it gives, and of others as many. A
# deadline would fail on a busy machine.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("seeded", derandomize=False, deadline=None, print_blob=True)
settings.register_profile("random", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("fixed")

_LONGEST_FILES = (
    "local/test_train.py",
    "learner/ranks/test_learner.py",
    "client/runners/test_supervisor.py",
    "client/worker/test_ray_cluster.py",
    "local/test_interrupts.py",
    "local/test_kill.py",
    "local/test_several_policies.py",
    "engine/torch/test_engine.py",
    "learner/test_equality.py",
    "server/gateway/answers/test_structured_output.py",
    "local/test_one_reward.py",
    "client/worker/test_worker.py",
    "client/isolation/test_sandbox.py",
    "local/test_choices.py",
    "local/test_serve.py",
    "cli/test_cli.py",
    "learner/test_compilation.py",
    "server/gateway/answers/test_stream_parser.py",
    "examples/test_rag.py",
    "examples/test_sql.py",
    "local/test_refusals.py",
    "client/test_api.py",
    "local/test_dev.py",
    "learner/ranks/test_peers.py",
    "local/test_server_health.py",
    "benchmarks/test_harnesses.py",
    "rendering/test_known_models.py",
    "examples/test_calc.py",
    "client/isolation/test_isolation.py",
    "client/tracing/test_instrumentation.py",
    "test_site.py",
    "server/dashboard/test_dashboard.py",
    "server/gateway/upstream/test_client.py",
    "client/runners/test_command_host.py",
    "server/control/test_openapi.py",
    "examples/test_clients.py",
    "client/attempt/test_active_attempt.py",
    "client/test_guardian.py",
    "cli/test_init.py",
    "rl/signals/test_captures.py",
    "local/test_replay.py",
    "client/test_chaos.py",
    "test_faults.py",
    "store/test_store.py",
    "client/services/test_services.py",
    "server/test_serve.py",
    "orchestrator/rollouts/test_open_groups.py",
    "client/tracing/test_propagation.py",
    "local/test_server_process.py",
    "client/worker/test_lease_loop.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the folders of tests in memory, if there is enough: an fsync on a disk takes longer than most tests do.

    The process that forks commands and PostgreSQL are started before pytest's workers, which share them.
    """
    gc.disable()  # until all is imported, of which nothing is garbage
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 4 * 2**30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))
    start_fork_server()
    if config.getoption("numprocesses", None):
        shared = running_postgres()
        shared.__enter__()
        config.add_cleanup(lambda: shared.__exit__(None, None, None))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Fork workers, which have imported what most tests import."""
    for spec in specs:
        spec.python = FORKING_PYTHON


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first: one that is started last is waited for by all workers but one."""
    places = {Path(__file__).parent / file: place for place, file in enumerate(_LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Collect garbage again, without a look at what was imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Make torch's random numbers in a test independent of the tests before it in the same process."""
    if is_fixed() and "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store(empty_store(tmp_path / "leyden.db")).start()
    yield opened
    await opened.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server a test module: tests name their own runs."""
    with ServerProcess(tmp_path_factory.mktemp("home")) as process:
        yield process


@pytest.fixture
async def remote(server: ServerProcess) -> AsyncIterator[Remote]:
    async with Remote(server.url, server.admin_key) as connection:
        yield connection


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres | None]:
    """A real PostgreSQL server; None where the machine has none installed."""
    with running_postgres() as server:
        yield server
