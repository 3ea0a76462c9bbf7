"""Agents that ask for number 1 once and raise whatever their client raises; as a command, with the OpenAI SDK."""

import os
from typing import Any

import aiohttp
from openai import OpenAI

QUESTION: Any = [{"role": "user", "content": "Say number 1"}]


async def by_aiohttp(task: Any) -> float:
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url, body = f"{os.environ['OPENAI_BASE_URL']}/chat/completions", {"model": "any", "messages": QUESTION}
    async with (
        aiohttp.ClientSession(headers=headers, raise_for_status=True) as session,
        session.post(url, json=body) as response,
    ):
        return float((await response.json())["choices"][0]["message"]["content"])


def by_streamed_response(task: Any) -> float:
    with OpenAI(max_retries=0).responses.stream(model="any", input="Say number 1") as stream:
        return float(stream.get_final_response().output_text)


def by_openai() -> float:
    answer = OpenAI(max_retries=0).chat.completions.create(model="any", messages=QUESTION)
    return float(answer.choices[0].message.content or "nan")


if __name__ == "__main__":
    print(by_openai())
