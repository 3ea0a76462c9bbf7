"""The embedded engine: continuous batching of a Hugging Face causal model over a fixed number of KV cache slots.

One thread computes. Between two steps requests join and leave and weights are updated. A step samples one token for
every request whose prompt is computed, and computes up to `prefill_tokens` tokens of the other prompts. On a GPU the
tokens of a step are read while the next one runs. The thread sleeps while there is nothing to do.
"""

import asyncio
import logging
import math
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from leyden.engine.grammar import GrammarCompiler, GrammarError, GrammarMatcher
from leyden.engine.protocol import EngineError, EngineRequest, Publication, SocketAddress, TokenChunk, WeightUpdate
from leyden.engine.remote import EngineServer
from leyden.engine.torch.forward import RecomputeForward, Segment
from leyden.engine.torch.kv_cache import KVCache
from leyden.engine.torch.prefix_cache import PrefixCache, Slot
from leyden.engine.torch.request import ActiveRequest, Outputs, deliver_outputs
from leyden.engine.torch.sampling import SampledBatch, prompt_logprobs, sample_tokens
from leyden.engine.torch.schedule import schedule_step
from leyden.engine.torch.sizing import choose_forward, choose_threads, limit_length
from leyden.engine.torch.transfer import to_device, trainers_stream

log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.01
"""How often sampled tokens are delivered (first and last ones at once): waking a caller costs about one token."""
DEFAULT_CONTEXT_LENGTH = 32_768
"""The longest sequence of a model that sets no limit."""
CPU_PREFILL_TOKENS, GPU_PREFILL_TOKENS = 256, 8192
"""Prompt tokens of one step: enough to fill the device, and few enough that decoding requests do not wait long."""
GPU_KV_CACHE_SHARE = 0.4
"""The part of a GPU's free memory that the KV cache may take: the trainer needs the rest."""
_CLOSED = "the engine was closed"


@dataclass
class EngineStats:
    """Counters since the engine was created."""

    sampled_tokens: int = 0
    prompt_computed: int = 0
    """Prompt tokens computed, including tokens that were computed again after a weight update."""
    prompt_reused: int = 0
    """Prompt tokens found in the prefix cache."""
    steps: int = 0
    busy_s: float = 0.0


@dataclass
class RunningStep:
    """A step whose sampled tokens are not read yet."""

    sampling: list[tuple[Slot, ActiveRequest]]
    sampled: SampledBatch


class TorchEngine:
    """Samples from a model in this process. Safe to use from any event loop and thread."""

    reports_allowed_mass = True

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
        default bfloat16 on a GPU and the model's on a CPU. Where it is not the model's, and always on a GPU, the engine
        has its own copy of the weights, which each update writes in place. `kv_cache_bytes` limits the KV cache, and
        with it the longest sequence; by default it is a part of a GPU's free memory.
        """
        config = model.config.get_text_config()
        self._context_length = int(getattr(config, "max_position_embeddings", DEFAULT_CONTEXT_LENGTH))
        self._vocabulary = int(config.vocab_size)
        self._grammars = GrammarCompiler(tokenizer, self._vocabulary) if tokenizer is not None else None
        self.version = version
        """The version of the current weights."""
        self.stats = EngineStats()
        on_gpu = model.device.type == "cuda"
        self._prefill_tokens = prefill_tokens or (GPU_PREFILL_TOKENS if on_gpu else CPU_PREFILL_TOKENS)
        self._threads = threads or choose_threads(model)
        dtype = dtype or (torch.bfloat16 if on_gpu else model.dtype)
        if kv_cache_bytes is None and on_gpu:
            kv_cache_bytes = int(GPU_KV_CACHE_SHARE * torch.cuda.mem_get_info(model.device)[0])
        if kv_cache_bytes is not None:
            self._context_length = limit_length(self._context_length, kv_cache_bytes, slots + 1, config, dtype)
        copies = on_gpu or dtype != model.dtype
        padding = 1 if copies else 0  # a slot for the rows that pad a captured step
        self._kv_cache = KVCache(slots + padding, self._context_length, dtype, model.device)
        self._forward = choose_forward(model, self._kv_cache, copies)
        recomputes = isinstance(self._forward, RecomputeForward)  # it has no KV cache to reuse
        self._prefix_cache = PrefixCache(slots, self._kv_cache, prefix_caching and not recomputes)
        self._sampled: Tensor | None = None
        """The last sampled id of every slot, on the device; None where tokens are read before the next step."""
        if (on_gpu if overlap is None else overlap) and not recomputes:
            self._sampled = torch.zeros(self._kv_cache.slots, dtype=torch.long, device=model.device)
        self._running: RunningStep | None = None
        self._stream = torch.cuda.Stream(model.device) if on_gpu else None
        self._wake = threading.Condition()
        self._queue: deque[ActiveRequest] = deque()
        self._weight_updates: deque[tuple[Callable[[], None], int, Future[None]]] = deque()
        self._ended_sessions: deque[str] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._last_flush = 0.0

    @property
    def context_length(self) -> int:
        """The longest sequence, prompt and completion together."""
        return self._context_length

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._vocabulary

    @property
    def address(self) -> SocketAddress:
        """A server process reaches the engine over a socket to this process."""
        return SocketAddress(self._context_length, self._vocabulary, len(self._prefix_cache.slots))

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answer the requests of a server process until it is gone."""
        await EngineServer(self, writer).serve(reader)

    def start(self) -> None:
        """Start the engine's thread unless it is running."""
        with self._wake:
            if self._closed:
                raise EngineError(_CLOSED)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="leyden-engine", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop the thread; requests and weight updates in flight fail."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Sample a completion, chunk by chunk; closing the generator cancels the request."""
        self._check(request)
        matcher = await self._matcher(request)
        active = ActiveRequest(request, self._context_length, self._vocabulary, asyncio.get_running_loop(), matcher)
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
        """Wait forever: a step that fails fails its requests, and the engine goes on."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nothing completes this future")

    async def publish(self, update: WeightUpdate, version: int) -> Publication:
        """Apply an update to the shared parameters between two steps; later tokens are sampled by the new weights.

        The KV cache of the old weights is dropped; requests in flight are computed again and continue.
        """
        started, applied_s = time.monotonic(), 0.0

        def apply() -> None:
            nonlocal applied_s
            start = time.monotonic()
            update.apply()
            applied_s = time.monotonic() - start

        done: Future[None] = Future()
        self._submit(lambda: self._weight_updates.append((apply, version, done)))
        await asyncio.wrap_future(done)
        return Publication(time.monotonic() - started - applied_s, 0)

    def end_session(self, session: str) -> None:
        """Let the KV cache slots of a session be evicted first."""
        self._ended_sessions.append(session)

    def hold(self) -> None:
        """Do nothing: `publish` itself keeps sampling and weight changes apart."""

    def resume(self, version: int) -> None:
        """Do nothing: `publish` has set the version."""

    def _check(self, request: EngineRequest) -> None:
        ids, room = request.prompt_ids, self._context_length - len(request.prompt_ids)
        least = 0 if request.prompt_logprobs else 1
        if not ids or request.max_tokens < least or room < min(1, request.max_tokens):
            raise EngineError(
                f"a prompt of {len(ids)} tokens and a completion of {request.max_tokens}: the model takes"
                f" prompts of 1 to {self._context_length - 1} tokens, and a completion has at least {least}"
            )
        if not 0 <= min(ids) <= max(ids) < self._vocabulary:
            raise EngineError(f"the prompt has token ids outside of the model's 0 to {self._vocabulary - 1}")
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
                raise EngineError(_CLOSED)
            add()
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
                    while self._weight_updates:
                        self._update_weights(*self._weight_updates.popleft())
                    with torch.inference_mode():
                        self._admit()
                        self._step()
                except Exception as error:
                    log.exception("a step of the engine failed: its requests fail, and the engine continues")
                    self._fail(f"{type(error).__name__}: {error}")
                self.stats.busy_s += time.perf_counter() - started
        finally:
            self._end()

    def _end(self) -> None:
        """Fail everything that still waits for the thread, for whatever reason it ended."""
        with self._wake:
            self._closed = True
        self._fail(_CLOSED)
        deliver_outputs([(request, EngineError(_CLOSED)) for request in self._queue])
        for _, _, done in self._weight_updates:
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineError(_CLOSED))

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
            while not (self._closed or self._queue or self._weight_updates or self._prefix_cache.active):
                self._running = None  # its requests were cancelled
                self._wake.wait()
            return not self._closed

    def _update_weights(self, update: Callable[[], None], version: int, done: Future[None]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            with torch.inference_mode():
                self._read_tokens()
            self._flush(everything=True)
            try:
                with trainers_stream(self._stream):
                    update()
                self.version = version
            finally:  # an update that failed may have written some of the weights
                with torch.inference_mode():
                    self._forward.refresh()
                    self._prefix_cache.invalidate()
                    for slot in self._prefix_cache.active:
                        self._prefix_cache.reuse_prefix(slot)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def _admit(self) -> None:
        """Remove cancelled requests and admit queued ones."""
        cache = self._prefix_cache
        cache.release([slot for slot in cache.active if slot.request and slot.request.cancelled])
        while self._ended_sessions:
            cache.end_session(self._ended_sessions.popleft())
        while self._queue and not cache.full:
            request = self._queue.popleft()
            if not request.cancelled:
                self.stats.prompt_reused += cache.admit(request)

    def _step(self) -> None:
        """Start a step and read the tokens of the one before, or of the same one where steps do not overlap."""
        before, self._running = self._running, None
        schedule = schedule_step(self._prefix_cache, self._prefill_tokens)
        if schedule:
            segments = [segment for _, segment in schedule]
            longest = max(segment.end for segment in segments)
            self._kv_cache.reserve(longest, [slot.computed for slot in self._prefix_cache.slots])
            logits = self._add_prompt_logprobs(schedule, self._forward(segments, self._sampled))
            sampling = [
                (slot, slot.request)
                for slot, one in schedule
                if one.needs_logits and slot.request is not None and slot.request.finish is None
            ]
            for slot, segment in schedule:
                slot.computed = segment.end
                if len(segment.ids) > 1 or (slot.request and segment.start < len(slot.request.request.prompt_ids)):
                    self.stats.prompt_computed += len(segment.ids)
            if sampling:
                self._running = self._start_sampling(logits, sampling)
            self.stats.steps += 1
        if self._sampled is None:
            self._read_tokens()
        elif before is not None:
            self._append_tokens(before)

    def _add_prompt_logprobs(self, schedule: list[tuple[Slot, Segment]], logits: Tensor) -> Tensor:
        """Give requests the logprobs of their prompts, and finish those that want nothing else.

        Returns the logits to sample from: those after the last token of a segment.
        """
        if not any(slot.request is not None and slot.request.needs_prompt_logprobs for slot, _ in schedule):
            return logits
        kept: list[int] = []
        finished: list[Slot] = []
        failures: Outputs = []
        row = 0
        for slot, segment in schedule:
            rows = logits[row : row + segment.logit_rows]
            row += len(rows)
            request = slot.request
            if request is not None and request.needs_prompt_logprobs:
                prompt = request.request.prompt_ids
                following = prompt[segment.start + 1 : segment.end + 1]
                if following and segment.needs_all_logits:
                    tokens = prompt_logprobs(rows[: len(following)], following, request.sampler.top_logprobs)
                    request.add_prompt_logprobs(segment.start, tokens)
                    if not all(math.isfinite(logprob) for logprob, _ in tokens):
                        failures.append((request, EngineError(_sampling_error(request))))
                        request.cancelled = True
                if segment.end == len(prompt):
                    request.end_prompt()
                if request.finish is not None:
                    finished.append(slot)
                    continue
            if segment.needs_logits:
                kept.append(row - 1)
        deliver_outputs(failures)
        if finished:
            self._flush()
            self._prefix_cache.release(finished)
        return logits[kept]

    def _start_sampling(self, logits: Tensor, sampling: list[tuple[Slot, ActiveRequest]]) -> RunningStep:
        sampled = sample_tokens(logits, [request.sampler for _, request in sampling])
        if self._sampled is not None:
            slots = to_device(np.array([slot.index for slot, _ in sampling]), logits.device)
            self._sampled[slots] = sampled.ids
        for slot, _ in sampling:
            slot.unread = True
        return RunningStep(sampling, sampled)

    def _read_tokens(self) -> None:
        """Wait for the running step, if there is one."""
        running, self._running = self._running, None
        if running is not None:
            self._append_tokens(running)

    def _append_tokens(self, step: RunningStep) -> None:
        """Append the tokens of a step to its requests; a request that has ended since ignores its token."""
        finished: list[Slot] = []
        failures: Outputs = []
        started = self._running.sampling if self._running is not None else ()
        for (slot, request), token in zip(step.sampling, step.sampled.read(), strict=True):
            if slot.request is not request:
                continue
            slot.unread = False
            self.stats.sampled_tokens += 1
            if not (math.isfinite(token.logprob) and math.isfinite(token.allowed)):
                failures.append((request, EngineError(_sampling_error(request))))
                finished.append(slot)
                slot.computed = 0
                self._kv_cache.clear(slot.index)
                continue
            request.append(token)
            if request.finish is not None:
                finished.append(slot)
        for slot, request in started:
            slot.unread = slot.request is request
        self._flush()
        deliver_outputs(failures)
        self._prefix_cache.release(finished)

    def _flush(self, everything: bool = False) -> None:
        """Deliver sampled tokens: first and last ones at once, the others every `FLUSH_INTERVAL_S`."""
        now = time.perf_counter()
        if everything := everything or now - self._last_flush >= FLUSH_INTERVAL_S:
            self._last_flush = now
        outputs: Outputs = []
        for slot in self._prefix_cache.active:
            request = slot.request
            if request is not None and (everything or request.urgent):
                chunk = request.flush(self.version)
                if chunk is not None:
                    outputs.append((request, chunk))
        deliver_outputs(outputs)

    def _fail(self, message: str) -> None:
        """Fail the active requests and discard the KV cache, which may be wrong."""
        active = self._prefix_cache.active
        deliver_outputs([(slot.request, EngineError(message)) for slot in active if slot.request is not None])
        self._running = None
        self._prefix_cache.release(active)
        self._prefix_cache.invalidate()


def _sampling_error(request: ActiveRequest) -> str:
    matcher = request.sampler.matcher
    if matcher is not None and (error := matcher.error) is not None:
        return f"the grammar cannot be followed any further: {error}"
    return "the model's logits are not finite: its weights may have diverged"
