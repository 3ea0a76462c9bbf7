"""A child process that answers requests one after another, for work that must not occupy this process.

Requests and answers are frames on a socket. A child that ends or takes too long is killed, and another is started.
"""

import asyncio
import os
import socket
import weakref
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from subprocess import DEVNULL

from leyden.process.child import ChildProcess, module_command
from leyden.process.framing import FrameTooLarge, read_frame, read_frame_blocking, to_frame

_SETUP_TIMEOUT_S = 60.0
"""How long a process may take to start and answer its set-up, on a busy machine too."""


class AnsweringProcess(ChildProcess):
    """One child. It is killed by `close`, when it is no longer referenced, and when this process exits."""

    def __init__(self, module: str, setup: bytes = b"") -> None:
        """Start a module that calls `answer_requests`, and send `setup` as the first request. Raises `OSError`."""
        self._socket, theirs = socket.socketpair()
        with theirs:  # a library that fails prints a backtrace
            command = module_command(module, theirs.fileno())
            super().__init__(command, pass_fds=[theirs.fileno()], stdout=DEVNULL, stderr=DEVNULL)
        self._setup = setup
        self._streams: tuple[StreamReader, StreamWriter] | None = None
        weakref.finalize(self, self.process.kill)

    async def ask(self, request: bytes, timeout_s: float) -> bytes | None:
        """Return the answer; None if it ends, or has not answered after `timeout_s` that begin when it is set up.

        Then, and when this is cancelled, it is closed.
        """
        answer = None
        try:
            if self._streams is None:
                self._streams = await asyncio.open_unix_connection(sock=self._socket)
                async with asyncio.timeout(_SETUP_TIMEOUT_S):
                    await self._exchange(self._streams, self._setup)
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(self._streams, request)
        except (OSError, FrameTooLarge):  # also a time-out
            pass
        finally:
            if answer is None:
                self.close()
        return answer

    def close(self) -> None:
        """Kill it."""
        self.kill()
        (self._socket if self._streams is None else self._streams[1]).close()
        self.process.wait()

    async def _exchange(self, streams: tuple[StreamReader, StreamWriter], request: bytes) -> bytes | None:
        reader, writer = streams
        writer.write(to_frame(request))
        await writer.drain()
        return await read_frame(reader)


def answer_requests(fd: int, answer: Callable[[bytes], bytes]) -> None:
    """Answer the requests of the parent until it closes the socket. Other processes come first on a busy machine."""
    os.set_inheritable(fd, False)
    os.nice(10)
    end = socket.socket(fileno=fd)
    file = end.makefile("rb")
    while (request := read_frame_blocking(file)) is not None:
        end.sendall(to_frame(answer(request)))
