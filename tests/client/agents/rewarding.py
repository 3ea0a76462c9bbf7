"""Agents that give rewards on the way."""

import asyncio
import time
from typing import Any

from anthropic import Anthropic
from openai import AsyncOpenAI, OpenAI

import leyden
from leyden.episodes import Episode

client: Any = None
anthropic: Any = None
async_client: Any = None


def connect() -> None:
    global client, anthropic, async_client
    client, anthropic, async_client = OpenAI(max_retries=0), Anthropic(max_retries=0), AsyncOpenAI(max_retries=0)


def question(number: int) -> Any:
    return {"model": "any", "messages": [{"role": "user", "content": f"Say number {number}"}]}


def act(task: dict[str, Any]) -> float:
    connect()
    match task["do"]:
        case "all":
            leyden.reward(0.1, name="early")
            first = client.chat.completions.create(**question(1))
            leyden.reward(0.2)
            for _ in client.chat.completions.create(**question(2), stream=True):
                pass
            leyden.reward(True, weight=0.5)
            second = anthropic.messages.create(**question(3), max_tokens=10)
            leyden.reward(0.9)
            leyden.reward(0.4)
            leyden.reward(0.5, call=first, name="later")
            leyden.reward(0.6, call=second.id, name="later")
            with leyden.span("tool", role="helper", size=3) as span:
                leyden.reward(0.7, span=span)
                client.chat.completions.create(**question(4))
        case "late":
            with leyden.span("asking", role="asker"):
                client.chat.completions.create(**question(1))
                leyden.reward(0.3)
            time.sleep(600)
        case "nan":
            leyden.reward(float("nan"))
        case "dialects":
            response = client.responses.create(model="any", input="Say number 1")
            completion = client.completions.create(model="any", prompt="Say number 2")
            leyden.reward(0.1, call=response)
            leyden.reward(0.2, call=completion.id)
        case "unknown":
            leyden.reward(1.0, call="call-of-nobody")
    return 1.0


async def branches(task: dict[str, Any]) -> float:
    """Each branch rewards its own call when both have made theirs."""
    connect()
    both = asyncio.Barrier(2)

    async def branch(number: int) -> None:
        await async_client.chat.completions.create(**question(number))
        await both.wait()
        leyden.reward(number)

    await asyncio.gather(branch(1), branch(2))
    return 1.0


def on_the_way(episode: Episode) -> float:
    return sum(reward.value for reward in episode.effective_rewards)


if __name__ == "__main__":
    with leyden.span("alone") as span:
        leyden.reward(1.0)
    leyden.reward(1.0, span=span)
    print("done")
