"""An embedded engine in a process of its own, which reads the weights that are written and is started again if it dies.

It listens on a Unix socket in a folder that only this user can enter. A process that is started again loads the latest
weights before it listens. It may run on another machine, to which the files of the weights are sent.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE

import msgspec
from msgspec.structs import replace

from leyden.background import start_background
from leyden.engine.protocol import EngineError, EngineLost, ModelWeights, Publication, SocketAddress
from leyden.engine.remote import SeparateEngine
from leyden.engine.torch.shared_weights import SharedWeights
from leyden.engine.torch.wire import EngineProcessOptions, EngineState, LoadWeights
from leyden.engine.weight_files import WeightFiles, Weights, WrittenWeights, compare
from leyden.process.child import ChildProcess, module_command
from leyden.process.guardian import exit_reason
from leyden.process.place import HERE, FindPlace, Place, PlaceLost, this_machine
from leyden.process.rotating_log import RotatingLog
from leyden.process.supervised import SupervisedProcess
from leyden.process.temporary import TemporaryFolder

log = logging.getLogger(__name__)

_MAX_DEATHS, _DEATHS_WITHIN_S = 5, 60.0
"""A process that dies this often within this time of service is not started again. Starting is no service."""


class TorchProcess(SeparateEngine, SupervisedProcess):
    """One engine process with the weights that were published last."""

    def __init__(
        self,
        options: EngineProcessOptions,
        environment: Mapping[str, str],
        written: WeightFiles | SharedWeights,
        log_file: Path,
        weights: Weights,
        version: int,
        find_place: FindPlace = this_machine,
    ) -> None:
        """`weights` are those of `version`; `environment` is added to that of this process."""
        super().__init__("an engine process", _MAX_DEATHS, _DEATHS_WITHIN_S, EngineError)
        self._folder = TemporaryFolder("engine")
        self._socket = self._folder.path / "engine.sock"
        self._options, self._find_place = options, find_place
        self._place: Place = HERE
        self._environment, self._written, self._log = environment, written, RotatingLog(log_file)
        self._weights, self._version = weights, version
        self._served_s = 0.0
        self._changing = asyncio.Lock()
        """Held while it is started or loads weights."""
        self._up = asyncio.Event()
        self._process: ChildProcess | None = None
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None
        self._address: SocketAddress

    @property
    def address(self) -> SocketAddress:
        """Where it listens."""
        return self._address

    @property
    def is_down(self) -> bool:
        """Whether it is being started again."""
        return not self._up.is_set()

    @property
    def pid(self) -> int | None:
        """The id of the process."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start it with the trainer's weights. Raises `EngineError` with the reason if that fails."""
        await self._written.write(self._weights, self._version)
        await self._launch()
        self._start_supervising()

    async def publish(self, weights: ModelWeights, version: int) -> Publication:
        """Have the engine load the weights between two steps. If it is dead or dies, its next start loads them."""
        started = time.monotonic()
        await self._written.write(weights.tensors, version)
        async with self._changing, self._written.reading() as latest:  # newer than `version` if this had to wait
            if self._up.is_set() and self._version != latest.version:
                await self._load(latest)
        await self._up.wait()
        return Publication(time.monotonic() - started, latest.nbytes)

    async def _load(self, weights: WrittenWeights) -> None:
        """Have the process load weights. One that cannot get them is ended, so that it does not serve older ones."""
        assert self._process is not None
        try:
            await self._order(weights)
        except EngineLost as error:
            log.error("%s", error)
            self._up.clear()
            self._process.kill()

    async def _wait_ended(self) -> str:
        assert self._process is not None
        began = time.monotonic()
        status = await self._process.wait()
        self._served_s += time.monotonic() - began
        self._up.clear()
        reason = f"{self._name} ended ({exit_reason(status)}): {self._last_line()}"
        log.error("%s; it is started again", reason)
        return reason

    async def _restart(self, reason: str) -> str | None:
        try:
            await self._launch()
        except EngineLost as error:
            log.error("%s", error)
            return str(error)
        return None

    def _clock(self) -> float:
        return self._served_s

    async def _end(self) -> None:
        if self._process is not None:
            await self._process.end()
        self._folder.close()

    async def _launch(self) -> None:
        """Start the process with the latest weights, and wait until it listens."""
        async with self._changing:
            self._place = await self._find_place()
            options = replace(self._options, socket=self._place.path(self._socket))
            self._process = ChildProcess(
                module_command("leyden.engine.torch"),
                environment={**os.environ, **self._environment},
                stdout=PIPE,
                log=self._log,
                place=self._place,
                listens=[self._socket],
            )
            self._answers = asyncio.Queue()
            reading = _read_lines(self._process, self._answers)
            self._reading = start_background(reading, "reading the answers of an engine process")
            self._process.send(msgspec.json.encode(options) + b"\n")
            try:
                await self._answer()  # only now does it read weights, which others may wait to write
                async with self._written.reading() as weights:
                    state = await self._order(weights)
            except EngineLost:
                self._process.kill()
                raise
            self._address = SocketAddress(state.context_length, state.vocab_size, options.slots, str(self._socket))
            self._up.set()

    async def _deliver(self, weights: WrittenWeights) -> str:
        """Return the folder of weights on the process's machine. Raises `EngineLost` if that is lost."""
        try:
            return await self._place.deliver(weights.folder, "weights")
        except PlaceLost as error:
            raise EngineLost(str(error)) from error

    async def _answer(self) -> bytes:
        """Wait for an answer of the process."""
        if not (answer := await self._answers.get()):
            raise EngineLost(f"{self._name} did not load its weights: {self._last_line()}")
        return answer

    async def _order(self, weights: WrittenWeights) -> EngineState:
        """Have the process load weights, and compare them."""
        assert self._process is not None
        order = LoadWeights(await self._deliver(weights), weights.version)
        self._process.send(msgspec.json.encode(order) + b"\n")
        state = msgspec.json.decode(await self._answer(), type=EngineState)
        compare(weights.checksums, state.checksums, "after publishing")
        self._version = weights.version
        return state

    def _last_line(self) -> str:
        return f"{self._log.last_line() or 'it wrote nothing'} ({self._log.path})"


async def _read_lines(process: ChildProcess, lines: asyncio.Queue[bytes]) -> None:
    """Put each line that a process prints into a queue, and an empty one when there are no more."""
    rest = b""

    def split(data: bytes) -> None:
        nonlocal rest
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            lines.put_nowait(line)

    await process.read_output(split)
    lines.put_nowait(b"")
