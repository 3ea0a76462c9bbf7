"""The client of a vLLM server: samples completions with its token endpoint.

Every chunk has the exact version of the weights that sampled it: `hold` aborts all running requests before the weights
change, and after `resume` each generation continues, in a new request, from its prompt and the tokens that it has.
Grammars and penalties, whose state vLLM keeps by request, take these tokens into account (`wire.body`).
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

import aiohttp

from leyden.engine.protocol import EngineError, EngineLost, EngineRequest, FinishReason, TokenChunk, VllmAddress
from leyden.engine.vllm import wire
from leyden.engine.vllm.http import HttpStream, is_healthy, session

_HOLD_TIMEOUT_S = 30.0
"""How long after vLLM aborted a request `hold` must be called; an abort without it is an error."""
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class VllmEngine:
    """Samples completions on a vLLM server."""

    reports_allowed_mass = False

    def __init__(self, address: VllmAddress) -> None:
        self.context_length, self.vocab_size = address.context_length, address.vocab_size
        self.version = address.version
        """The version of the current weights."""
        self._address = address
        self._session: aiohttp.ClientSession | None = None
        self._running: set[HttpStream] = set()
        self._restarting = False
        """Whether vLLM could not be reached and has not answered since. A restarted one is paused at first."""
        self._resumed, self._held = asyncio.Event(), asyncio.Event()
        self._resumed.set()

    async def close(self) -> None:
        """Close the connections; requests in flight fail."""
        if self._session is not None:
            await self._session.close()

    def hold(self) -> None:
        """Abort all running requests and send no more until `resume`. The weights may change once this returns."""
        self._resumed.clear()
        self._held.set()
        for request in list(self._running):
            request.abort()

    def resume(self, version: int) -> None:
        """Send requests again; the weights are now those of `version`."""
        self.version = version
        self._held.clear()
        self._resumed.set()

    async def is_ready(self) -> bool:
        """Whether vLLM answers, after it could not be reached."""
        self._restarting = not await is_healthy(self._open())
        return not self._restarting

    def end_session(self, session: str) -> None:
        """Do nothing: vLLM's prefix cache evicts by itself."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Sample a completion, chunk by chunk; closing the generator cancels the request."""
        self._check(request)
        sampled: list[int] = []
        if request.prompt_logprobs:
            async with aclosing(self._prompt_logprobs(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
            if not request.max_tokens:
                return
        while True:
            await self._resumed.wait()
            async with aclosing(self._sample(request.after(tuple(sampled)))) as chunks:
                async for chunk in chunks:
                    sampled += chunk.ids
                    yield chunk
                    if chunk.finish is not None:
                        return

    async def _prompt_logprobs(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield a chunk with the logprobs of the prompt, all of the same weights."""
        while True:
            await self._resumed.wait()
            version, data = self.version, b""
            running = HttpStream(self._open(), wire.prompt_logprobs_body(request, self._adapter))
            async with aclosing(self._read(running)) as parts:
                async for part in parts:
                    data += part
                    if not part:
                        yield _restarting(version)
            finished = [event for event in wire.events(data) if _is_complete(event)] if not running.aborted else []
            if finished:
                values, top = wire.prompt_logprobs(finished[0], request.prompt_ids, request.top_logprobs)
                finish: FinishReason | None = None if request.max_tokens else "length"
                yield TokenChunk((), (), version, (), (), finish, values, top)
                return
            if not running.aborted:
                await self._wait_held()

    def _check(self, request: EngineRequest) -> None:
        ids = request.prompt_ids
        if not 1 <= len(ids) < self.context_length or request.max_tokens < (0 if request.prompt_logprobs else 1):
            raise EngineError(
                f"a prompt of {len(ids)} tokens and a completion of {request.max_tokens}: the model takes"
                f" 1 to {self.context_length - 1} tokens of prompt, and samples at least 1"
            )
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise EngineError(f"the prompt has token ids outside of the model's 0 to {self.vocab_size - 1}")

    async def _sample(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Sample under one version. If the last chunk has no finish reason, a weight change aborted the request."""
        version = self.version
        room = self.context_length - len(request.prompt_ids)
        body = wire.body(request, room, self._address.seeded, self._adapter)
        running = HttpStream(self._open(), body)
        async with aclosing(self._read(running)) as batches:
            async for data in batches:
                try:
                    chunk = _chunk(wire.events(data), version, request.top_logprobs) if data else _restarting(version)
                except EngineError as error:
                    if await is_healthy(self._open()):
                        raise
                    raise EngineLost(str(error)) from error  # its engine core has died
                if chunk is None:
                    continue
                if chunk.finish is not None:
                    async for _ in batches:  # to the end, so that the connection can be used again
                        pass
                yield chunk
                if chunk.finish is not None:
                    return
        if not running.aborted:
            await self._wait_held()

    async def _read(self, running: HttpStream) -> AsyncGenerator[bytes, None]:
        """Yield what vLLM sends for a request; b"" if it is being restarted, or has not answered since."""
        self._running.add(running)
        try:
            if self._restarting:
                yield b""
            async with aclosing(running.read()) as batches:
                async for data in batches:
                    self._restarting = not data
                    yield data
        finally:
            self._running.discard(running)

    async def _wait_held(self) -> None:
        """Wait for `hold` after vLLM aborted a request; raise if no weight change was the reason."""
        try:
            async with asyncio.timeout(_HOLD_TIMEOUT_S):  # unlike `wait_for`, it cannot lose a cancellation
                await self._held.wait()
        except TimeoutError:
            raise EngineError("vLLM aborted the request, and no weight change was the reason") from None

    @property
    def _adapter(self) -> str | None:
        """The name of the LoRA adapter to sample with."""
        policy = self._address.adapter
        return None if policy is None else wire.adapter_name(policy, self.version)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = session(self._address.location)
        return self._session


def _is_complete(event: wire.CompletionEvent) -> bool:
    """Whether vLLM finished a request; one that it aborted has no token."""
    return any(choice.finish_reason in _FINISH and choice.token_ids for choice in event.choices)


def _restarting(version: int) -> TokenChunk:
    return TokenChunk((), (), version, restarting=True)


def _chunk(events: Iterable[wire.CompletionEvent], version: int, top: int) -> TokenChunk | None:
    """Join events into one chunk; None if they have neither tokens nor a finish reason."""
    ids: list[int] = []
    tokens: list[wire.TokenLogprob] = []
    finish: FinishReason | None = None
    for event in events:
        for choice in event.choices:
            ids += choice.token_ids or ()
            tokens += choice.logprobs.content if choice.logprobs is not None else ()
            finish = _FINISH.get(choice.finish_reason or "", finish)
    if len(ids) != len(tokens):
        raise EngineError(f"vLLM sent {len(tokens)} logprobs for {len(ids)} tokens")
    if not ids and finish is None:
        return None
    likeliest = tuple(wire.top(token, top) for token in tokens) if top else ()
    return TokenChunk(tuple(ids), tuple(token.logprob for token in tokens), version, likeliest, finish=finish)
