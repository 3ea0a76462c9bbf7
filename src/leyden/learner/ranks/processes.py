"""Starts the ranks of a learner and calls them, all at once. If one fails, all are ended, and one error says why.

While ranks compute they wait for one another, each for a limited time: one that ends, hangs or fails is reported by
itself or by the others, never waited for without end.
"""

import asyncio
import os
import pickle
import signal
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, Self

from torch._C._distributed_c10d import TCPStore

from leyden.config import ConfigError
from leyden.learner.errors import OutOfDeviceMemory, RankLost, TrainingError
from leyden.learner.ranks.launch import LOOPBACK, JoinedProcess, LaunchedProcess, await_ranks
from leyden.learner.ranks.messages import FILES_TIMEOUT_S, MAX_FRAME, RankReply, World
from leyden.process.child import ChildProcess, module_command
from leyden.process.framing import read_frame, to_frame
from leyden.process.guardian import exit_reason
from leyden.process.place import HERE, Place, RemotePlace
from leyden.process.rotating_log import RotatingLog
from leyden.process.temporary import TemporaryFolder

Channel = Literal["compute", "files"]
_THREADS = 4
_LOCAL_ADDRESS = "127.0.0.1"
_GRACE_S = 3.0
"""How long the other ranks have to report when one has failed, so that the first cause is found."""


class RankProcess:
    """The process of one rank: a child, or one that a launcher has started."""

    def __init__(
        self,
        world: World,
        log: Path,
        threads: ThreadPoolExecutor,
        joined: JoinedProcess | None = None,
        place: Place = HERE,
    ) -> None:
        """`threads` encode and decode what is sent."""
        self.rank, self.output, self._threads = world.rank, RotatingLog(log), threads
        pairs = [socket.socketpair() for _ in range(2)]
        theirs = [pair[1] for pair in pairs]
        fds = [each.fileno() for each in theirs]
        self._process: ChildProcess | JoinedProcess
        if joined is not None:
            self._process = joined
            joined.hand_over(theirs)
        else:
            self._process = ChildProcess(
                module_command("leyden.learner.ranks.rank", *fds),
                environment={**dict.fromkeys(LOOPBACK, place.interface), **os.environ},
                pass_fds=fds,
                log=self.output,
                place=place,
            )
        self.pid, self.kill, self.wait = self._process.pid, self._process.kill, self._process.wait
        for each in theirs:
            each.close()
        self._sockets = [pair[0] for pair in pairs]
        self._channels: dict[str, tuple[StreamReader, StreamWriter]] = {}

    @property
    def aborted(self) -> bool:
        """Whether it has ended itself, as NCCL does that has waited too long."""
        return self._process.status == -signal.SIGABRT

    @property
    def end_reason(self) -> str | None:
        """How it has ended; None while it runs."""
        if (status := self._process.status) is None:
            return None
        if isinstance(self._process, JoinedProcess):
            return f"ended (process {self.pid}: torchrun says how)"
        line = f": {last}" if (last := self.output.last_line()) else ""
        return f"ended ({exit_reason(status)}){line} ({self.output.path})"

    async def connect(self, world: World) -> None:
        """Tell it which rank of which world it is."""
        for name, ours in zip(("compute", "files"), self._sockets, strict=True):
            self._channels[name] = await asyncio.open_unix_connection(sock=ours)
        self._channels["compute"][1].write(to_frame(pickle.dumps(world)))

    async def ask(self, channel: Channel, method: str, arguments: Sequence[Any]) -> RankReply | None:
        """Call a method; None if the process has ended."""
        (reader, writer), loop = self._channels[channel], asyncio.get_running_loop()
        try:
            request = await loop.run_in_executor(self._threads, pickle.dumps, (method, arguments))
            writer.write(to_frame(request, MAX_FRAME))
            await writer.drain()
        except OSError:
            return None
        frame = await read_frame(reader, MAX_FRAME)
        return None if frame is None else await loop.run_in_executor(self._threads, _decode, frame)

    def close(self) -> None:
        """Kill it, and close the sockets."""
        self.kill()
        for _, writer in self._channels.values():
            writer.close()
        for each in self._sockets[len(self._channels) :]:
            each.close()


def _decode(frame: bytes) -> RankReply:
    reply = pickle.loads(frame)
    assert isinstance(reply, RankReply)
    return reply


class RankPlaces(Protocol):
    """Where ranks run if not on this machine. Each sees only its own GPU there."""

    @property
    def address(self) -> str:
        """The address of this machine that they reach."""

    async def find(self) -> list[Place]:
        """Return the place of each rank."""


def _open_store(address: str) -> TCPStore:
    """Open the store by which ranks find each other. Left to itself, torch listens at every address."""
    listening = socket.create_server((address, 0))
    port = listening.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


class RankProcesses:
    """All ranks. As a context, they are started and ended."""

    def __init__(
        self,
        number: int,
        log: Path,
        timeout_s: float = 50.0,
        launch: LaunchedProcess | None = None,
        elsewhere: RankPlaces | None = None,
    ) -> None:
        """`log` is a folder, for a file of each rank. Ranks wait `timeout_s` for one another.

        If `torchrun` has started this process (`launch`), its other processes become all ranks but the first. Ranks run
        on this machine, or `elsewhere`.
        """
        self.number, self._log, self._timeout_s, self._launch = number, log, timeout_s, launch
        self._elsewhere = elsewhere
        self._ranks: list[RankProcess] = []
        self._store: TCPStore | None = None
        # not those of the loop, all of which may wait for weights
        self._threads = ThreadPoolExecutor(_THREADS, "ranks")
        self._locks = {"compute": asyncio.Lock(), "files": asyncio.Lock()}
        self._failed: asyncio.Future[NoReturn]
        self._opened: AsyncExitStack

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            await self._open(opened)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def _open(self, opened: AsyncExitStack) -> None:
        """Start all ranks; `opened` ends those that were started if the others cannot be."""
        self._failed = asyncio.get_running_loop().create_future()
        opened.callback(self._threads.shutdown, wait=False)
        temporary = TemporaryFolder("ranks")
        opened.callback(temporary.close)
        folder = temporary.path
        opened.push_async_callback(self._end)
        joined = {} if self._launch is None else await asyncio.to_thread(await_ranks, self._launch, folder)
        for process in joined.values():
            opened.callback(process.kill)
        meeting, places = str(folder / "meeting"), list[Place]([HERE] * self.number)
        if self._elsewhere is not None:
            places = await self._elsewhere.find()
            self._store = _open_store(self._elsewhere.address)
            meeting = f"{self._elsewhere.address}:{self._store.port}"
        worlds = [
            World(rank, self.number, meeting, self._timeout_s, self._address(place), rank if place.is_here else 0)
            for rank, place in enumerate(places)
        ]
        for world, place in zip(worlds, places, strict=True):
            log = self._log / f"rank-{world.rank}.log"
            self._ranks.append(RankProcess(world, log, self._threads, joined.get(world.rank), place))
        opened.callback(asyncio.create_task(self._watch()).cancel)
        for rank, world in zip(self._ranks, worlds, strict=True):
            await rank.connect(world)

    def _address(self, place: Place) -> str:
        if isinstance(place, RemotePlace):
            return place.address
        return _LOCAL_ADDRESS if self._elsewhere is None else self._elsewhere.address

    async def _end(self) -> None:
        for rank in self._ranks:
            rank.close()
        await asyncio.gather(*(rank.wait() for rank in self._ranks))
        if self._failed.done():
            self._failed.exception()  # so that it does not count as unseen
        self._store = None

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks, in their order."""
        return [rank.pid for rank in self._ranks]

    async def wait_failed(self) -> NoReturn:
        """Wait until a rank is lost, and raise the reason."""
        await asyncio.shield(self._failed)
        raise AssertionError("it ends only with an error")

    async def call(
        self,
        method: str,
        *arguments: Any,
        by_rank: Sequence[Any] | None = None,
        channel: Channel = "compute",
        patient: bool = False,
    ) -> list[Any]:
        """Call a method of every rank; an argument may differ by rank. Returns what each returned.

        When one has answered, the others have a limited time, and more if they are to be `patient` with files.
        Raises `RankLost`, or what all ranks raised. To cancel it does not end the call.
        """
        last = [()] * self.number if by_rank is None else [(one,) for one in by_rank]
        calling = asyncio.create_task(self._call(method, [(*arguments, *one) for one in last], channel, patient))
        calling.add_done_callback(_see)
        return await asyncio.shield(calling)

    async def _call(self, method: str, arguments: Sequence[Any], channel: Channel, patient: bool) -> list[Any]:
        async with self._locks[channel]:
            if self._failed.done():
                await self.wait_failed()
            pairs = zip(self._ranks, arguments, strict=True)
            asked = [asyncio.create_task(rank.ask(channel, method, one)) for rank, one in pairs]
            try:
                await self._wait_answers(asked, FILES_TIMEOUT_S if patient else self._timeout_s)
            finally:
                for each in asked:
                    each.cancel()
            replies = [reply for each in asked if (reply := each.result()) is not None]
            if (error := replies[0].error) is not None:
                raise error
            return [reply.value for reply in replies]

    async def _wait_answers(self, asked: Sequence["asyncio.Task[RankReply | None]"], patience_s: float) -> None:
        """Wait until every rank has answered, and all with a value or all with an error of their own."""
        pending: set[asyncio.Future[Any]] = {*asked}
        limit = None
        while pending and not self._failed.done():
            done, _ = await asyncio.wait({*pending, self._failed}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            pending -= done
            replies = [each.result() for each in asked if each.done()]
            failed = any(reply is None or reply.error is not None for reply in replies)
            limit = _GRACE_S if failed else patience_s
        if not self._failed.done() and (pending or not _agree([each.result() for each in asked])):
            await self._fail(asked, patience_s)
        if self._failed.done():
            await self.wait_failed()

    async def _watch(self) -> None:
        """Fail when a rank ends. If it is called at that moment, the call finds the cause."""
        await asyncio.wait([asyncio.ensure_future(rank.wait()) for rank in self._ranks], return_when="FIRST_COMPLETED")
        if not any(lock.locked() for lock in self._locks.values()):
            await self._fail()

    async def _fail(self, asked: Sequence["asyncio.Task[RankReply | None]"] = (), patience_s: float = 0.0) -> None:
        """Find the cause, and end all ranks."""
        gone = [rank for rank, answer in zip(self._ranks, asked, strict=False) if answer.done() and not answer.result()]
        if gone:  # until their status is known
            await asyncio.wait([asyncio.ensure_future(rank.wait()) for rank in gone], timeout=_GRACE_S)
        if not self._failed.done():
            answers = [answer.result() if answer.done() else None for answer in asked] or [None] * self.number
            causes = [_cause(rank, one, patience_s) for rank, one in zip(self._ranks, answers, strict=True)]
            self._failed.set_exception(RankLost(f"of {self.number} training processes, {min(causes)[1]}"))
        for rank in self._ranks:
            rank.kill()


def _see(task: "asyncio.Task[Any]") -> None:
    """Let the error of a call that nobody awaits any more count as seen."""
    if not task.cancelled():
        task.exception()


def _agree(replies: Sequence[RankReply | None]) -> bool:
    """Whether all ranks returned, or all raised what is no fault of theirs."""
    errors = [None if reply is None or reply.waited else reply.error for reply in replies]
    if not any(errors):
        return all(reply is not None and reply.error is None for reply in replies)
    return all(isinstance(error, TrainingError | ConfigError | OSError) for error in errors) and not any(
        isinstance(error, OutOfDeviceMemory) for error in errors
    )


def _cause(rank: RankProcess, reply: RankReply | None, patience_s: float) -> tuple[int, str]:
    """Return what is wrong with a rank, and how late it comes among causes: first what makes the others wait."""
    name = f"rank {rank.rank}"
    if reply is not None and reply.error is not None:
        return (4, f"{name} waited in vain: {reply.error}") if reply.waited else (0, f"{name} failed: {reply.error}")
    if (reason := rank.end_reason) is not None:
        return 3 if rank.aborted else 1, f"{name} {reason}"
    if reply is None:
        return 2, f"{name} hangs: it has not answered for {patience_s:g} s in which the others waited for it"
    return 5, f"{name} has answered"
