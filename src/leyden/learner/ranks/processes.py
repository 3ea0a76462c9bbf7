"""Starts the ranks of a learner and calls them, all at once. If one fails, all are ended, and one error says why.

While ranks compute they wait for one another, each for a limited time: one that ends, hangs or fails is reported by
itself or by the others, never waited for without end.
"""

import asyncio
import os
import pickle
import signal
import socket
import tempfile
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

from leyden.config import ConfigError
from leyden.learner.errors import OutOfDeviceMemory, TrainingError
from leyden.learner.ranks.errors import RankLost
from leyden.learner.ranks.messages import MAX_FRAME, RankReply, World
from leyden.process.child import ChildProcess, module_command
from leyden.process.framing import read_frame, to_frame
from leyden.process.guardian import exit_reason
from leyden.process.rotating_log import RotatingLog

Channel = Literal["compute", "files"]
_GRACE_S = 3.0
"""How long the other ranks have to report when one has failed, so that the first cause is found."""
_LOOPBACK = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
"""Ranks of one machine listen on no other interface: their connections have no authentication."""


class RankProcess(ChildProcess):
    """The process of one rank."""

    def __init__(self, world: World, log: Path) -> None:
        self.rank, self.output = world.rank, RotatingLog(log)
        pairs = [socket.socketpair() for _ in range(2)]
        theirs = [pair[1] for pair in pairs]
        fds = [each.fileno() for each in theirs]
        super().__init__(
            module_command("leyden.learner.ranks.rank", *fds),
            environment={**_LOOPBACK, **os.environ},
            pass_fds=fds,
            log=self.output,
        )
        for each in theirs:
            each.close()
        self._sockets = [pair[0] for pair in pairs]
        self._channels: dict[str, tuple[StreamReader, StreamWriter]] = {}

    async def connect(self, world: World) -> None:
        """Tell it which rank of which world it is."""
        for name, ours in zip(("compute", "files"), self._sockets, strict=True):
            self._channels[name] = await asyncio.open_unix_connection(sock=ours)
        self._channels["compute"][1].write(to_frame(pickle.dumps(world)))

    async def ask(self, channel: Channel, method: str, arguments: Sequence[Any]) -> RankReply | None:
        """Call a method; None if the process has ended."""
        reader, writer = self._channels[channel]
        try:
            writer.write(to_frame(await asyncio.to_thread(pickle.dumps, (method, arguments)), MAX_FRAME))
            await writer.drain()
        except OSError:
            return None
        frame = await read_frame(reader, MAX_FRAME)
        return None if frame is None else await asyncio.to_thread(_decode, frame)

    def close(self) -> None:
        """Kill it, and close the sockets."""
        self.kill()
        for _, writer in self._channels.values():
            writer.close()


def _decode(frame: bytes) -> RankReply:
    reply = pickle.loads(frame)
    assert isinstance(reply, RankReply)
    return reply


class RankProcesses:
    """All ranks. As a context, they are started and ended."""

    def __init__(self, number: int, log: Path, timeout_s: float = 50.0) -> None:
        """`log` is a folder, for a file of each rank. Ranks wait `timeout_s` for one another."""
        self.number, self._log, self._timeout_s = number, log, timeout_s
        self._ranks: list[RankProcess] = []
        self._locks = {"compute": asyncio.Lock(), "files": asyncio.Lock()}
        self._failed: asyncio.Future[NoReturn]
        self._watching: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._failed = asyncio.get_running_loop().create_future()
        self._folder = tempfile.TemporaryDirectory(prefix="leyden-ranks-")
        meeting = str(Path(self._folder.name) / "meeting")
        worlds = [World(rank, self.number, meeting, self._timeout_s) for rank in range(self.number)]
        self._ranks = [RankProcess(world, self._log / f"rank-{world.rank}.log") for world in worlds]
        self._watching = asyncio.create_task(self._watch())
        for rank, world in zip(self._ranks, worlds, strict=True):
            await rank.connect(world)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()
        for rank in self._ranks:
            rank.close()
        await asyncio.gather(*(rank.wait() for rank in self._ranks))
        if self._failed.done():
            self._failed.exception()  # so that it does not count as unseen
        self._folder.cleanup()

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

        When one has answered, the others have a limited time, unless `patient`.
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
                await self._wait_answers(asked, patient)
            finally:
                for each in asked:
                    each.cancel()
            replies = [reply for each in asked if (reply := each.result()) is not None]
            if (error := replies[0].error) is not None:
                raise error
            return [reply.value for reply in replies]

    async def _wait_answers(self, asked: Sequence["asyncio.Task[RankReply | None]"], patient: bool) -> None:
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
            limit = _GRACE_S if failed else None if patient else self._timeout_s
        if not self._failed.done() and (pending or not _agree([each.result() for each in asked])):
            await self._fail(asked)
        if self._failed.done():
            await self.wait_failed()

    async def _watch(self) -> None:
        """Fail when a rank ends. If it is called at that moment, the call finds the cause."""
        await asyncio.wait([asyncio.ensure_future(rank.wait()) for rank in self._ranks], return_when="FIRST_COMPLETED")
        if not any(lock.locked() for lock in self._locks.values()):
            await self._fail([])

    async def _fail(self, asked: Sequence["asyncio.Task[RankReply | None]"]) -> None:
        """Find the cause, and end all ranks."""
        gone = [rank for rank, answer in zip(self._ranks, asked, strict=False) if answer.done() and not answer.result()]
        if gone:  # until their status is known
            await asyncio.wait([asyncio.ensure_future(rank.wait()) for rank in gone], timeout=_GRACE_S)
        if not self._failed.done():
            answers = [answer.result() if answer.done() else None for answer in asked] or [None] * self.number
            causes = [_cause(rank, one, self._timeout_s) for rank, one in zip(self._ranks, answers, strict=True)]
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


def _cause(rank: RankProcess, reply: RankReply | None, timeout_s: float) -> tuple[int, str]:
    """Return what is wrong with a rank, and how late it comes among causes: first what makes the others wait."""
    name = f"rank {rank.rank}"
    if reply is not None and reply.error is not None:
        return (4, f"{name} waited in vain: {reply.error}") if reply.waited else (0, f"{name} failed: {reply.error}")
    if rank.status is not None:
        line = f": {last}" if (last := rank.output.last_line()) else ""
        aborted = rank.status == -signal.SIGABRT  # as NCCL ends a process that has waited too long
        return 3 if aborted else 1, f"{name} ended ({exit_reason(rank.status)}){line} ({rank.output.path})"
    if reply is None:
        return 2, f"{name} hangs: it has not answered for {timeout_s:g} s in which the others waited for it"
    return 5, f"{name} has answered"
