"""An agent that does what its task says, as a function or as a command: mostly well, else as badly as can be."""

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import urllib3


def act(task: dict[str, Any]) -> float:
    match task["do"]:
        case "ask":
            return ask(task["n"])
        case "raise":
            raise ValueError("the agent cannot go on")
        case "block":
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            threading.Event().wait()
        case "burn":
            while True:
                pass
        case "fork":
            leave_a_daemon()
        case "print":
            for _ in range(200):
                print("x" * 9_999)
        case "exit":
            os._exit(9)
        case "fall":
            signal.pthread_kill(threading.get_ident(), signal.SIGSEGV)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def ask(n: int) -> float:
    body = {"model": "any", "messages": [{"role": "user", "content": f"Say number {n}"}]}
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    answer = urllib3.request("POST", url, json=body, headers=headers, retries=False, timeout=600)  # its default is 3 s
    return float(json.loads(answer.data)["choices"][0]["message"]["content"] == f"{n}")


def leave_a_daemon() -> None:
    """Fork twice, with a session in between, as daemons do."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.wait()


if __name__ == "__main__":
    print(json.dumps(act(json.load(sys.stdin))))
