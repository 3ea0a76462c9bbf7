"""The embedded engine: continuous batching of a Hugging Face causal model over a fixed number of KV cache slots.

One thread computes the steps of a `ContinuousBatch`. Between two steps requests join and leave and weights change.
The thread sleeps while there is nothing to do.
"""

import asyncio
import logging
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import NoReturn

import torch
from transformers import PreTrainedModel

from leyden.engine.grammar import GrammarCompiler, GrammarError, GrammarMatcher
from leyden.engine.protocol import (
    EngineError,
    EngineLost,
    EngineRequest,
    ModelWeights,
    Publication,
    SocketAddress,
    TokenChunk,
)
from leyden.engine.remote import EngineServer, UnheldEngine
from leyden.engine.torch.batch import ContinuousBatch
from leyden.engine.torch.kv_cache import KVCache
from leyden.engine.torch.request import ActiveRequest, deliver_outputs
from leyden.engine.torch.sizing import (
    CPU_PREFILL_TOKENS,
    GPU_PREFILL_TOKENS,
    choose_forward,
    choose_threads,
    limit_length,
)
from leyden.engine.torch.transfer import let_engine_wait, let_trainer_wait

log = logging.getLogger(__name__)

DEFAULT_CONTEXT_LENGTH = 32_768
"""The longest sequence of a model that sets no limit."""
GPU_PREFILL_PAUSE = 4
"""Steps that a few prompts wait for while many requests decode, so that most steps replay a graph."""
GPU_KV_CACHE_SHARE = 0.4
"""The part of a GPU's free memory that the KV cache may take: the trainer needs the rest."""

_OUT_OF_MEMORY = " (lower `engine.slots`, or set `engine.memory` higher)"


class TorchEngine(UnheldEngine):
    """Samples from a model in this process. Safe to use from any event loop and thread."""

    sleeps_while_training = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int = 64,
        version: int = 0,
        prefill_tokens: int | None = None,
        threads: int | None = None,
        prefix_caching: bool = True,
        tokenizer: str | None = None,
        overlap: bool | None = None,
        dtype: torch.dtype | None = None,
        kv_cache_bytes: int | None = None,
    ) -> None:
        """Without `prefix_caching`, a completion does not depend on earlier requests, to the last bit.

        Grammars need a `tokenizer`, in the form that `GrammarCompiler` takes. With `overlap`, which is the default on a
        GPU, a step is started before the tokens of the one before are read. `dtype` is the precision to sample in: by
        default bfloat16 on a GPU and the model's on a CPU. If it is not the model's, and always on a GPU, the engine
        has its own copy of the weights, which `publish` writes in place. `kv_cache_bytes` limits the KV cache, and
        with it the longest sequence; by default it is a part of a GPU's free memory.
        """
        config = model.config.get_text_config()
        self.context_length = int(getattr(config, "max_position_embeddings", DEFAULT_CONTEXT_LENGTH))
        self.vocab_size = int(config.vocab_size)
        self._grammars = GrammarCompiler(tokenizer, self.vocab_size) if tokenizer is not None else None
        on_gpu = model.device.type == "cuda"
        self._threads = threads or choose_threads(model)
        dtype = dtype or (torch.bfloat16 if on_gpu else model.dtype)
        if kv_cache_bytes is None and on_gpu:
            kv_cache_bytes = int(GPU_KV_CACHE_SHARE * torch.cuda.mem_get_info(model.device)[0])
        if kv_cache_bytes is not None:
            self.context_length = limit_length(self.context_length, kv_cache_bytes, slots + 1, config, dtype)
        copies = on_gpu or dtype != model.dtype
        padding = 1 if copies else 0  # a slot for the rows that pad a captured step
        kv_cache = KVCache(slots + padding, self.context_length, dtype, model.device)
        self._batch = ContinuousBatch(
            choose_forward(model, kv_cache, copies),
            kv_cache,
            slots=slots,
            prefill_tokens=prefill_tokens or (GPU_PREFILL_TOKENS if on_gpu else CPU_PREFILL_TOKENS),
            prefill_pause=GPU_PREFILL_PAUSE if on_gpu else 0,
            prefix_caching=prefix_caching,
            overlap=on_gpu if overlap is None else overlap,
            version=version,
        )
        self.stats = self._batch.stats
        self._stream = torch.cuda.Stream(model.device) if on_gpu else None
        self._wake = threading.Condition()
        self._queue: deque[ActiveRequest] = deque()
        self._weight_changes: deque[tuple[Callable[[], None], int, Future[None]]] = deque()
        self._ended_sessions: deque[str] = deque()
        self._waiting_for_end: list[Future[None]] = []
        self._thread: threading.Thread | None = None
        self._paused_s = 0.0
        """How long changes of shared weights have stopped it since the last publication, without the changes."""
        self._closed, self._ended = False, "the engine has ended"

    @property
    def version(self) -> int:
        """The version of the current weights."""
        return self._batch.version

    @property
    def address(self) -> SocketAddress:
        """A server process reaches the engine over a socket to this process."""
        return SocketAddress(self.context_length, self.vocab_size, self._batch.slots)

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answer the requests of a server process until it is gone."""
        await EngineServer(self, writer).serve(reader)

    def start(self) -> None:
        """Start the engine's thread unless it is running."""
        with self._wake:
            if self._closed:
                raise EngineLost(self._ended)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="leyden-engine", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop the thread; requests and weight changes in flight fail."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Sample a completion, chunk by chunk; closing the generator cancels the request."""
        self._check(request)
        matcher = await self._matcher(request)
        active = ActiveRequest(request, self.context_length, self.vocab_size, asyncio.get_running_loop(), matcher)
        self._submit(lambda: self._queue.append(active))
        try:
            while True:
                chunk = await active.receive()
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            active.cancelled = True

    async def wait_failed(self) -> NoReturn:
        """Wait until the thread ends, and raise `EngineLost`. A step that fails does not end it."""
        ended: Future[None] = Future()
        with self._wake:
            if self._closed:
                raise EngineLost(self._ended)
            self._waiting_for_end.append(ended)
        await asyncio.wrap_future(ended)
        raise AssertionError("it ends only with an error")

    async def sleep(self) -> None:
        """Do nothing: `sleeps_while_training` is False."""

    @property
    def shares_parameters(self) -> bool:
        """Whether it samples from the model's own parameters."""
        return self._batch.forward.shares_parameters

    @asynccontextmanager
    async def changing_weights(self, version: int) -> AsyncIterator[None]:
        """Let the trainer write the parameters; shared ones between two steps, after which `version` samples.

        The KV cache of the old weights is dropped; requests in flight are computed again and continue.
        """
        if not self.shares_parameters:
            yield
            return
        started = time.monotonic()
        paused, written = Future[None](), Future[None]()

        def wait_for_trainer() -> None:
            paused.set_result(None)
            with self._wake:
                self._wake.wait_for(lambda: self._closed or written.done())
            if not written.done():
                raise EngineLost(self._ended)
            written.result()

        written.add_done_callback(lambda _: self._notify())
        changed = self.change_weights(wait_for_trainer, version)
        try:
            await asyncio.wait({changed, asyncio.wrap_future(paused)}, return_when=asyncio.FIRST_COMPLETED)
            if changed.done():
                changed.result()  # the engine has ended
            writing = time.monotonic()
            yield
        except BaseException:
            written.cancel()
            await asyncio.gather(changed, return_exceptions=True)
            raise
        resuming = time.monotonic()
        written.set_result(None)
        await changed
        self._paused_s += writing - started + time.monotonic() - resuming

    async def publish(self, weights: ModelWeights, version: int) -> Publication:
        """Copy the parameters between two steps unless they are shared: then the engine serves them already."""
        started = time.monotonic()
        if not self.shares_parameters:
            await self.change_weights(lambda: None, version)
        paused_s, self._paused_s = self._paused_s, 0.0
        return Publication(time.monotonic() - started + paused_s, 0)

    def change_weights(self, change: Callable[[], None], version: int) -> asyncio.Future[None]:
        """Have a change of the weights made between two steps, on the engine's thread; return a future of its end."""
        done: Future[None] = Future()
        self._submit(lambda: self._weight_changes.append((change, version, done)))
        return asyncio.wrap_future(done)

    def end_session(self, session: str) -> None:
        """Let the KV cache slots of a session be evicted first."""
        self._ended_sessions.append(session)

    def _check(self, request: EngineRequest) -> None:
        ids, room = request.prompt_ids, self.context_length - len(request.prompt_ids)
        least = 0 if request.prompt_logprobs else 1
        if not ids or request.max_tokens < least or room < min(1, request.max_tokens):
            raise EngineError(
                f"a prompt of {len(ids)} tokens and a completion of {request.max_tokens}: the model takes"
                f" prompts of 1 to {self.context_length - 1} tokens, and a completion has at least {least}"
            )
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise EngineError(f"the prompt has token ids outside of the model's 0 to {self.vocab_size - 1}")
        if not (request.sampling.temperature >= 0 and request.sampling.repetition_penalty > 0):
            raise EngineError("`temperature` must be 0 or more, and `repetition_penalty` more than 0")

    async def _matcher(self, request: EngineRequest) -> GrammarMatcher | None:
        if request.grammar is None:
            return None
        if self._grammars is None:
            raise GrammarError("this engine was created without a tokenizer: its completions cannot follow a grammar")
        return await self._grammars.new_matcher(request.grammar, request.stop_ids)

    def _submit(self, add: Callable[[], None]) -> None:
        self.start()
        with self._wake:
            if self._closed:
                raise EngineLost(self._ended)
            add()
            self._wake.notify()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    # Everything below runs on the engine's thread.

    def _run(self) -> None:
        try:
            self._set_threads()
            if self._stream is not None:
                torch.cuda.set_stream(self._stream)
            while self._wait():
                started = time.perf_counter()
                try:
                    while self._weight_changes:
                        self._change_weights(*self._weight_changes.popleft())
                    with torch.inference_mode():
                        self._batch.admit(self._queue, self._ended_sessions)
                        self._batch.step()
                except Exception as error:
                    log.exception("a step of the engine failed: its requests fail, and the engine continues")
                    hint = _OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else ""
                    self._batch.fail(EngineError(f"{type(error).__name__}: {error}{hint}"))
                    if self._stream is not None:
                        self._stream.synchronize()  # which fails if the device does: then the engine ends
                self.stats.busy_s += time.perf_counter() - started
        except BaseException as error:
            self._ended = f"{self._ended}: {type(error).__name__}: {error}"
            raise
        finally:
            self._end(EngineLost(self._ended))

    def _end(self, lost: EngineLost) -> None:
        """Fail everything that still waits for the thread."""
        with self._wake:
            self._closed = True
        self._batch.fail(lost)
        deliver_outputs([(request, lost) for request in self._queue])
        for done in (*(done for _, _, done in self._weight_changes), *self._waiting_for_end):
            if done.set_running_or_notify_cancel():
                done.set_exception(lost)

    def _set_threads(self) -> None:
        """Set how many threads torch uses for this thread's operations, and leave other threads as they are.

        OpenMP stores the number per thread, but new threads start with the number that was set last.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        restore = threading.Thread(target=torch.set_num_threads, args=(before,))
        restore.start()
        restore.join()

    def _wait(self) -> bool:
        """Sleep until there is something to do; false when the engine is closed."""
        with self._wake:
            while not (self._closed or self._queue or self._weight_changes or self._batch.active):
                self._batch.discard_step()
                self._wake.wait()
            return not self._closed

    def _change_weights(self, change: Callable[[], None], version: int, done: Future[None]) -> None:
        if not done.set_running_or_notify_cancel():
            return

        def ordered_change() -> None:
            let_trainer_wait(self._stream)  # steps that are computed still read the weights
            try:
                change()
            finally:
                let_engine_wait(self._stream)

        try:
            self._batch.change_weights(ordered_change, version)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        finally:
            let_trainer_wait(self._stream)  # its next change comes after the copy
