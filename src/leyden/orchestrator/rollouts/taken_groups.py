"""Which groups each step trains on, in a file: a step that is repeated after a kill takes the same ones.

So it computes the same weights again, and the version that a token names is still the one that sampled it.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from leyden.orchestrator.disk_room import when_there_is_room
from leyden.orchestrator.json_lines import append_line, keep_lines, read_lines


class TakenGroups:
    """The groups that the steps of one policy have taken, by their positions."""

    def __init__(self, path: Path, policy: str, warn: Callable[[str], None]) -> None:
        self._path, self._policy, self._warn = path, policy, warn
        keep_lines(path, lambda line: True)
        self._known: dict[int, Sequence[int]] = {
            line["step"]: line["groups"] for line in read_lines(path) if line["policy"] == policy
        }

    def of(self, step: int) -> Collection[int]:
        """Return the groups that a step has taken before the run was killed; none if it was not made."""
        return self._known.get(step, ())

    async def add(self, step: int, positions: Sequence[int]) -> None:
        """Keep the groups of a step. Without room for them the step waits."""
        if positions != self.of(step):
            line = {"step": step, "policy": self._policy, "groups": positions}
            await when_there_is_room(f"the groups of step {step}", partial(append_line, self._path, line), self._warn)
