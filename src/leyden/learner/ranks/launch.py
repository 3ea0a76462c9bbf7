"""Ranks that `torchrun` has started: its process 0 is the trainer, and the others become ranks of its learner.

They meet on one machine: by the store of `torchrun` they learn of a Unix socket in a folder that only their user may
open, and get the sockets of a rank through it. A rank ends with the trainer; if one ends before, so does the run, and
`torchrun --max-restarts` starts all of them again.
"""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from leyden.config import Config, ConfigError
from leyden.process.framing import read_frame_blocking, to_frame

LOOPBACK = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
"""Ranks of one machine listen on no other interface: their connections have no authentication."""
_TIMEOUT_S = 600.0
"""How long processes wait for one another, all of which `torchrun` has started at once."""


class LaunchedProcess(Struct, frozen=True):
    """One of the processes that `torchrun` has started."""

    rank: int
    size: int
    address: str
    port: int
    attempt: str = "0"
    """How often `torchrun` has started all of them again."""

    def configured(self, config: Config) -> Config:
        """Return a configuration with a training device for each process; `torchrun` starts them again, not the run."""
        if config.training.devices not in (1, self.size):
            raise ConfigError(
                f"`training.devices` is {config.training.devices}, and torchrun has started {self.size} processes: "
                "leave it out"
            )
        return replace(config, training=replace(config.training, devices=self.size, restarts=0))

    @property
    def key(self) -> str:
        """The key of the path of the socket in the store."""
        return f"leyden/{self.attempt}/socket"

    def store(self) -> Any:
        """Connect to the store of `torchrun`."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented

        return TCPStore(self.address, self.port, is_master=False, timeout=timedelta(seconds=_TIMEOUT_S))


class _Hello(Struct):
    rank: int
    pid: int


class JoinedProcess:
    """A process of `torchrun` that is a rank of this learner. Its exit status is known to `torchrun` only."""

    def __init__(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as file:
            frame = read_frame_blocking(file)
        if frame is None:
            raise ConfigError("a process of torchrun has ended before training began: its output says why")
        hello = msgspec.json.decode(frame, type=_Hello)
        self.rank, self.pid = hello.rank, hello.pid
        self._connection, self._ended = connection, Future[int]()
        self._ended.set_running_or_notify_cancel()  # so that no waiter can cancel it

    def hand_over(self, sockets: Sequence[socket.socket]) -> None:
        """Give it the sockets over which a rank is called."""
        socket.send_fds(self._connection, [b"\0"], [each.fileno() for each in sockets])
        threading.Thread(target=self._read_end, name="leyden-joined", daemon=True).start()

    def _read_end(self) -> None:
        with suppress(OSError):
            self._connection.recv(1)
        self._ended.set_result(1)

    @property
    def status(self) -> int | None:
        """A number if it has ended or was told to; None while it runs."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Return when it has ended, or was told to."""
        return await asyncio.wrap_future(self._ended)

    def kill(self) -> None:
        """Tell it to end."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


def launch_of(environment: Mapping[str, str]) -> LaunchedProcess | None:
    """Return which process of `torchrun` this is; None if it is none of several."""
    size = int(environment.get("WORLD_SIZE") or 1)
    if size == 1 or "RANK" not in environment:
        return None
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError("RANK and WORLD_SIZE are set, and not by torchrun: unset them, or start it by torchrun")
    if int(environment.get("GROUP_WORLD_SIZE") or 1) > 1:
        raise ConfigError("torchrun has started processes on several machines: start them on one, with --nnodes 1")
    return LaunchedProcess(
        rank=int(environment["RANK"]),
        size=size,
        address=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def await_ranks(launch: LaunchedProcess, folder: Path) -> dict[int, JoinedProcess]:
    """Return the other processes, by rank, when all have come; `folder` is one that only this user may open."""
    path, found = folder / "socket", dict[int, JoinedProcess]()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(launch.size)
        listener.settimeout(_TIMEOUT_S)
        launch.store().set(launch.key, str(path))
        while len(found) < launch.size - 1:
            try:
                each = JoinedProcess(listener.accept()[0])
            except TimeoutError as error:
                missing = ", ".join(str(rank) for rank in range(1, launch.size) if rank not in found)
                raise ConfigError(
                    f"of the processes that torchrun has started, rank {missing} did not come within "
                    f"{_TIMEOUT_S:.0f} s: its output says why"
                ) from error
            found[each.rank] = each
    return found


def join(launch: LaunchedProcess) -> None:
    """Be a rank of the trainer's learner, until the trainer ends."""
    from leyden.learner.ranks.rank import serve

    for each in (signal.SIGINT, signal.SIGTERM):  # the trainer finishes its step
        signal.signal(each, signal.SIG_IGN)
    path = Path(launch.store().get(launch.key).decode())
    if not path.exists() or path.stat().st_uid != os.getuid():
        raise ConfigError("process 0 of torchrun is that of another machine or user: start all of them as one user")
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    connection.sendall(to_frame(msgspec.json.encode(_Hello(launch.rank, os.getpid()))))
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
    os.environ.update({name: os.environ.get(name, value) for name, value in LOOPBACK.items()})
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    serve(*descriptors)


def _end_with(trainer: socket.socket) -> None:
    with suppress(OSError):
        trainer.recv(1)
    os._exit(0)  # whether the run has failed is the trainer's to say
