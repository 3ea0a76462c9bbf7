"""The process that runs Python agents: `python -m leyden.client.host.main FD FILE`; FD is a socket to the worker.

It runs sync agents in threads and async ones on its event loop, many concurrently. It has only its pool's key. When the
worker is gone, it ends with all processes that its agents started.
"""

import asyncio
import contextvars
import inspect
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NoReturn

from msgspec.structs import replace

from leyden.api.wire import FinishRequest, Lease
from leyden.client import api
from leyden.client.agent_process import apply_limits, report_crashes_to
from leyden.client.attempt.errors import is_loop_error, outcome_of_error
from leyden.client.attempt.outcome import end_of_attempt
from leyden.client.host.captured_output import CapturedOutput
from leyden.client.host.loop_blocker import WatchedLoop
from leyden.client.host.python_agent import CallableAgent, ClassAgent, SetupFailed
from leyden.client.host_protocol import (
    BlockerFound,
    CodeReturned,
    FindBlocker,
    FlushSpans,
    HostFailed,
    HostReady,
    HostSetup,
    MessagePipe,
    Ping,
    Pong,
    SpansFlushed,
    StepReward,
    StopAttempt,
    StopReply,
    ToHost,
)
from leyden.client.seeds import seed_generators, seed_of
from leyden.client.services.pool import ServiceFailed
from leyden.client.services.registry import ServiceRegistry
from leyden.client.tracing import context, instrumentation, propagation
from leyden.client.tracing.exporter import AttemptSpanProcessor, SpanExport
from leyden.outcomes import Ending, Outcome
from leyden.user_code.bridge import wait_on
from leyden.user_code.loading import LoadError, add_current_folder, load_callable

_log = logging.getLogger("leyden.host")
_TEAR_DOWN_TIMEOUT_S = 4.0


class Host:
    """Runs attempts for its worker."""

    def __init__(
        self,
        setup: HostSetup,
        pipe: MessagePipe,
        agent: CallableAgent,
        spans: AttemptSpanProcessor,
        outputs: CapturedOutput,
        services: ServiceRegistry,
        instances: ClassAgent | None = None,
    ) -> None:
        self._setup, self._pipe, self._agent, self._spans, self._outputs = setup, pipe, agent, spans, outputs
        self._threads = ThreadPoolExecutor(setup.concurrency, thread_name_prefix="agent")
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopped: set[str] = set()
        self._blocked_before_s: dict[str, float] = {}
        """For how long the event loop had been blocked when each attempt was started."""
        self._services, self._instances = services, instances

    async def serve(self, serving: "Future[Host]") -> None:
        """Report readiness and run until the worker is gone."""
        self._loop = asyncio.get_running_loop()
        self._blocking = WatchedLoop(self._loop)
        try:
            await self._services.__aenter__()
        except ServiceFailed as error:
            self._pipe.send(HostFailed(str(error)))
            end()
        serving.set_result(self)
        addressed = tuple(name for name in self._agent.services if self._setup.services[name].command is not None)
        self._pipe.send(HostReady(addressed, self._services.capacity()))
        await self._loop.create_future()

    def on_message(self, message: ToHost) -> None:
        """Handle a message of the worker. Called from the listening thread."""
        match message:
            case Lease():
                self._blocked_before_s[message.id] = self._blocking.blocked_s()
                if self._agent.is_async:
                    self._loop.call_soon_threadsafe(self._start_task, message)
                else:
                    self._start_thread(message)
            case StopAttempt(attempt):
                self._spans.end_open(attempt)
                self._loop.call_soon_threadsafe(self._stop, attempt)
                self._blocking.find_blocker(lambda by: self._answer_stop(attempt, by))
            case FlushSpans(attempt):
                self._flush_spans(attempt)
            case Ping(number):
                self._loop.call_soon_threadsafe(self._pipe.send, Pong(number))
            case FindBlocker():
                self._blocking.find_blocker(lambda by: self._pipe.send(BlockerFound(by)))

    def _answer_stop(self, attempt: str, blocked_by: str | None) -> None:
        blocked_s = self._blocking.blocked_s()
        blocked_s -= self._blocked_before_s.get(attempt, blocked_s)
        output, has_spans = self._outputs.so_far(attempt), self._spans.drop_open(attempt)
        self._pipe.send(StopReply(attempt, output, blocked_by, blocked_s, has_spans))

    def _flush_spans(self, attempt: str) -> None:
        sent = self._spans.flush(attempt)
        if sent is None:
            self._pipe.send(SpansFlushed(attempt))
        else:
            sent.add_done_callback(lambda _: self._pipe.send(SpansFlushed(attempt)))

    def _start_task(self, lease: Lease) -> None:
        running = self._loop.create_task(self._run_task(lease), name=lease.id, context=self._begin(lease))
        self._tasks[lease.id] = running

    async def _run_task(self, lease: Lease) -> None:
        try:
            async with self._services.acquire(self._agent.services) as acquired:
                end = end_of_attempt(await self._bind(lease, acquired)(), self._setup)
        except BaseException as error:  # also SystemExit: an agent that calls sys.exit ends only its own attempt
            end = self._failed(lease.id, error)
        del self._tasks[lease.id]
        self._stopped.discard(lease.id)
        self._send_end(lease.id, end)

    def _start_thread(self, lease: Lease) -> None:
        self._threads.submit(self._begin(lease).run, self._run_thread, lease)

    def _begin(self, lease: Lease) -> contextvars.Context:
        """Collect the output of an attempt from now on; return the context that its code runs in."""
        self._outputs.begin(lease.id)
        return context.attempt_context(lease.id, lease.traceparent)

    def _run_thread(self, lease: Lease) -> None:
        loop_error = False
        try:
            with self._acquire_in_thread() as acquired:
                value = self._bind(lease, acquired)()
                if inspect.isawaitable(value):  # a sync function that returns a coroutine
                    value = wait_on(value, self._loop)
                end = end_of_attempt(value, self._setup)
        except BaseException as error:
            end, loop_error = self._failed(lease.id, error), is_loop_error(error)
        self._send_end(lease.id, end, loop_error)

    def _send_end(self, attempt: str, end: FinishRequest, loop_error: bool = False) -> None:
        """Tell the worker at once that the code has returned; it then has the spans flushed."""
        self._blocked_before_s.pop(attempt, None)
        end, has_spans = replace(end, output=self._outputs.end(attempt)), self._spans.drop_open(attempt)
        self._pipe.send(CodeReturned(attempt, end, has_spans, loop_error))

    @contextmanager
    def _acquire_in_thread(self) -> Iterator[dict[str, Any]]:
        """Acquire services for a thread; the pools belong to the event loop."""
        if self._services.capacity() is None:
            yield {}
            return
        acquiring = self._services.acquire(self._agent.services)
        acquired = wait_on(acquiring.__aenter__(), self._loop)
        try:
            yield acquired
        finally:
            wait_on(acquiring.__aexit__(None, None, None), self._loop)

    def _bind(self, lease: Lease, acquired: dict[str, Any]) -> Callable[[], Any]:
        task = lease.task.input
        if self._setup.rollout.fixed_seeds:
            seed_generators(seed_of(task))
        return self._agent.bind(task, lease, {**lease.services, **acquired})

    def _stop(self, attempt: str) -> None:
        """Cancel the task of an attempt. A thread cannot be cancelled; its key is no longer valid for the attempt."""
        task = self._tasks.get(attempt)
        if task is not None:
            self._stopped.add(attempt)
            # Not at once: a task that is cancelled before its first step never runs, and nothing would report its end.
            self._loop.call_soon(task.cancel)

    def tear_down(self) -> None:
        """Close services and agent instances, for as long as the worker waits."""
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(_TEAR_DOWN_TIMEOUT_S)

    def _close(self) -> None:
        if self._instances is not None:
            self._instances.close()
        if self._services.capacity() is not None:
            wait_on(self._services.close(), self._loop)

    def _failed(self, attempt: str, error: BaseException) -> FinishRequest:
        if isinstance(error, asyncio.CancelledError) and attempt in self._stopped:
            return FinishRequest(Outcome(Ending.CANCELLED, "stopped by its worker"))
        if isinstance(error, SetupFailed | ServiceFailed):
            return FinishRequest(Outcome(Ending.LOST, str(error)))
        outcome = outcome_of_error(error, self._setup.server)
        if isinstance(error, MemoryError) and (memory_mb := self._setup.isolation.memory_mb) is not None:
            limit = f"the agents of its process needed more than {memory_mb} MB of memory (`memory_mb`)"
            outcome = replace(outcome, message=f"{limit}\n{outcome.message}")
        return FinishRequest(outcome)


def _listen(pipe: MessagePipe, serving: Future[Host]) -> None:
    """Receive messages in a thread, because an agent may block the event loop or take long to load."""
    try:
        while (message := pipe.receive()) is not None:
            serving.result().on_message(message)
    except Exception:  # a corrupt message: without this thread the process could not be stopped
        _log.exception("the connection to the worker failed")
    if serving.done():
        serving.result().tear_down()
    end()


def end() -> NoReturn:
    """Exit at once, because threads of agents may never return. The guardian kills all that they have started."""
    os._exit(1)


def _load(setup: HostSetup) -> tuple[CallableAgent, ClassAgent | None]:
    found = load_callable(setup.agent, setup.base)
    if not isinstance(found, type):
        return CallableAgent(found, setup.agent, setup.services), None
    instances = ClassAgent(found, setup.agent, setup.concurrency, setup.services)
    agent = CallableAgent(instances.function(), setup.agent)
    agent.services = instances.services
    return agent, instances


def main(fd: int, crash_fd: int) -> None:
    """Run a host until its worker is gone."""
    os.set_inheritable(fd, False)
    report_crashes_to(crash_fd)
    pipe = MessagePipe(socket.socket(fileno=fd))
    setup = pipe.receive()
    if not isinstance(setup, HostSetup):
        end()
    apply_limits(setup.isolation.memory_mb, threads=setup.concurrency)
    sys.path.extend(folder for folder in setup.path if folder not in sys.path)
    serving: Future[Host] = Future()
    threading.Thread(target=_listen, args=(pipe, serving), name="leyden-listen", daemon=True).start()
    propagation.install(setup.server)
    instrumentation.install()
    tracing = SpanExport(setup.server, setup.key)
    api.connect(lambda attempt, reward: pipe.send(StepReward(attempt, reward)))
    outputs = CapturedOutput()
    outputs.install()
    add_current_folder()
    try:
        agent, instances = _load(setup)
        services = ServiceRegistry.objects(setup.services, agent.services, setup.base, max_count=setup.concurrency)
    except LoadError as error:
        pipe.send(HostFailed(str(error)))
        end()
    tracing.provide()
    asyncio.run(Host(setup, pipe, agent, tracing.processor, outputs, services, instances).serve(serving))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
