"""An engine that plays given tokens: for tests, and for measuring everything around an engine."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from leyden.engine.protocol import EngineError, EngineRequest, FinishReason, TokenChunk

Script = Callable[[EngineRequest], Sequence[int]]


class ScriptedEngine:
    """Answers each request with what its script says, so many tokens a piece, as if drawn with certainty.

    The script may end in a stop token; without one the completion runs into its length limit. A negative number in the
    script is where the engine dies.
    """

    context_length = 32_768
    vocab_size = 2**17

    def __init__(self, script: Script, piece: int = 4, delay_s: float = 0.0) -> None:
        self.script = script
        self.piece = piece
        self.delay_s = delay_s
        self.version = 0
        self.asked: list[EngineRequest] = []
        self.cancelled = 0
        self.ended_sessions: list[str] = []

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Play the script."""
        self.asked.append(request)
        script = self.script(request)
        ids = tuple(script[: request.max_tokens])
        stop = next((at + 1 for at, id in enumerate(ids) if id in request.stop_ids), None)
        ids = ids[:stop]
        done = 0
        try:
            while done < len(ids):
                await asyncio.sleep(self.delay_s)
                some = ids[done : done + self.piece]
                if min(some) < 0:
                    raise EngineError("the script says that the engine dies here")
                done += len(some)
                finish: FinishReason | None = None if done < len(ids) else "stop" if stop else "length"
                top = tuple(((id, 0.0),) * min(1, request.top_logprobs) for id in some)
                yield TokenChunk(some, (0.0,) * len(some), self.version, top, finish=finish)
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += done < len(ids)
            raise

    def end_session(self, session: str) -> None:
        """Record that the session is over."""
        self.ended_sessions.append(session)

    def hold(self) -> None:
        """Do nothing: there are no weights."""

    def resume(self, version: int) -> None:
        """Name another version from now on."""
        self.version = version
