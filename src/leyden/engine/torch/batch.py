"""The requests that an engine computes together, one step at a time. Only the engine's thread uses it.

A step samples one token for every request whose prompt is computed, and computes up to `prefill_tokens` tokens of the
other prompts. With `overlap`, the tokens of a step are read while the next one runs. On a GPU a step without prompts is
the replay of a graph, several times faster than one with prompts: a few prompts may wait while many requests decode,
and are then computed together.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leyden.engine.protocol import EngineError
from leyden.engine.torch.forward import UNREAD, EngineForward, RecomputeForward, Segment
from leyden.engine.torch.kv_cache import KVCache
from leyden.engine.torch.prefix_cache import PrefixCache, Slot
from leyden.engine.torch.request import ActiveRequest, Outputs, deliver_outputs
from leyden.engine.torch.sampling import SampledBatch, prompt_logprobs, sample_tokens
from leyden.engine.torch.transfer import to_device

PROMPT_LOGITS = 512
"""Prompt tokens of one step whose logits are computed: those of a large vocabulary take much memory."""

MAX_WAITING_SHARE = 0.25
"""Prompts wait only while they are fewer than this part of the requests that decode."""


def schedule_step(cache: PrefixCache, prefill_tokens: int, prompts_wait: bool = False) -> list[tuple[Slot, Segment]]:
    """Return one token per decoding request, by slot, then up to `prefill_tokens` of prompts in order of admission.

    With `prompts_wait`, prompts get no tokens in this step if they are few in comparison with decoding requests.
    A request whose last token is not read yet continues from the token on the device, unless that token fills its
    length, or its next token depends on it (penalties, grammars).
    """
    decode, prefill, budget, logits_budget = [], [], prefill_tokens, PROMPT_LOGITS
    for slot in cache.active:
        request, length = slot.request, len(slot.tokens)
        if slot.unread:
            if request is not None and length + 1 < request.max_length and not request.sampler.needs_tokens:
                decode.append((slot, Segment(slot.index, length, (UNREAD,), True)))
        elif length - slot.computed == 1:
            decode.append((slot, Segment(slot.index, slot.computed, slot.tokens[-1:], True)))
        elif budget and not cache.must_wait(slot):
            needs_all = request is not None and request.needs_prompt_logprobs
            end = min(slot.computed + (min(budget, logits_budget) if needs_all else budget), length)
            if ids := slot.tokens[slot.computed : end]:
                prefill.append((slot, Segment(slot.index, slot.computed, ids, end == length, needs_all)))
            budget -= len(ids)
            logits_budget -= len(ids) if needs_all else 0
    decode.sort(key=lambda one: one[1].slot)
    waits = prompts_wait and len(cache.active) - len(decode) < MAX_WAITING_SHARE * len(decode)
    return decode if waits else decode + prefill


MIN_FLUSH_INTERVAL_S, MAX_FLUSH_INTERVAL_S = 0.01, 0.2
DELIVERIES_PER_S = 2_500
"""Sampled tokens are delivered at most this often, all requests together (first and last ones at once). Each delivery
wakes a caller and is handled by a server, which costs about as much as a token of a small model."""


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


class ContinuousBatch:
    """Admits requests into KV cache slots, computes their steps and delivers their tokens."""

    def __init__(
        self,
        forward: EngineForward,
        kv_cache: KVCache,
        *,
        slots: int,
        prefill_tokens: int,
        prefill_pause: int,
        prefix_caching: bool,
        overlap: bool,
        version: int,
    ) -> None:
        """`slots` may be fewer than those of `kv_cache`, which has one more if steps are padded.

        `prefill_pause` is how many steps a few prompts wait after a step that computed prompts.
        """
        self.forward, self._kv_cache = forward, kv_cache
        self._prefill_tokens, self._prefill_pause = prefill_tokens, prefill_pause
        self._steps_since_prefill = 0
        recomputes = isinstance(forward, RecomputeForward)  # it has no KV cache to reuse
        self._prefix_cache = PrefixCache(slots, kv_cache, prefix_caching and not recomputes)
        self.version = version
        """The version of the current weights."""
        self.stats = EngineStats()
        self._sampled: Tensor | None = None
        """The last sampled id of every slot, on the device; None if tokens are read before the next step."""
        if overlap and not recomputes:
            self._sampled = torch.zeros(kv_cache.slots, dtype=torch.long, device=kv_cache.device)
        self._running: RunningStep | None = None
        self._last_flush = -math.inf

    @property
    def slots(self) -> int:
        """How many requests are computed together."""
        return len(self._prefix_cache.slots)

    @property
    def active(self) -> bool:
        """Whether a request has a slot."""
        return bool(self._prefix_cache.active)

    def discard_step(self) -> None:
        """Discard the tokens of the running step, for when all its requests were cancelled."""
        self._running = None

    def admit(self, queue: deque[ActiveRequest], ended_sessions: deque[str]) -> None:
        """Remove cancelled requests and admit queued ones."""
        cache = self._prefix_cache
        cache.release([slot for slot in cache.active if slot.request and slot.request.cancelled])
        while ended_sessions:
            cache.end_session(ended_sessions.popleft())
        while queue and not cache.full:
            request = queue.popleft()
            if not request.cancelled:
                cache.admit(request)

    def step(self) -> None:
        """Start a step and read the tokens of the one before, or of the same one if steps do not overlap."""
        before, self._running = self._running, None
        prompts_wait = self._steps_since_prefill < self._prefill_pause
        schedule = schedule_step(self._prefix_cache, self._prefill_tokens, prompts_wait)
        self.stats.prompt_reused = self._prefix_cache.reused
        if schedule:
            segments = [segment for _, segment in schedule]
            longest = max(segment.end for segment in segments)
            self._kv_cache.finish_copies()
            self._kv_cache.reserve(longest, [slot.computed for slot in self._prefix_cache.slots])
            logits = self._add_prompt_logprobs(schedule, self.forward(segments, self._sampled))
            sampling = [
                (slot, slot.request)
                for slot, one in schedule
                if one.needs_logits and slot.request is not None and slot.request.finish is None
            ]
            prompt_tokens = 0
            for slot, segment in schedule:
                slot.computed = segment.end
                if len(segment.ids) > 1 or (slot.request and segment.start < len(slot.request.request.prompt_ids)):
                    prompt_tokens += len(segment.ids)
            self.stats.prompt_computed += prompt_tokens
            self._steps_since_prefill = 0 if prompt_tokens else self._steps_since_prefill + 1
            if sampling:
                self._running = self._start_sampling(logits, sampling)
            self.stats.steps += 1
        if self._sampled is None:
            self._read_tokens()
        elif before is not None:
            self._append_tokens(before)

    def change_weights(self, change: Callable[[], None], version: int) -> None:
        """Change the weights between two steps. Requests in flight are computed again by the new ones and continue."""
        with torch.inference_mode():
            self._read_tokens()
        self._flush(everything=True)
        try:
            change()
            self.version = version
        finally:  # a change that failed may have written some of the weights
            with torch.inference_mode():
                self.forward.refresh()
                self._prefix_cache.invalidate()

    def fail(self, error: EngineError) -> None:
        """Fail the active requests and discard the KV cache, which may be wrong."""
        active = self._prefix_cache.active
        deliver_outputs([(slot.request, error) for slot in active if slot.request is not None])
        self._running = None
        self._prefix_cache.release(active)
        self._prefix_cache.invalidate()

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
        """Deliver sampled tokens: first and last ones at once, the others at an interval."""
        now = time.perf_counter()
        if everything := everything or now - self._last_flush >= flush_interval(len(self._prefix_cache.active)):
            self._last_flush = now
        outputs: Outputs = []
        for slot in self._prefix_cache.active:
            request = slot.request
            if request is not None and (everything or request.urgent):
                chunk = request.flush(self.version)
                if chunk is not None:
                    outputs.append((request, chunk))
        deliver_outputs(outputs)


def flush_interval(requests: int) -> float:
    """Return how many seconds lie between two deliveries of the tokens of so many requests."""
    return min(max(requests / DELIVERIES_PER_S, MIN_FLUSH_INTERVAL_S), MAX_FLUSH_INTERVAL_S)


def _sampling_error(request: ActiveRequest) -> str:
    matcher = request.sampler.matcher
    if matcher is not None and (error := matcher.error) is not None:
        return f"the grammar cannot be followed any further: {error}"
    return "the model's logits are not finite: its weights may have diverged"
