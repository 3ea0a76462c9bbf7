"""Several policies behind one gateway: whose call it is, and that each has its own holds, versions and failures."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import openai
import pytest
from modelserving import END, ModelServer, model_server, spark
from scripted_engine import ScriptedEngine

from leyden.api.client import Remote
from leyden.engine.protocol import EngineLost, EngineRequest
from leyden.records import CallStatus, Version
from leyden.server.control.keys import KeyKind
from leyden.server.gateway.calls.scheduler import Scheduler
from leyden.server.gateway.served_model import ServedModel
from leyden.server.gateway.upstream.client import UpstreamClient

SETTINGS = {
    "routes": {"gpt-4o": "writer", "writer": "writer", "checker": "checker"},
    "role_routes": {"checker": "checker"},
    "roles": {"checker": "You check"},
}


class TwoPolicies:
    """A server whose policies `writer` and `checker` have an engine each, which say their names."""

    def __init__(self, server: ModelServer) -> None:
        self.server = server
        tokenizer, renderer = spark()
        self.broken = False

        def says(name: str) -> ScriptedEngine:
            def script(request: EngineRequest) -> Sequence[int]:
                if name == "checker" and self.broken:
                    raise EngineLost("it is gone")
                return tokenizer.encode(name + END)

            return ScriptedEngine(script)

        self.models = {
            name: ServedModel(name, says(name), renderer, tokenizer, Scheduler()) for name in ("writer", "checker")
        }
        assert server.service.gateway is not None
        server.service.gateway.models = self.models

    async def ask(self, model: str, role: str | None = None, system: str = "You write.") -> str | None:
        """What the server answers to a call."""
        headers = {"x-leyden-role": role} if role else {}
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello"}]
        async with openai.AsyncOpenAI(
            base_url=f"{self.server.url}/v1", api_key=self.server.key, max_retries=0
        ) as client:
            answer = await client.chat.completions.create(
                model=model,
                messages=messages,
                extra_headers=headers,
            )
        return answer.choices[0].message.content


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[TwoPolicies]:
    async with model_server(tmp_path) as running:
        made = TwoPolicies(running)
        await running.new_attempt(**SETTINGS)
        yield made


async def test_a_call_goes_to_the_policy_of_its_role_and_else_of_its_model_name(two: TwoPolicies) -> None:
    assert await two.ask("gpt-4o") == "writer"
    assert await two.ask("gpt-4o", role="checker") == "checker"
    assert await two.ask("gpt-4o", system="You check answers.") == "checker"
    assert await two.ask("checker") == "checker"
    assert await two.ask("gpt-4o", role="another") == "writer"
    episode = await two.server.episode()
    assert [call.policy for call in episode.calls] == ["writer", "checker", "checker", "checker", "writer"]
    with pytest.raises(openai.NotFoundError, match=r"route its role \(the call has none.*known only after the call"):
        await two.ask("gpt-5")
    with pytest.raises(openai.NotFoundError, match="add its role 'another' to the `roles` of a policy"):
        await two.ask("gpt-5", role="another")


async def test_a_role_of_the_upstream_goes_there_whatever_model_it_names(tmp_path: Path) -> None:
    async with model_server(tmp_path / "far") as far, model_server(tmp_path / "near") as near:
        two = TwoPolicies(near)
        far.lines = ["judged" + END, "judged again" + END]
        await far.new_attempt()
        role_routes = {**SETTINGS["role_routes"], "judge": "upstream"}
        await near.new_attempt(**{**SETTINGS, "role_routes": role_routes})
        assert near.service.gateway is not None
        near.service.gateway.upstream = UpstreamClient(f"{far.url}/v1", far.key)
        assert await two.ask("gpt-4o", role="judge") == "judged"
        assert await two.ask("checker", role="judge") == "judged again"
        assert await two.ask("gpt-4o", role="checker") == "checker"
        calls = (await near.episode()).calls
        assert [(call.policy, call.role) for call in calls] == [
            ("upstream", "judge"),
            ("upstream", "judge"),
            ("checker", "checker"),
        ]


async def test_a_conversation_that_changes_its_policy_is_rendered_again(two: TwoPolicies) -> None:
    await two.ask("gpt-4o")
    await two.ask("checker")
    first, second = (await two.server.episode()).calls
    assert (first.prompt_origin, second.prompt_origin) == ("fresh", "fresh")
    assert second.parent is None


async def test_holds_and_publications_are_of_one_policy(two: TwoPolicies) -> None:
    key = two.server.service.keyring.create(KeyKind.ADMIN, 3600)[0]
    async with Remote(two.server.url, key) as remote:
        await remote.hold_calls(two.server.run, "checker")
        assert [model.scheduler.held for model in two.models.values()] == [False, True]
        assert await two.ask("gpt-4o") == "writer"
        await remote.publish_version(two.server.run, Version("checker", 3))
        assert await two.ask("checker") == "checker"
        assert not two.models["checker"].scheduler.held


async def test_a_failure_of_one_engine_leaves_the_calls_of_the_other(two: TwoPolicies) -> None:
    assert await two.ask("writer") == "writer"
    two.broken = True
    with pytest.raises(openai.APIStatusError):
        await two.ask("checker")
    assert await two.ask("writer", system="You write on.") == "writer"
    calls = (await two.server.episode()).calls
    assert [(call.policy, call.status) for call in calls] == [
        ("writer", CallStatus.OK),
        ("checker", CallStatus.FAILED),
        ("writer", CallStatus.OK),
    ]
