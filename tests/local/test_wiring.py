"""What a configuration says of routes, roles, services and rewards is what its rollouts meet."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from leyden.config import read_config, read_file
from leyden.local.dev import run_dev
from leyden.store.database import Database
from leyden.store.read import queries

AGENT = """
import os
from openai import OpenAI


def solve(task, book):
    client = OpenAI()
    said = {}
    for name, system in (("gpt-frozen", "You judge."), ("mine", "You write.")):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": task["question"]}]
        answer = client.chat.completions.create(model=name, messages=messages, max_tokens=4)
        said[name] = answer.choices[0].message.content
    book.append(said)
    return {"frozen": said["gpt-frozen"], "pages": len(book), "key": os.environ.get("LEYDEN_UPSTREAM_KEY")}


def rank(group):
    return [place / len(group) for place, _ in enumerate(group)]
"""
CONFIG = """
agent = "agent.py:solve"
reward = "agent.py:rank"
tasks = "tasks.jsonl"
held_out = 0

[rollout]
agent_rewards = true

[services.book]
make = "builtins:list"

[routes]
gpt-frozen = "upstream"
mine = "policy"

[roles]
critic = "judge"

[upstream]
url = "{url}/v1"
"""


async def test_routes_roles_services_and_group_rewards_are_as_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str | None, dict[str, Any]]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.headers.get("authorization"), await request.json()))
        message = {"role": "assistant", "content": "frozen says"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"id": "x", "object": "chat.completion", "model": "gpt-frozen", "choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    monkeypatch.setenv("LEYDEN_UPSTREAM_KEY", "secret")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": "What is 1 plus 1?"}))
    (tmp_path / "small.toml").write_text(CONFIG.replace("{url}", site.name))
    config = read_config({**read_file(tmp_path / "small.toml"), "home": str(tmp_path / "runs")})
    caught, episodes = await run_dev(config, tasks=1, rollouts=3)
    await runner.cleanup()
    assert caught.outcomes == {"succeeded": 3}, caught.messages
    assert [episode.final_reward(0.0) for episode in episodes] == [0.0, pytest.approx(1 / 3), pytest.approx(2 / 3)]
    for episode in episodes:
        frozen, mine = episode.calls
        assert (episode.role(frozen), frozen.untrainable) == ("critic", "no tokens")
        assert (episode.role(mine), mine.untrainable) == (None, None)
        assert (episode.attempt.result["frozen"], episode.attempt.result["key"]) == ("frozen says", None)
    assert sorted(episode.attempt.result["pages"] for episode in episodes) == [1, 2, 3]  # one book, lent in turn
    assert asked[0][0] == "Bearer secret" and os.environ["LEYDEN_UPSTREAM_KEY"] == "secret"
    database = Database(caught.folder / "leyden.db", readonly=True)
    with database.reader.begin() as look:
        assert queries.get_run(look, caught.run).settings.agent_rewards
    database.close()
