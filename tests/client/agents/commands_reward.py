"""What a command said, against what it was asked for."""

from typing import Any

from leyden.episodes import Episode


def said(task: dict[str, int], result: dict[str, Any], episode: Episode) -> float:
    return float(result == {"said": task["n"]} and f"asking for {task['n']}\n" in episode.output)
