"""An agent that asks once, over connections that it keeps."""

import json
import os
from typing import Any

import urllib3

connections = urllib3.PoolManager(maxsize=64)


def act(task: dict[str, Any]) -> float:
    body = {"model": "any", "messages": [{"role": "user", "content": f"Say number {task['n']}"}]}
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    reply = connections.request("POST", url, body=json.dumps(body), headers=headers)
    return float(json.loads(reply.data)["choices"][0]["message"]["content"] == str(task["n"]))
