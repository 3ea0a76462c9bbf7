"""Agents and reward functions that are lent services."""

import asyncio
import json
import os
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("SERVICED", "."))


class Database:
    """A service that notices when two use it at once, and may fall ill."""

    def __init__(self) -> None:
        self.name = f"{os.getpid()}-{id(self)}"
        (FOLDER / f"made-{self.name}").touch()
        self.ill = False
        self._users = 0
        self._lock = threading.Lock()

    def use(self) -> str:
        with self._lock:
            self._users += 1
            assert self._users == 1, "two use it at once"
        time.sleep(0.05)
        with self._lock:
            self._users -= 1
        return self.name

    def healthy(self) -> bool:
        return not self.ill

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        (FOLDER / f"closed-{self.name}").touch()


async def make_slowly() -> Database:
    await asyncio.sleep(0.01)
    return Database()


def broken() -> None:
    raise OSError("no disk")


def solve(task: dict[str, Any], db: Database) -> str:
    if task.get("do") == "hurt":
        db.ill = True
    return db.use()


async def solve_async(task: dict[str, Any], *, db: Database, site: str = "") -> str:
    return f"{await asyncio.to_thread(db.use)} {site}".strip()


class Agent:
    """An agent that is a class, and is lent a service too."""

    def __call__(self, task: dict[str, Any], db: Database) -> str:
        return db.use()


def score(result: str, db: Database) -> float:
    """The reward function's own is in another process."""
    return float(db.name.partition("-")[0] == str(os.getpid()) and result != db.use())


def fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return f"{answer.status}"


def visit(task: dict[str, Any], site: str) -> dict[str, str]:
    return {"site": site, "status": fetch(site)}


def same_site(result: dict[str, str], site: str) -> float:
    """What the agent was lent the reward function sees too."""
    return float(result["site"] == site and fetch(site) == "200")


def main() -> None:
    """An agent that is a command."""
    address = os.environ["LEYDEN_SERVICE_SITE"]
    print(json.dumps({"site": address, "status": fetch(address), "grader": "LEYDEN_SERVICE_GRADER" in os.environ}))


if __name__ == "__main__":
    if "serve" in sys.argv:
        print("cannot bind", file=sys.stderr)
        sys.exit(3)
    main()
