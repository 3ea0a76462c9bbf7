"""A vLLM server that the run neither starts nor stops (`engine.url`).

`python -m leyden.engine.vllm MODEL` starts one that can receive weights. If the server stops answering the run ends,
because a restarted server has the weights of its model's folder and not the policy's.
"""

import asyncio
from typing import NoReturn

from leyden.engine.protocol import EngineError
from leyden.engine.vllm.http import call, control, is_healthy

_POLL_S, _MISSES = 1.0, 3
"""A server that misses this many polls in a row is gone; vLLM takes longer than that to restart."""


class RunningVllm:
    """A vLLM server at a Unix socket or URL."""

    def __init__(self, location: str) -> None:
        self.location = location

    async def start(self) -> None:
        """Check that the server answers and can receive weights. Raises `EngineError` with what to change."""
        async with control(self.location) as client:
            if not await is_healthy(client):
                raise EngineError(f"no vLLM answers at {self.location}: start it, or change `engine.url`")
            try:
                await call(client, "/collective_rpc", {"method": "leyden_checksums"})
            except EngineError as error:
                raise EngineError(
                    f"the vLLM at {self.location} cannot receive weights ({error}): start it with "
                    "`python -m leyden.engine.vllm MODEL`"
                ) from error

    async def wait_failed(self) -> NoReturn:
        """Wait until the server no longer answers, and raise `EngineError`."""
        missed = 0
        while missed < _MISSES:
            await asyncio.sleep(_POLL_S)
            async with control(self.location) as client:
                missed = 0 if await is_healthy(client) else missed + 1
        raise EngineError(f"the vLLM at {self.location} no longer answers: start it, then resume the run")

    async def recovered(self) -> bool:
        """Return False: it is not restarted."""
        return False

    async def stop(self) -> None:
        """Do nothing: the server keeps running."""
