"""An engine that crashes: the rollouts whose calls were in flight are retried without charge."""

from pathlib import Path
from typing import NoReturn

import openai
import pytest
from modelserving import model_server

from leyden.engine.protocol import EngineError, EngineLost
from leyden.outcomes import Ending, Outcome
from leyden.records import State
from leyden.remote import Remote
from leyden.server.keys import KeyKind
from leyden.wire import FinishRequest


@pytest.mark.parametrize(
    ("error", "state"),
    [(EngineLost("the connection to vLLM is lost"), State.QUEUED), (EngineError("out of memory"), State.FINISHED)],
)
async def test_only_an_attempt_that_a_crash_of_the_engine_failed_is_not_charged(
    tmp_path: Path, error: EngineError, state: State
) -> None:
    def fail(prompt: str) -> NoReturn:
        raise error

    async with model_server(tmp_path) as server:
        server.say = fail
        key = await server.new_attempt(max_attempts=1)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            with pytest.raises(openai.InternalServerError, match=str(error)):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
        async with Remote(server.url, server.service.keyring.create(KeyKind.WORKER, 60)[0]) as worker:
            failed = FinishRequest(Outcome(Ending.ENGINE_ERROR, "503"))
            assert (await worker.finish(server.run, server.attempt, failed)).rollout.state is state
