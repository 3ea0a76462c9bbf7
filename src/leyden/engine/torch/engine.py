"""The embedded engine: continuous batching of a Hugging Face causal model over fixed slots of keys and values.

One thread computes. Between two of its steps requests join and leave and weights change; in a step every request that
is drawing gets one token, and those whose prompts are not computed yet share `chunk` tokens of them. It sleeps when
there is nothing to do. The parameters are the trainer's own: publishing new weights is writing them, in `publish`.
"""

import asyncio
import logging
import math
import os
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from leyden.engine.grammar import GrammarError, Grammars, Matcher
from leyden.engine.protocol import EngineError, EngineRequest, Publication, SocketAddress, TokenChunk, WeightUpdate
from leyden.engine.remote import EngineServer
from leyden.engine.torch.forward import EngineForward, HubForward, RecomputeForward, Segment
from leyden.engine.torch.kv_cache import KVCache
from leyden.engine.torch.llama import LlamaForward
from leyden.engine.torch.prefix_cache import PrefixCache, Slot
from leyden.engine.torch.request import ActiveRequest, Post, deliver
from leyden.engine.torch.sampling import draw

log = logging.getLogger(__name__)

SMALL = 20_000_000
"""Parameters below which a second thread costs more in waiting than it computes."""
PIECE_S = 0.01
"""Tokens are handed over this often, beginnings and ends at once: waking an asker costs about as much as a token."""
BOUNDLESS = 32_768
"""Tokens of the longest sequence, where the model sets no limit of its own."""


@dataclass
class EngineStats:
    """What the engine has done since it was made."""

    tokens: int = 0
    """Drawn."""
    prompt_computed: int = 0
    """Tokens of prompts, and those that were computed again after a change."""
    prompt_reused: int = 0
    steps: int = 0
    busy_s: float = 0.0


class TorchEngine:
    """Completes with a model in this process; safe to use from any event loop and thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int = 64,
        version: int = 0,
        chunk: int = 256,
        threads: int | None = None,
        reuse: bool = True,
        tokenizer: str | None = None,
    ) -> None:
        """Without `reuse` what a request is answered depends on nothing that was asked before it, to the last bit.

        Only with a `tokenizer`, as `Grammars` wants it, can completions follow grammars.
        """
        config = model.config.get_text_config()
        self._context = int(getattr(config, "max_position_embeddings", BOUNDLESS))
        self._vocabulary = int(config.vocab_size)
        self._grammars = Grammars(tokenizer, self._vocabulary) if tokenizer is not None else None
        self.version = version
        """Of the weights in use."""
        self.stats = EngineStats()
        self._chunk, self._threads = chunk, threads or _threads(model)
        self._rows = KVCache(slots, self._context, model.dtype, model.device)
        self._forward = _forward(model, self._rows)
        whole = isinstance(self._forward, RecomputeForward)  # which has nothing to be reused
        self._slots = PrefixCache(slots, self._rows, reuse and not whole)
        self._wake = threading.Condition()
        self._queue: deque[ActiveRequest] = deque()
        self._changes: deque[tuple[Callable[[], None], int, Future[None]]] = deque()
        self._forgotten: deque[str] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._posted = 0.0

    @property
    def context_length(self) -> int:
        """The longest sequence, prompt and completion together."""
        return self._context

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._vocabulary

    @property
    def address(self) -> SocketAddress:
        """A server process reaches it over a socket to this process."""
        return SocketAddress(self._context, self._vocabulary, len(self._slots.all))

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answer the requests of a server process until it is gone."""
        await EngineServer(self, writer).serve(reader)

    def start(self) -> None:
        """Start the engine's thread, unless it runs."""
        with self._wake:
            if self._closed:
                raise EngineError("the engine was closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="leyden-engine", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End; requests and changes under way fail."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Draw a completion, piece by piece; closing the generator cancels."""
        self._check(request)
        matcher = await self._matcher(request)
        completion = ActiveRequest(request, self._context, self._vocabulary, asyncio.get_running_loop(), matcher)
        self._submit(lambda: self._queue.append(completion))
        try:
            while True:
                piece = await completion.next()
                yield piece
                if piece.finish is not None:
                    return
        finally:
            completion.cancelled = True

    async def publish(self, update: WeightUpdate, version: int) -> Publication:
        """Apply an update to the shared parameters between two steps; later tokens are sampled by the new weights.

        The KV cache of the old weights is dropped; requests in flight are computed again and go on.
        """
        began, applied_s = time.monotonic(), 0.0

        def apply() -> None:
            nonlocal applied_s
            start = time.monotonic()
            update.apply()
            applied_s = time.monotonic() - start

        done: Future[None] = Future()
        self._submit(lambda: self._changes.append((apply, version, done)))
        await asyncio.wrap_future(done)
        return Publication(time.monotonic() - began - applied_s, 0)

    def end_session(self, session: str) -> None:
        """Mark the slots of a session as the first to be reused."""
        self._forgotten.append(session)

    def hold(self) -> None:
        """Do nothing: `publish` itself keeps sampling and weight changes apart."""

    def resume(self, version: int) -> None:
        """Do nothing: `publish` has set the version."""

    def _check(self, request: EngineRequest) -> None:
        ids, room = request.prompt_ids, self._context - len(request.prompt_ids)
        if not ids or room < 1 or request.max_tokens < 1:
            raise EngineError(
                f"a prompt of {len(ids)} tokens and a completion of {request.max_tokens}: the model takes"
                f" 1 to {self._context - 1} tokens of prompt, and draws 1 at the least"
            )
        if not 0 <= min(ids) <= max(ids) < self._vocabulary:
            raise EngineError(f"the prompt has token ids outside of the model's 0 to {self._vocabulary - 1}")
        if not (request.sampling.temperature >= 0 and request.sampling.repetition_penalty > 0):
            raise EngineError("`temperature` must be 0 or more, and `repetition_penalty` more than 0")

    async def _matcher(self, request: EngineRequest) -> Matcher | None:
        if request.grammar is None:
            return None
        if self._grammars is None:
            raise GrammarError("this engine knows no tokenizer: its completions cannot follow a grammar")
        return await self._grammars.begin(request.grammar, request.stop_ids)

    def _submit(self, add: Callable[[], None]) -> None:
        self.start()
        with self._wake:
            if self._closed:
                raise EngineError("the engine was closed")
            add()
            self._wake.notify()

    # From here on everything happens on the engine's thread.

    def _run(self) -> None:
        try:
            self._set_threads()
            while self._wait():
                began = time.perf_counter()
                try:
                    while self._changes:
                        self._change(*self._changes.popleft())
                    with torch.inference_mode():
                        self._admit()
                        self._step()
                except Exception as error:
                    log.exception("a step of the engine failed; its requests fail, and the engine goes on")
                    self._fail(f"{type(error).__name__}: {error}")
                self.stats.busy_s += time.perf_counter() - began
        finally:
            self._end()

    def _end(self) -> None:
        """Whatever ended the thread, nobody waits for it any longer."""
        with self._wake:
            self._closed = True
        self._fail("the engine was closed")
        deliver([(completion, EngineError("the engine was closed")) for completion in self._queue])
        for _, _, done in self._changes:
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineError("the engine was closed"))

    def _set_threads(self) -> None:
        """Set the threads of this thread's operations, and leave everybody else's as they are.

        OpenMP keeps the number by thread, but the latest number set is what threads born later begin with.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        restore = threading.Thread(target=torch.set_num_threads, args=(before,))
        restore.start()
        restore.join()

    def _wait(self) -> bool:
        """Sleep until there is something to do; false when it is over."""
        with self._wake:
            while not (self._closed or self._queue or self._changes or self._slots.live):
                self._wake.wait()
            return not self._closed

    def _change(self, change: Callable[[], None], version: int, done: Future[None]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        self._post(everything=True)
        try:
            try:
                change()
                self.version = version
            finally:  # a change that failed may have written half of them
                with torch.inference_mode():
                    self._forward.refresh()
                    self._slots.drop()
                    for slot in self._slots.live:
                        self._slots.share(slot)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def _admit(self) -> None:
        """Let requests leave and join."""
        self._slots.release([slot for slot in self._slots.live if slot.completion and slot.completion.cancelled])
        while self._forgotten:
            self._slots.forget(self._forgotten.popleft())
        while self._queue and not self._slots.full:
            completion = self._queue.popleft()
            if not completion.cancelled:
                self.stats.prompt_reused += self._slots.admit(completion)

    def _step(self) -> None:
        plan = self._plan()
        if not plan:
            return
        segments = [segment for _, segment in plan]
        self._rows.reserve(max(segment.end for segment in segments), [slot.computed for slot in self._slots.all])
        logits = self._forward(segments)
        ready = [slot for slot, segment in plan if segment.wanted]
        completions = [slot.completion for slot in ready if slot.completion is not None]
        drawn = draw(logits, [completion.chance for completion in completions]) if ready else []
        for slot, segment in plan:
            slot.computed = segment.end
            if len(segment.ids) > 1 or (slot.completion and segment.start < len(slot.completion.request.prompt_ids)):
                self.stats.prompt_computed += len(segment.ids)
        over: list[Slot] = []
        failed: Post = []
        for slot, completion, one in zip(ready, completions, drawn, strict=True):
            if not (math.isfinite(one.logprob) and math.isfinite(one.allowed)):
                failed.append((completion, EngineError(_why_not_drawn(completion))))
                over.append(slot)
                slot.computed = 0
                self._rows.wipe(slot.row)
                continue
            completion.take(one)
            if completion.finish is not None:
                over.append(slot)
        self.stats.steps += 1
        self.stats.tokens += len(drawn)
        self._post()
        deliver(failed)
        self._slots.release(over)

    def _plan(self) -> list[tuple[Slot, Segment]]:
        """One token for all who have just one to compute, by row; then prompts, in order, while the chunk lasts."""
        single, longer, left = [], [], self._chunk
        for slot in self._slots.live:
            missing = len(slot.tokens) - slot.computed
            if missing == 1:
                single.append((slot, Segment(slot.row, slot.computed, slot.tokens[-1:], True)))
            elif left and not self._slots.waits(slot):
                end = min(slot.computed + left, len(slot.tokens))
                ids = slot.tokens[slot.computed : end]
                longer.append((slot, Segment(slot.row, slot.computed, ids, end == len(slot.tokens))))
                left -= len(ids)
        single.sort(key=lambda one: one[1].row)
        return single + longer

    def _post(self, everything: bool = False) -> None:
        """Hand over what was drawn: beginnings and ends at once, the rest from time to time."""
        now = time.perf_counter()
        if everything := everything or now - self._posted >= PIECE_S:
            self._posted = now
        post: Post = []
        for slot in self._slots.live:
            completion = slot.completion
            if completion is not None and (everything or completion.due):
                piece = completion.piece(self.version)
                if piece is not None:
                    post.append((completion, piece))
        deliver(post)

    def _fail(self, why: str) -> None:
        """Fail the requests under way; nothing in the slots can be trusted."""
        deliver([(slot.completion, EngineError(why)) for slot in self._slots.live if slot.completion is not None])
        self._slots.release(self._slots.live)
        self._slots.drop()


def _forward(model: PreTrainedModel, rows: KVCache) -> EngineForward:
    """The fastest that computes the model."""
    if LlamaForward.fits(model):
        return LlamaForward(model, rows)
    return HubForward(model, rows) if HubForward.fits(model) else RecomputeForward(model)


def _why_not_drawn(completion: ActiveRequest) -> str:
    matcher = completion.chance.matcher
    if matcher is not None and (trouble := matcher.trouble) is not None:
        return f"the grammar cannot be followed any further: {trouble}"
    return "the model's logits are not numbers: have its weights diverged?"


def _threads(model: PreTrainedModel) -> int:
    """Half of the cores, the rest being the trainer's and the agents'; one for a small model, whose matrices are small.

    Threads of one operation wait for each other, spinning: with one more than there are free cores a step takes many
    times as long. On two busy cores one thread drew more tokens at 1 and 32 requests, and as many at 256.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    small = sum(parameter.numel() for parameter in model.parameters()) < SMALL
    return 1 if small else max(1, cores // 2)
