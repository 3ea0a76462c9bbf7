"""A process that runs agents: `python -m leyden.client.host FD`, started by a worker over the socket that is FD.

It runs sync agents in threads and async ones on its event loop, many at once. It has no key but its pool's, and it
ends, with every process that its agents started, as soon as the worker is gone.
"""

import asyncio
import inspect
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

from msgspec import Raw

from leyden.client import identity
from leyden.client.agents import Agent, Invocation
from leyden.client.failures import read_failure
from leyden.client.loading import LoadError, load
from leyden.client.messages import Ended, Pipe, Ready, Setup, Start, Stop, ToHost, Unready
from leyden.client.results import NotAReward, TwoRewards, read_returned, read_reward, to_json
from leyden.outcomes import Ending, Outcome


class Host:
    """Runs the attempts that its worker names."""

    def __init__(self, setup: Setup, pipe: Pipe, agent: Agent) -> None:
        self._setup, self._pipe, self._agent = setup, pipe, agent
        self._threads = ThreadPoolExecutor(setup.places, thread_name_prefix="agent")
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopped: set[str] = set()

    async def serve(self, serving: "Future[Host]") -> None:
        """Say that all is ready, and work until the worker is gone."""
        self._loop = asyncio.get_running_loop()
        serving.set_result(self)
        self._pipe.send(Ready())
        await self._loop.create_future()

    def hear(self, message: ToHost) -> None:
        """Do as the worker says; called from the thread that listens to it."""
        if isinstance(message, Stop):
            self._loop.call_soon_threadsafe(self._stop, message.attempt)
        elif self._agent.is_async:
            self._loop.call_soon_threadsafe(self._start_task, message)
        else:
            self._start_thread(message)

    def _start_task(self, start: Start) -> None:
        context = identity.context_of(start.attempt, start.traceparent)
        task = self._loop.create_task(self._run_task(start), name=start.attempt, context=context)
        self._tasks[start.attempt] = task

    async def _run_task(self, start: Start) -> None:
        try:
            ended = self._read(start.attempt, await self._bind(start)())
        except BaseException as error:  # an agent that calls sys.exit, too, ends only its own attempt
            ended = self._failed(start.attempt, error)
        del self._tasks[start.attempt]
        self._stopped.discard(start.attempt)
        self._pipe.send(ended)

    def _start_thread(self, start: Start) -> None:
        context = identity.context_of(start.attempt, start.traceparent)
        self._threads.submit(context.run, self._run_thread, start)

    def _run_thread(self, start: Start) -> None:
        try:
            value = self._bind(start)()
            if inspect.isawaitable(value):  # a plain function that gives a coroutine
                value = asyncio.run_coroutine_threadsafe(_wait_for(value), self._loop).result()
            ended = self._read(start.attempt, value)
        except BaseException as error:
            ended = self._failed(start.attempt, error)
        self._pipe.send(ended)

    def _bind(self, start: Start) -> Callable[[], Any]:
        base_url = f"{self._setup.server}/v1"
        about = Invocation(start.attempt, start.rollout, base_url, self._setup.key, start.traceparent)
        return self._agent.bind(start.task, about)

    def _stop(self, attempt: str) -> None:
        """A task is cancelled; a thread cannot be: its attempt is over, and with it what its key is good for."""
        task = self._tasks.get(attempt)
        if task is not None:
            self._stopped.add(attempt)
            task.cancel()

    def _read(self, attempt: str, value: Any) -> Ended:
        try:
            result, reward = read_returned(value, self._setup.scored)
        except TwoRewards as error:
            return Ended(attempt, Outcome(Ending.AGENT_ERROR, str(error)))
        written = Raw(to_json(result))
        try:
            number = None if reward is None else read_reward(reward, "the agent")
        except NotAReward as error:
            return Ended(attempt, Outcome(Ending.NO_REWARD, str(error)), written)
        return Ended(attempt, Outcome(Ending.SUCCEEDED), written, number)

    def _failed(self, attempt: str, error: BaseException) -> Ended:
        if isinstance(error, asyncio.CancelledError) and attempt in self._stopped:
            return Ended(attempt, Outcome(Ending.CANCELLED, "stopped by its worker"))
        return Ended(attempt, read_failure(error, self._setup.server))


async def _wait_for(value: Any) -> Any:
    return await value


def _listen(pipe: Pipe, serving: Future[Host]) -> None:
    """Hear the worker in a thread of its own: an agent may take long to load or block the event loop, never this."""
    while (message := pipe.receive(ToHost)) is not None:  # type: ignore[arg-type]
        serving.result().hear(message)
    end()


def end() -> NoReturn:
    """End at once: threads of agents may never return, and what they started must not stay behind."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main(fd: int) -> None:
    """Be a host."""
    os.set_inheritable(fd, False)
    pipe = Pipe(socket.socket(fileno=fd))
    setup = pipe.receive(Setup)
    if setup is None:
        end()
    sys.path.extend(folder for folder in setup.path if folder not in sys.path)
    serving: Future[Host] = Future()
    threading.Thread(target=_listen, args=(pipe, serving), name="leyden-listen", daemon=True).start()
    identity.install()
    try:
        agent = Agent(load(setup.agent, setup.base), setup.agent)
    except LoadError as error:
        pipe.send(Unready(str(error)))
        end()
    asyncio.run(Host(setup, pipe, agent).serve(serving))


if __name__ == "__main__":
    main(int(sys.argv[1]))
