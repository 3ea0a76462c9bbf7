"""Starts vLLM's server on this machine, supervises it, and restarts it within limits.

Its socket is in a folder that only this user can enter, because vLLM's routes for weights take no key and unpickle what
they receive. A restarted server has the weights of the model's folder, so it is paused before clients can reach it;
`on_restart` publishes the current weights, which resumes it. vLLM ends with this process, even if this one is killed.
`RunningVllm` is a server that somebody else started.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from msgspec.structs import replace

from leyden.background import running
from leyden.engine.protocol import EngineError
from leyden.engine.vllm.http import call, control, is_healthy
from leyden.engine.vllm.launch import VllmInstallation, VllmOptions, command, environment, find_vllm
from leyden.process.child import ChildProcess
from leyden.process.guardian import Guard
from leyden.process.place import HERE, FindPlace, Place, PlaceLost, this_machine
from leyden.process.rotating_log import RotatingLog
from leyden.process.supervised import SupervisedProcess
from leyden.process.temporary import TemporaryFolder

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 900.0
_POLL_S = 0.2
_EXIT_TIMEOUT_S = 30.0
"""How long a server that is not healthy may take to exit: vLLM looks every 5 seconds whether its engine has died."""
_MAX_CRASHES, _CRASHES_WITHIN_S = 5, 600.0
"""A server that crashes this often within this time of service is not restarted. Starting is no service.

A rollout that crashes it each time has no attempt left after four, by default (`Retry.FREE_ONCE`)."""
_REASON_LINES, _REASON_CHARACTERS = 3, 600
_TERM_TIMEOUT_S = 3.0
_ERROR_WORDS = ("Error: ", "Exception: ")
_RUNNING_POLL_S, _MISSES = 1.0, 3
"""A server that misses this many polls in a row is gone; vLLM takes longer than that to restart."""
_CONSEQUENCE = "See root cause above"
"""vLLM's front end ends its log with an error that only refers to the one of the process that failed."""


class VllmProcess(SupervisedProcess):
    """A running server. `socket` stays the same over restarts."""

    def __init__(
        self,
        options: VllmOptions,
        log: Path,
        on_restart: Callable[[], Awaitable[None]] | None = None,
        may_restart: Callable[[], Awaitable[object]] | None = None,
        find_place: FindPlace = this_machine,
    ) -> None:
        """Without `on_restart` a crash is final: `wait_failed` raises at once. A restart waits for `may_restart`."""
        super().__init__("vLLM", _MAX_CRASHES, _CRASHES_WITHIN_S, EngineError)
        self._options, self._log = options, RotatingLog(log)
        self._on_restart, self._may_restart = on_restart, may_restart
        self._temporary = TemporaryFolder("vllm")
        self._folder = self._temporary.path
        self.socket = self._folder / "vllm.sock"
        self.restarts = 0
        self._find_place = find_place
        self._place: Place = HERE
        self._installation: VllmInstallation | None = None
        self._process: ChildProcess | None = None
        self._served_s = 0.0
        self._up, self._down = asyncio.Event(), asyncio.Event()

    async def start(self) -> None:
        """Start the server and wait until it is ready. Raises `EngineError` with the reason if it ends instead."""
        self._installation = await asyncio.to_thread(find_vllm, self._options.python)
        if self._installation is None:
            setting = "`engine.vllm_python` (--vllm-python of `leyden serve`)"
            raise EngineError(f"{self._options.python} has no vLLM: install it, or set {setting}")
        await self._launch()
        self._admit()
        self._up.set()
        self._start_supervising()

    async def recovered(self) -> bool:
        """Return False if the server is healthy, else True once it is restarted. Raises as `wait_failed` does."""
        if not self._down.is_set() and not await self._ends():
            return False
        await self._down.wait()
        async with running(self.wait_failed(), self._up.wait()) as (failing, up):
            await asyncio.wait({failing, up}, return_when=asyncio.FIRST_COMPLETED)
            if not up.done():
                failing.result()
            return True

    async def _end(self) -> None:
        """Stop the server and remove its folder."""
        if self._process is not None:
            await self._process.end()
        self._temporary.close()

    async def deliver(self, folder: Path, purpose: str) -> str:
        """Return the path of a folder on the server's machine. Raises `EngineError` if that is lost."""
        try:
            return await self._place.deliver(folder, purpose)
        except PlaceLost as error:
            raise EngineError(str(error)) from error

    @property
    def location(self) -> str:
        """The path of the socket, for clients."""
        return str(self.socket)

    @property
    def is_down(self) -> bool:
        """Whether it has ended and is being restarted."""
        return self._down.is_set()

    @property
    def pid(self) -> int | None:
        """The process id of the guardian, which ends with this process and has the server as a descendant."""
        return self._process.pid if self._process is not None else None

    async def _wait_ended(self) -> str:
        assert self._process is not None
        began = time.monotonic()
        status = await self._process.wait()
        self._served_s += time.monotonic() - began
        self._up.clear()
        self._down.set()
        reason = f"vLLM ended (status {status}): {self._reason()}"
        log.error("%s", reason)
        self.socket.unlink(missing_ok=True)
        if self._on_restart is None:
            raise EngineError(reason)
        return reason

    def _clock(self) -> float:
        return self._served_s

    async def _restart(self, reason: str) -> None:
        self.restarts += 1
        try:
            await self._launch_paused()
        except EngineError:
            if not await self._ends():
                raise
            return  # it crashed again, which counts as any crash
        self._down.clear()
        self._up.set()

    async def _launch_paused(self) -> None:
        assert self._on_restart is not None
        if self._may_restart is not None:
            await self._may_restart()
        await self._launch()
        async with control(str(self._private_socket)) as client:
            await call(client, "/pause", mode="abort")
        self._admit()
        await self._on_restart()

    async def _ends(self) -> bool:
        """Return False if the server is healthy, else True once it has ended."""
        process, deadline = self._process, time.monotonic() + _EXIT_TIMEOUT_S
        assert process is not None
        async with control(str(self._private_socket)) as client:
            while process.status is None:
                if await is_healthy(client):
                    return False
                if time.monotonic() > deadline:
                    process.hang_up()  # which ends it
                await asyncio.sleep(_POLL_S)
        return True

    @property
    def _private_socket(self) -> Path:
        return self._folder / f"{self.restarts}.sock"

    async def _launch(self) -> None:
        """Start the server on a socket that no client knows yet, and wait until it is ready."""
        assert self._installation is not None
        self._log.path.parent.mkdir(parents=True, exist_ok=True)
        self._place, options = await self._find_place(), self._options
        if options.tokenizer is not None:
            options = replace(options, tokenizer=Path(await self.deliver(options.tokenizer, "tokenizer")))
        self._process = ChildProcess(
            command(options, self._installation, Path(self._place.path(self._private_socket))),
            environment=environment(options, self._place.interface),
            log=self._log,
            guard=Guard(_TERM_TIMEOUT_S, terminate=True),
            place=self._place,
            listens=[self._private_socket],
        )
        await self._ready(self._process)

    async def _ready(self, process: ChildProcess) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        async with running(process.wait()) as (ended,), control(str(self._private_socket)) as client:
            while not await is_healthy(client):
                await asyncio.wait({ended}, timeout=_POLL_S)
                if ended.done():
                    raise EngineError(f"vLLM did not start (status {ended.result()}): {self._reason()}")
                if time.monotonic() > deadline:  # `stop` ends it
                    raise EngineError(f"vLLM was not ready after {_START_TIMEOUT_S:.0f} s: {self._reason()}")

    def _admit(self) -> None:
        """Let clients reach the server at `socket`."""
        fresh = self._folder / "fresh"
        fresh.symlink_to(self._private_socket.name)
        fresh.rename(self.socket)

    def _reason(self) -> str:
        """Return the reason of a failure from the log."""
        return f"{find_reason(self._log.tail())} (see {self._log.path})"


def find_reason(text: str) -> str:
    """Return the last error of a log that is not a consequence of another, with what follows it, or its last lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [number for number, line in enumerate(lines) if any(word in line for word in _ERROR_WORDS)]
    causes = [number for number in errors if _CONSEQUENCE not in lines[number]] or errors
    first = causes[-1] if causes else max(0, len(lines) - _REASON_LINES)
    return " | ".join(lines[first : first + _REASON_LINES])[:_REASON_CHARACTERS] or "its log is empty"


class RunningVllm:
    """A vLLM server at a Unix socket or URL that the run neither starts nor stops (`engine.url`).

    If it stops answering the run ends: a restarted server has the weights of its model's folder, not the policy's.
    """

    is_down = False

    def __init__(self, location: str) -> None:
        self.location = location

    async def start(self) -> None:
        """Check that the server answers and can receive weights. Raises `EngineError` with what to change."""
        async with control(self.location) as client:
            if not await is_healthy(client):
                raise EngineError(f"no vLLM answers at {self.location}: start it, or change `engine.url`")
            try:
                await call(client, "/collective_rpc", {"method": "leyden_checksums"})
            except EngineError as error:
                raise EngineError(
                    f"the vLLM at {self.location} cannot receive weights ({error}): start it with "
                    "`python -m leyden.engine.vllm MODEL`"
                ) from error

    async def wait_failed(self) -> NoReturn:
        """Wait until the server no longer answers, and raise `EngineError`."""
        missed = 0
        while missed < _MISSES:
            await asyncio.sleep(_RUNNING_POLL_S)
            async with control(self.location) as client:
                missed = 0 if await is_healthy(client) else missed + 1
        raise EngineError(f"the vLLM at {self.location} no longer answers: start it, then resume the run")

    async def deliver(self, folder: Path, purpose: str) -> str:
        """Return the folder: the server must see it."""
        return str(folder)

    async def recovered(self) -> bool:
        """Return False: it is not restarted."""
        return False

    async def stop(self) -> None:
        """Do nothing: the server keeps running."""
