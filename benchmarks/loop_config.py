"""The configuration of Leyden in the benchmarks of whole steps: what is not here is Leyden's default."""

from pathlib import Path
from typing import Any

AGENT = Path(__file__).with_name("loop_agent.py")


def configuration(plan: dict[str, Any], tasks: Path, **more: Any) -> dict[str, Any]:
    """Return a plan as a user would write it."""
    return {
        "run": "loop",
        "agent": f"{AGENT}:answer",
        "reward": f"{AGENT}:reward",
        "tasks": str(tasks),
        "sampling": {"max_tokens": plan["tokens"]},
        "training": {
            "steps": plan["warmup"] + plan["steps"],
            "tasks_per_step": plan["tasks"],
            "group_size": plan["group"],
            "learning_rate": plan["learning_rate"],
        },
        **more,
    }
