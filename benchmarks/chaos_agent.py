"""The agent of benchmarks/chaos.py: calls the model where there is one, takes a moment and returns its reward."""

import os
import time

import httpx


def act(task: dict[str, float]) -> float:
    """Do as the task says."""
    if task["calls_model"]:
        _call_model()
    time.sleep(task["s"])
    return 1.0


def _call_model() -> None:
    body = {"model": "spark", "max_tokens": 4, "messages": [{"role": "user", "content": "What is 2 plus 2?"}]}
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    httpx.post(url, json=body, headers=headers, timeout=60).raise_for_status()
