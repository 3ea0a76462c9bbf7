"""The isolation of a worker: chooses the mode, and forwards connections of sandboxes while the worker runs."""

import asyncio
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from subprocess import PIPE

from msgspec import Struct
from msgspec.structs import replace

from leyden.background import start_background
from leyden.backoff import Backoff
from leyden.client.isolation.launcher import agents_server, check, describe
from leyden.client.isolation.options import IsolationOptions, Mode, ModeChoice, SandboxUnavailable
from leyden.client.isolation.sandbox import hosts_file, targets
from leyden.client.isolation.sandbox_files import EMPTY_FILE, find_key_files
from leyden.client.isolation.user_ids import remove_abandoned_scratch
from leyden.process.child import ChildProcess, module_command
from leyden.process.guardian import Guard
from leyden.user_code.loading import LoadError

_log = logging.getLogger("leyden.worker")
_RESTART_BACKOFF = Backoff(first_s=0.1, max_s=5.0)


class IsolationRequest(Struct, frozen=True, kw_only=True):
    """What the options of a worker say about isolation."""

    choice: ModeChoice
    agent: str
    probe: tuple[str, ...]
    """A command that fails if the agent cannot be run."""
    command_services: tuple[str, ...] = ()
    """Services that are commands. Their ports are not known in advance, so that sandboxes cannot reach them."""
    options: IsolationOptions


class Isolation(Struct, frozen=True):
    """What the hosts of a worker are started with."""

    options: IsolationOptions
    agent: str
    server: str
    """The URL of the server for agents."""


def choose_mode(request: IsolationRequest) -> tuple[Mode, str]:
    """Return the mode that a worker uses here, and one line about it. Raises `LoadError` if it does not work."""
    with tempfile.TemporaryDirectory(prefix="leyden-worker-") as folder:
        return _choose(request, _prepare(request.options, Path(folder)))


def _choose(request: IsolationRequest, options: IsolationOptions) -> tuple[Mode, str]:
    if request.choice == "none":
        return "none", describe("none")
    reasons = []
    modes: tuple[Mode, ...] = ("sandbox", "user") if request.choice == "auto" else (request.choice,)
    for mode in modes:
        try:
            if mode == "sandbox" and request.command_services:
                raise SandboxUnavailable(f"service {request.command_services[0]!r} is a command with a port")
            check(replace(options, mode=mode), request.probe)
            return mode, describe(mode)
        except SandboxUnavailable as error:
            reasons.append((mode, error))
    if request.choice != "auto":
        raise LoadError(f'`workers.isolation = "{request.choice}"` does not work here: {reasons[0][1]}')
    why = "; ".join(f"{mode}: {error}" for mode, error in reasons)
    return "none", f"{describe('none')}; stronger modes do not work here: {why}"


@asynccontextmanager
async def running_isolation(request: IsolationRequest) -> AsyncIterator[Isolation]:
    """Choose a mode, and forward the connections of sandboxes within this context."""
    if request.choice == "none":
        yield Isolation(request.options, request.agent, request.options.server)
        return
    folder = Path(tempfile.mkdtemp(prefix="leyden-worker-"))
    try:
        if os.geteuid() == 0:
            await asyncio.to_thread(remove_abandoned_scratch)
        options = await asyncio.to_thread(_prepare, request.options, folder)
        mode, note = await asyncio.to_thread(_choose, request, options)
        if request.choice == "auto":
            sys.stderr.write(f"{note}\n")
        agent = _readable_copy(request.agent, folder)
        if agent != request.agent:
            readable = (*options.workers.readable, str(folder / "agent"))
            options = replace(options, workers=replace(options.workers, readable=readable))
        options = replace(options, mode=mode)
        async with _forwarding(options) if mode == "sandbox" and targets(options) else nullcontext():
            yield Isolation(options, agent, agents_server(options))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def _forwarding(options: IsolationOptions) -> AsyncIterator[None]:
    """Run the forwarder within this context, which is entered when the forwarder listens."""
    ready = asyncio.Event()
    forwarding = start_background(_forward(options, ready), "forwarding connections of sandboxes")
    try:
        await ready.wait()
        yield
    finally:
        forwarding.cancel()
        await asyncio.wait({forwarding})


def _prepare(options: IsolationOptions, folder: Path) -> IsolationOptions:
    """Create the folder of the forwarder's sockets, which sandboxes see, and find the keys that they must not see."""
    folder.chmod(0o711)
    sockets = folder / "sockets"
    sockets.mkdir(mode=0o711)
    (sockets / "hosts").write_text(hosts_file(options))
    (sockets / EMPTY_FILE).touch()
    for name in ("hosts", EMPTY_FILE):
        (sockets / name).chmod(0o644)
    modules = (each for each in options.path if "-packages" not in each and not each.startswith(sys.base_prefix))
    shown = (str(Path(options.base, each)) for each in (*options.workers.readable, *options.workers.writable))
    keys = find_key_files((options.base, *shown, *modules))
    return replace(options, sockets=str(sockets), hidden=(*options.hidden, *keys))


def _readable_copy(agent: str, folder: Path) -> str:
    """Copy a pickled agent out of the folder of its run, which agents cannot read."""
    if not agent.endswith(".pkl"):
        return agent
    (folder / "agent").mkdir(mode=0o711)
    copy = folder / "agent" / Path(agent).name
    shutil.copyfile(agent, copy)
    copy.chmod(0o644)
    return str(copy)


async def _forward(options: IsolationOptions, ready: asyncio.Event) -> None:
    """Keep the forwarder running, in a separate process, so that traffic of agents cannot delay the worker."""
    failures = 0
    while True:
        command = module_command("leyden.client.isolation.forwarding", options.sockets, *targets(options))
        process = ChildProcess(command, stdout=PIPE, guard=Guard())
        try:
            if await process.first_line():
                ready.set()
                failures = 0
            await process.wait()
        finally:
            await process.end()
        failures += 1
        _log.warning("the forwarder of the sandboxes ended and is started again")
        await _RESTART_BACKOFF.wait(failures)
