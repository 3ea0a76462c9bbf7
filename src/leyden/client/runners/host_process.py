"""A host process as its worker sees it: started, listened to and ended.

The two kinds of host use the same protocol: `host.main` runs Python agents in its own process, `command_host` starts
one process for each attempt.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from subprocess import PIPE, STDOUT
from typing import Any, Self

from msgspec.structs import replace

from leyden.api.wire import Lease
from leyden.background import start_background
from leyden.backoff import Backoff
from leyden.client.agent_process import CrashReport, agent_environment
from leyden.client.attempt.output_buffer import OutputBuffer
from leyden.client.host_protocol import (
    BlockerFound,
    CodeReturned,
    FindBlocker,
    FlushSpans,
    HostFailed,
    HostReady,
    HostSetup,
    InvalidMessage,
    MessageStream,
    Ping,
    Pong,
    SpansFlushed,
    StepReward,
    StopAttempt,
    StopReply,
    ToWorker,
)
from leyden.client.isolation.launcher import Launch, launch
from leyden.client.isolation.options import IsolationOptions
from leyden.client.seeds import HASH_SEED
from leyden.process.child import ChildProcess, module_command
from leyden.process.guardian import Guard, exit_reason
from leyden.user_code.loading import LoadError

Reply = StopReply | SpansFlushed | Pong | BlockerFound
"""Answers to requests of the worker."""
AGENT_HOST, COMMAND_HOST = "leyden.client.host.main", "leyden.client.runners.command_host"
"""The modules of the two kinds of host."""
_log = logging.getLogger("leyden.worker")
_LAST_OUTPUT_S, _REPLY_TIMEOUT_S = 0.2, 2.0
_FLUSH_TIMEOUT_S = 30.0
"""How long the end of an attempt is held back for its spans: as long as one export may take."""
_GRACE_S = 6.0
"""How long a host may take to end by itself when its worker has closed it or died."""
_START_BACKOFF, _MAX_START_TRIES = Backoff(first_s=0.1, max_s=1.0), 3
_MAX_FRAME = 8 << 20
"""Bytes of a message from a host: a result and the output are bounded, and agent code may write to the socket."""


class HostDied(Exception):
    """A host process died while it loaded the agent; the message says how."""


class HostProcess:
    """A `Runner` that is a host process. It may die at any time between `start` and `close`."""

    def __init__(
        self,
        process: ChildProcess,
        stream: MessageStream[ToWorker],
        crash: CrashReport,
        launched: Launch,
        setup: HostSetup,
        keep_output: bool,
    ) -> None:
        self._process, self._stream, self._crash, self._setup = process, stream, crash, setup
        self._launched: Launch | None = launched
        self.pool: str | None = None
        self.services: tuple[str, ...] = ()
        self.max_concurrency: int | None = None
        self.stop_timeout_s = 0.5
        self._exit = asyncio.ensure_future(process.wait())
        self._output = OutputBuffer()
        self._reading_output: asyncio.Task[None] | None = None
        if keep_output:
            reading = process.read_output(self._output.add)
            self._reading_output = start_background(reading, "reading the output of a host process")
        self._replies: dict[Any, asyncio.Future[Reply | None]] = {}
        self._listening = True
        self._pings = 0

    @classmethod
    async def start(
        cls,
        module: str,
        setup: HostSetup,
        *,
        pool: str | None = None,
        stop_timeout_s: float = 0.5,
        keep_output: bool = False,
    ) -> Self:
        """Start a host and wait until it has loaded the agent.

        A process that dies while it loads the agent is started again; raises `LoadError` when that happens repeatedly.
        With `keep_output`, output is kept for `output()` instead of going to the worker's own output.
        """
        start = partial(cls._try_start, module, setup, keep_output)
        try:
            host = await _START_BACKOFF.retry(start, _MAX_START_TRIES, HostDied)
        except HostDied as died:
            raise LoadError(f"{setup.agent!r} cannot be loaded: its process died ({died})") from died
        host.pool, host.stop_timeout_s = pool, stop_timeout_s
        return host

    @classmethod
    async def _try_start(cls, module: str, setup: HostSetup, keep_output: bool) -> Self:
        """Start a host once; raises `LoadError` or `HostDied` if it does not load the agent."""
        with ExitStack() as on_failure, ExitStack() as inherited:  # `inherited` is what only the child needs
            ours, theirs = socket.socketpair()
            on_failure.callback(ours.close)
            inherited.callback(theirs.close)
            crash = CrashReport()
            on_failure.callback(crash.close)
            pass_fds = (theirs.fileno(), crash.fileno())
            command = module_command(module, *pass_fds)
            # A host of commands runs no agent code; each command has a guardian and limits of its own.
            isolation = setup.isolation if module == AGENT_HOST else IsolationOptions()
            environment = agent_environment(isolation, setup.server, setup.key)
            environment |= HASH_SEED if setup.rollout.fixed_seeds else {}
            launched = launch(isolation, command, setup.base, environment)
            on_failure.callback(launched.release)
            stream = await MessageStream[ToWorker].connect(ours, ToWorker, _MAX_FRAME)
            on_failure.callback(stream.close)
            process = ChildProcess(
                launched.command,
                environment=launched.environment,
                pass_fds=pass_fds,
                stdout=PIPE if keep_output else None,
                stderr=STDOUT if keep_output else None,
                guard=Guard(_GRACE_S, user=launched.user, memory_mb=isolation.memory_mb),
                report=crash.fileno(),
            )
            host = cls(process, stream, crash, launched, setup, keep_output)
            on_failure.pop_all()
        try:
            host._stream.send(setup)
            match await host._receive():
                case HostReady(services, max_concurrency):
                    host.services, host.max_concurrency = services, max_concurrency
                    return host
                case HostFailed(message):
                    raise LoadError(message)
                case _:
                    raise HostDied(await host.exit_reason())
        except BaseException:
            await asyncio.shield(host.close())
            raise

    def start_attempt(self, lease: Lease) -> None:
        """Start an attempt."""
        self._stream.send(replace(lease, key=self._setup.key or lease.key, url=self._setup.server))

    async def stop(self, attempt: str) -> StopReply | None:
        """Stop an attempt and return its output; None if code in the host lets no other thread run."""
        reply = await self._request(StopAttempt(attempt), (StopReply, attempt), _REPLY_TIMEOUT_S)
        return reply if isinstance(reply, StopReply) else None

    async def flush_spans(self, attempt: str) -> None:
        """Wait until the server has the spans of an attempt, but not for longer than one export may take."""
        flushed = await self._request(FlushSpans(attempt), (SpansFlushed, attempt), _FLUSH_TIMEOUT_S)
        if flushed is None and self._listening:
            _log.warning("attempt %s ends without its last spans: they were not exported in time", attempt)

    async def is_responsive(self, timeout_s: float) -> bool:
        """Whether its event loop runs. A host that has died blocks nothing: `listen` reports its end."""
        self._pings += 1
        return await self._request(Ping(self._pings), self._pings, timeout_s) is not None or not self._listening

    async def find_blocker(self) -> str | None:
        """Return the attempt whose code blocks its event loop."""
        reply = await self._request(FindBlocker(), BlockerFound, _REPLY_TIMEOUT_S)
        return reply.attempt if isinstance(reply, BlockerFound) else None

    async def _request(self, request: Any, key: Any, timeout_s: float) -> Reply | None:
        """Send a request and wait for the reply with the same key; None if it does not arrive in time."""
        if not self._listening:
            return None
        reply: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        self._replies[key] = reply
        self._stream.send(request)
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            return None
        finally:
            self._replies.pop(key, None)

    async def listen(self, on_event: Callable[[CodeReturned | StepReward], None]) -> None:
        """Call `on_event` for each step reward and each attempt whose code has returned, until the host has died."""
        reading = start_background(self._read(on_event), "reading the messages of a host process")
        try:
            await asyncio.wait((reading, self._exit), return_when=asyncio.FIRST_COMPLETED)
            # read what it sent before it died, but not for long: a process that an agent forked may hold the socket
            await asyncio.wait((reading,), timeout=_LAST_OUTPUT_S)
        finally:
            reading.cancel()
            self._listening = False  # no reply comes any more
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_result(None)

    async def _read(self, on_event: Callable[[CodeReturned | StepReward], None]) -> None:
        while (message := await self._receive()) is not None:
            match message:
                case CodeReturned() | StepReward():
                    on_event(message)
                case StopReply() | SpansFlushed():
                    self._resolve((type(message), message.attempt), message)
                case Pong():
                    self._resolve(message.number, message)
                case BlockerFound():
                    self._resolve(BlockerFound, message)

    async def _receive(self) -> ToWorker | None:
        """Return the next message. A host that sends something else is killed."""
        try:
            return await self._stream.receive()
        except InvalidMessage as error:
            _log.warning("a host process sent something that is no message, and is killed: %s", error)
            self._process.kill()
            return None

    def _resolve(self, key: Any, message: Reply) -> None:
        reply = self._replies.get(key)
        if reply is not None and not reply.done():
            reply.set_result(message)

    async def exit_reason(self) -> str:
        """Return exit status or signal, with the crash report if Python wrote one."""
        code = await asyncio.shield(self._exit)
        return "\n".join(filter(None, (exit_reason(code), self._crash.read())))

    def output(self) -> str:
        """Return what it printed; empty without `keep_output`."""
        return self._output.text()

    async def close(self, *, kill: bool = False) -> None:
        """End the host and all its descendants; without `kill` it has time to tear down first."""
        self._stream.close()
        if kill:
            self._process.kill()
        await self._process.end()
        if self._launched is not None:
            launched, self._launched = self._launched, None
            await asyncio.to_thread(launched.release)  # it may remove many files
        if self._reading_output is not None:
            await asyncio.wait((self._reading_output,), timeout=_LAST_OUTPUT_S)
            self._reading_output.cancel()
