"""Runs the vLLM server of a training process: it has the latest weights at its start and after every restart."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from msgspec import Struct
from msgspec.structs import replace

from leyden.engine.broadcast import NcclGroups
from leyden.engine.protocol import EngineError, VllmAddress
from leyden.engine.remote import SeparateEngine
from leyden.engine.vllm.launch import VllmOptions, write_tokenizer
from leyden.engine.vllm.nccl import NcclTransfer
from leyden.engine.vllm.process import RunningVllm, VllmProcess
from leyden.engine.vllm.publisher import AdapterTransfer, FileTransfer, IpcTransfer, Transfer, VllmPublisher
from leyden.engine.weight_files import WeightFiles
from leyden.process.place import FindPlace, this_machine
from leyden.process.temporary import TemporaryFolder


class ServingOptions(Struct, frozen=True, kw_only=True):
    """What a vLLM server is to serve, and how."""

    context_length: int
    vocab_size: int
    concurrency: int
    """Requests at once."""
    tokenizer: str | None = None
    """A tokenizer.json that grammars follow, in which every added token is special; None: the model's."""
    seeded: bool = False
    """Whether requests are sampled with their seeds."""
    url: str | None = None
    """The server that runs there is used; options then only say how weights are transferred."""
    sleeps_while_training: bool = False
    """Whether the trainer must call `sleep` before it computes."""
    find_place: FindPlace = this_machine
    """Finds where it is started."""


class ServedVllm(SeparateEngine, ABC):
    """A vLLM server with weights of a trainer in this process; a subclass says which."""

    _keeps_weights = False
    """Whether the weights are kept while it sleeps, because only what is beside them is sent."""

    def __init__(self, options: VllmOptions, log: Path, serving: ServingOptions, files: WeightFiles) -> None:
        """Replicas share their `files`."""
        self._temporary = TemporaryFolder("adapters")
        self._folder = self._temporary.path
        self._files, self._groups = files, NcclGroups()
        self.sleeps_while_training = serving.sleeps_while_training
        self._lock = asyncio.Lock()
        self._awake = asyncio.Event()
        self._awake.set()
        if serving.tokenizer is not None:
            folder = write_tokenizer(serving.tokenizer, options.model, self._folder / "tokenizer")
            options = replace(options, tokenizer=folder)
        self._options = replace(options, max_model_len=serving.context_length)
        self._server: VllmProcess | RunningVllm = (
            VllmProcess(self._options, log, self._restarted, self._awake.wait, serving.find_place)
            if serving.url is None
            else RunningVllm(serving.url.removeprefix("unix:"))
        )
        self._address = VllmAddress(
            self._server.location,
            serving.context_length,
            serving.vocab_size,
            serving.concurrency,
            seeded=serving.seeded,
        )
        self._publisher = self._new_publisher()

    @property
    def is_down(self) -> bool:
        """Whether vLLM is being restarted."""
        return self._server.is_down

    async def start(self) -> None:
        """Start vLLM with the trainer's weights. Raises `EngineError` with the reason if that fails."""
        await self._server.start()
        await self._or_recover(self._deliver)

    async def wait_failed(self) -> NoReturn:
        """Wait until vLLM has failed and is not restarted, and raise `EngineError` with the reason."""
        await self._server.wait_failed()

    async def stop(self) -> None:
        """Stop vLLM and delete temporary files."""
        await self._server.stop()
        self._temporary.close()

    async def sleep(self) -> None:
        """Free vLLM's memory until the next publication; if it crashes meanwhile, it is restarted only then."""
        while self._awake.is_set():
            try:
                async with self._lock:
                    await self._publisher.sleep(self._keeps_weights)
                    self._awake.clear()
            except EngineError:
                if not await self._server.recovered():
                    raise

    @abstractmethod
    async def _send(self) -> int:
        """Send the latest weights to a paused vLLM; return their size in bytes."""

    async def _or_recover(self, send: Callable[[], Awaitable[int]]) -> int:
        """Send weights; return the bytes sent. If vLLM crashes meanwhile, its restart sends the latest ones instead."""
        try:
            return await send()
        except EngineError:
            if not await self._server.recovered():
                raise
            return 0

    async def _deliver(self) -> int:
        """Send the latest weights to vLLM, which starts no request meanwhile; return their size in bytes."""
        async with self._lock:
            asleep = not self._awake.is_set()
            self._awake.set()
            if asleep:
                await self._publisher.wake("weights")
                sent = await self._send()
                await self._publisher.wake("kv_cache")
            else:
                await self._publisher.pause()
                sent = await self._send()
                await self._publisher.resume()
            return sent

    async def _restarted(self) -> None:
        self._publisher = self._new_publisher()
        await self._deliver()

    def _new_publisher(self) -> VllmPublisher:
        transfer: Transfer = FileTransfer(self._files, self._server.deliver)
        if self._options.transfer != "files":
            transfer = (
                IpcTransfer() if self._options.transfer == "ipc" else NcclTransfer(self._server.location, self._groups)
            )
        return VllmPublisher(self._server.location, transfer, AdapterTransfer(self._folder, self._server.deliver))
