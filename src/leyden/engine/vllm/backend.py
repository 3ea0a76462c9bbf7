"""Runs vLLM for a training process and keeps it at the trainer's published weights.

All weights, or the LoRA adapter beside weights that stay, are sent and their checksums compared at the start, after
every update and after every restart.
"""

import asyncio
import shutil
import tempfile
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

from msgspec.structs import replace

from leyden.engine.protocol import EngineError, LoraWeights, ModelWeights, Publication, VllmAddress
from leyden.engine.remote import wait_end
from leyden.engine.vllm.launch import VllmOptions, write_tokenizer
from leyden.engine.vllm.nccl import NcclTransfer
from leyden.engine.vllm.process import RunningVllm, VllmProcess
from leyden.engine.vllm.publisher import AdapterTransfer, FileTransfer, IpcTransfer, Transfer, VllmPublisher
from leyden.engine.weight_files import NamedTensors, WeightFiles

Weights = Callable[[], NamedTensors]
Adapter = Callable[[], LoraWeights | None]
VllmServer = VllmProcess | RunningVllm


class VllmBackend:
    """A vLLM server with the weights of a trainer in this process."""

    shares_parameters = False

    def __init__(
        self,
        options: VllmOptions,
        log: Path,
        weights: Weights,
        *,
        adapter: Adapter | None = None,
        context_length: int,
        vocab_size: int,
        concurrency: int,
        tokenizer: str | None = None,
        version: int = 0,
        seeded: bool = False,
        url: str | None = None,
        sleeps_while_training: bool = False,
        files: WeightFiles,
    ) -> None:
        """`weights` are those of `version`, by their Hugging Face names.

        With an `adapter` they are the weights of the model's folder, and `adapter` returns what belongs to `version`:
        only the adapter is sent.

        Grammars follow `tokenizer`, a tokenizer.json in which every added token is special; the model's tokenizer if it
        is None. With a `url` the server that runs there is used, and `options` only say how weights are transferred.
        Replicas share their `files`.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="leyden-weights-"))
        self._weights, self._adapter, self._version = weights, adapter, version
        self._files = files
        self.sleeps_while_training = sleeps_while_training
        """Whether the trainer must call `sleep` before it computes."""
        self._lock = asyncio.Lock()
        self._awake = asyncio.Event()
        self._awake.set()
        self._published = asyncio.Event()
        """Whether the trainer's parameters are those that were published last."""
        self._published.set()
        self._restart_waits = False
        """Whether a restarted vLLM waits for the publication."""
        if tokenizer is not None:
            folder = write_tokenizer(tokenizer, options.model, self._folder / "tokenizer")
            options = replace(options, tokenizer=folder)
        self._options = replace(options, max_model_len=context_length)
        self._server: VllmServer = (
            VllmProcess(self._options, log, self._restarted, self._awake.wait)
            if url is None
            else RunningVllm(url.removeprefix("unix:"))
        )
        self._address = VllmAddress(
            self._server.location,
            context_length,
            vocab_size,
            concurrency,
            version=version,
            seeded=seeded,
            adapter=adapter is not None,
        )
        self._publisher = self._new_publisher()

    @property
    def address(self) -> VllmAddress:
        """How a server process reaches it, with the version of the weights that it has or gets next."""
        return replace(self._address, version=self._version)

    @property
    def is_down(self) -> bool:
        """Whether vLLM is being restarted."""
        return self._server.is_down

    async def start(self) -> None:
        """Start vLLM with the trainer's weights. Raises `EngineError` with the reason if that fails."""
        await self._server.start()
        await self._deliver_or_recover()

    async def wait_failed(self) -> NoReturn:
        """Wait until vLLM has failed and is not restarted, and raise `EngineError` with the reason."""
        await self._server.wait_failed()

    async def stop(self) -> None:
        """Stop vLLM and delete temporary files."""
        await self._server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Wait until the server process is gone; it connects to vLLM directly."""
        await wait_end(reader, writer)

    async def sleep(self) -> None:
        """Free vLLM's memory until the next publication; if it crashes meanwhile, it is restarted only then."""
        while self._awake.is_set():
            try:
                async with self._lock:
                    await self._publisher.sleep(keep_weights=self._adapter is not None)
                    self._awake.clear()
            except EngineError:
                if not await self._server.recovered():
                    raise

    @asynccontextmanager
    async def changing_weights(self, version: int) -> AsyncIterator[None]:
        """Let the trainer write its parameters. A vLLM that is restarted from now on waits for their publication."""
        async with self._lock:
            self._published.clear()
            yield

    async def publish(self, weights: ModelWeights, version: int) -> Publication:
        """Send weights to vLLM. The server must hold its calls meanwhile."""
        started = time.monotonic()
        async with self._lock:
            self._version = version
            if self._adapter is None:
                self._weights = weights.tensors
            else:
                self._adapter = weights.adapter
            delivered_by_restart = self._restart_waits
            self._published.set()
        if delivered_by_restart and await self._server.recovered():
            sent = 0
        else:
            sent = await self._deliver_or_recover()
        return Publication(time.monotonic() - started, sent)

    async def _deliver_or_recover(self) -> int:
        """Send the latest weights; return the bytes sent. If vLLM crashes meanwhile, its restart sends them instead."""
        try:
            return await self._deliver()
        except EngineError:
            if not await self._server.recovered():
                raise
            return 0

    async def _deliver(self) -> int:
        """Send the latest weights to vLLM; return their size in bytes."""
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

    async def _send(self) -> int:
        adapter = await asyncio.to_thread(self._adapter) if self._adapter is not None else None
        if adapter is None:
            return await self._publisher.send(self._weights, self._version)
        return await self._publisher.send_adapter(adapter, self._weights, self._version)

    async def _restarted(self) -> None:
        self._restart_waits = True
        await self._published.wait()  # vLLM is paused until it has weights
        self._restart_waits = False
        self._publisher = self._new_publisher()
        await self._deliver()

    def _new_publisher(self) -> VllmPublisher:
        transfer: Transfer = FileTransfer(self._files)
        if self._options.transfer != "files":
            transfer = IpcTransfer() if self._options.transfer == "ipc" else NcclTransfer()
        return VllmPublisher(self._server.location, transfer, AdapterTransfer(self._folder))
