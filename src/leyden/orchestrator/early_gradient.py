"""Accumulates the gradient of groups that have finished while others of the step run.

What the whole update divides by is known when all have finished: the gradient is divided then. Groups that finish while
others are computed are computed together.
"""

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from leyden.learner.protocol import Learner, Update
from leyden.orchestrator.credit.samples import Groups, SelectedRollout, StepAccounting
from leyden.orchestrator.updates import UpdateBuilder


class EarlyGradient:
    """The gradient of one policy, whose steps have one update each."""

    def __init__(self, learner: Learner, policy: str, builder: UpdateBuilder) -> None:
        self._learner, self._policy, self._builder = learner, policy, builder
        self._waiting: list[Sequence[SelectedRollout]] = []
        self._computing: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._taken: list[Sequence[SelectedRollout]] = []
        self._accounting, self._number, self._samples = StepAccounting(), 0, 0

    def add(self, group: Sequence[SelectedRollout]) -> None:
        """Compute the gradient of a group that the step trains on. Raises what went wrong with those before."""
        self._waiting.append(group)
        if self._computing is None or self._computing.done():
            if self._computing is not None:
                self._computing.result()
            self._computing = asyncio.create_task(self._compute())

    async def _compute(self) -> None:
        while self._waiting:
            part = await self._take()
            if part.samples:
                await self._learner.accumulate_part(self._policy, part)

    async def _take(self) -> Update:
        """Prepare the groups that wait."""
        groups, self._waiting = self._waiting, []
        self._taken += groups
        part, number = await self._builder.prepare_part(groups, self._accounting)
        self._number += number
        self._samples += len(part.samples)
        return part

    async def prepare(self, groups: Groups, accounting: StepAccounting) -> list[Update]:
        """Return what is left of the update of a step when all its groups have finished; nothing if it has no samples.

        What was counted of all of them is added to `accounting`.
        """
        self._waiting = []
        if self._computing is not None:
            await self._computing
        self._waiting = [group for group in groups if not any(group is one for one in self._taken)]
        assert len(self._taken) + len(self._waiting) == len(groups), "a step trains on all groups that were added"
        rest = await self._take()
        scale = 1 / max(self._number, 1)
        self._accounting.scale_weights(scale)
        accounting.add(self._accounting)
        found = [replace(rest, scale=scale)] if self._samples else []
        self._begin()
        return found

    async def close(self) -> None:
        """End what is being computed, if a run ends before its step."""
        if self._computing is not None:
            self._computing.cancel()
            await asyncio.wait({self._computing})
