"""The agent of benchmarks/workers.py: one model call over a pooled connection."""

import json
import os
from typing import Any

import urllib3

QUESTION = {"model": "model", "messages": [{"role": "user", "content": "What is the answer?"}]}

connections = urllib3.PoolManager(maxsize=256)


def ask(base: str, key: str) -> Any:
    """Make one model call; return the answer's text."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    reply = connections.request("POST", f"{base}/chat/completions", body=json.dumps(QUESTION), headers=headers)
    assert reply.status == 200, reply.data
    return json.loads(reply.data)["choices"][0]["message"]["content"]


def answer(task: Any) -> float:
    """Return an agent that asks once."""
    return float(bool(ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])))
