"""Records on the server what a step computed for each call; a repeated step overwrites what it recorded."""

from leyden.api.client import Remote
from leyden.orchestrator.credit.samples import StepAccounting
from leyden.records import StepCredits

_CREDITS_PER_REQUEST = 10_000
"""Calls whose credits are recorded in one transaction."""


class CreditRecorder:
    """Records the credits of one policy of a run."""

    def __init__(self, remote: Remote, run: str, policy: str) -> None:
        self._remote, self._run, self._policy = remote, run, policy

    async def record(self, step: int, accounting: StepAccounting) -> None:
        """Record the credits of a step."""
        for start in range(0, len(accounting.credits), _CREDITS_PER_REQUEST):
            some = tuple(accounting.credits[start : start + _CREDITS_PER_REQUEST])
            await self._remote.record_credits(self._run, StepCredits(step, some, self._policy))
