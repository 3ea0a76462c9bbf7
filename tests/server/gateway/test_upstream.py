"""Models served elsewhere: here, by another Leyden server, through the same API."""

from pathlib import Path
from typing import Any

import openai
import pytest
from modelserving import END, call, model_server

from leyden.records import CallStatus
from leyden.server.gateway.upstream import Upstream

LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
QUESTION: Any = {"role": "user", "content": "Well?"}


async def test_a_call_is_passed_on_and_recorded_without_tokens(tmp_path: Path) -> None:
    async with model_server(tmp_path / "far") as far, model_server(tmp_path / "near") as near:
        far.lines = [call("look", '{"at": "it"}') + END, "Seen." + END]
        await far.new_attempt()
        key = await near.new_attempt(routes={"gpt": "upstream", "own": "spark"})
        assert near.service.gateway is not None
        near.service.gateway.upstream = Upstream(f"{far.url}/v1", far.key)
        async with openai.AsyncOpenAI(base_url=f"{near.url}/v1", api_key=key, max_retries=0) as client:
            first = await client.chat.completions.create(model="gpt", messages=[QUESTION], tools=[LOOK])
            (made,) = first.choices[0].message.tool_calls or ()
            messages: Any = [
                QUESTION,
                first.choices[0].message,
                {"role": "tool", "tool_call_id": made.id, "content": "x"},
            ]
            said = ""
            async for chunk in await client.chat.completions.create(
                model="gpt", messages=messages, tools=[LOOK], stream=True
            ):
                said += chunk.choices[0].delta.content or "" if chunk.choices else ""
            assert said == "Seen."
            near.lines = ["Mine" + END]
            own = await client.chat.completions.create(model="own", messages=[QUESTION])
            assert own.choices[0].message.content == "Mine"
            with pytest.raises(openai.NotFoundError, match="routes"):
                await client.chat.completions.create(model="other", messages=[QUESTION])
        episode = await near.check(calls=3)
        assert [c.untrainable for c in episode.calls] == ["no tokens", "no tokens", None]
        assert [c.policy for c in episode.calls] == ["upstream", "upstream", "spark"]
        assert [m["role"] for m in episode.messages(episode.calls[1])] == ["user", "assistant", "tool"]
        assert len(episode.calls[1].messages) < 3  # it holds only what it adds
        assert (await far.check(calls=2)).calls[1].made == "continued"


async def test_an_upstream_that_is_away_or_refuses_is_said_to(tmp_path: Path) -> None:
    async with model_server(tmp_path) as near:
        key = await near.new_attempt(routes={"gpt": "upstream"})
        assert near.service.gateway is not None
        async with openai.AsyncOpenAI(base_url=f"{near.url}/v1", api_key=key, max_retries=0) as client:
            near.service.gateway.upstream = Upstream("http://127.0.0.1:1/v1")
            with pytest.raises(openai.InternalServerError, match="cannot be reached"):
                await client.chat.completions.create(model="gpt", messages=[QUESTION])
            near.service.gateway.upstream = Upstream(f"{near.url}/v1", "a wrong key")
            with pytest.raises(openai.InternalServerError, match="not a key"):
                await client.chat.completions.create(model="gpt", messages=[QUESTION])
        assert [c.status for c in (await near.check(calls=2)).calls] == [CallStatus.FAILED] * 2
