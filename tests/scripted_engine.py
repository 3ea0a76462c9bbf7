"""An engine that returns given tokens: for tests, and to measure everything around an engine."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from leyden.engine.protocol import EngineError, EngineRequest, FinishReason, TokenChunk

Script = Callable[[EngineRequest], Sequence[int]]


class ScriptedEngine:
    """Completes each request with the tokens that the script returns for it, all of probability 1.

    A script without a stop token ends by its length. The engine fails at a negative number in the script.
    """

    context_length = 32_768
    vocab_size = 2**17
    reports_allowed_mass = False

    def __init__(self, script: Script, chunk_tokens: int = 4, delay_s: float = 0.0, keep_requests: bool = True) -> None:
        self.script = script
        self._keep_requests = keep_requests
        self.chunk_tokens = chunk_tokens
        self.delay_s = delay_s
        self.version = 0
        self.requests: list[EngineRequest] = []
        self.cancelled = 0
        self.ended_sessions: list[str] = []

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Return the script's tokens, chunk by chunk."""
        if self._keep_requests:
            self.requests.append(request)
        if request.prompt_logprobs:
            following = request.prompt_ids[1:]
            top = tuple(((id, 0.0),) * min(1, request.top_logprobs) for id in following)
            finish: FinishReason | None = None if request.max_tokens else "length"
            yield TokenChunk((), (), self.version, (), (), finish, (0.0,) * len(following), top)
            if finish is not None:
                return
        script = self.script(request)
        ids = tuple(script[: request.max_tokens])
        stop = next((at + 1 for at, id in enumerate(ids) if id in request.stop_ids), None)
        ids = ids[:stop]
        done = 0
        try:
            while done < len(ids):
                await asyncio.sleep(self.delay_s)
                chunk = ids[done : done + self.chunk_tokens]
                if min(chunk) < 0:
                    raise EngineError("the script makes the engine fail here")
                done += len(chunk)
                finish = None if done < len(ids) else "stop" if stop else "length"
                top = tuple(((id, 0.0),) * min(1, request.top_logprobs) for id in chunk)
                yield TokenChunk(chunk, (0.0,) * len(chunk), self.version, top, finish=finish)
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += done < len(ids)
            raise

    async def is_ready(self) -> bool:
        """Answer, as a replica does that runs."""
        return True

    def end_session(self, session: str) -> None:
        """Record that the session has ended, if requests are kept."""
        if self._keep_requests:
            self.ended_sessions.append(session)

    def hold(self) -> None:
        """Do nothing: there are no weights."""

    def resume(self, version: int) -> None:
        """Use another version from now on."""
        self.version = version
