"""The worker's state of one attempt, from its lease until its end is reported."""

import asyncio

from leyden.api.wire import Lease
from leyden.client.host_protocol import AttemptEnd
from leyden.records import Reward


class ActiveAttempt:
    """A leased attempt that this worker runs.

    Several parties may end it: its code returns, its time is up, its process dies, or the server cancels it. Each calls
    `resolve`; the first call decides how the attempt ended, and later calls have no effect.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.id = lease.attempt.id
        self.end: asyncio.Future[AttemptEnd | None] = asyncio.get_running_loop().create_future()
        """How the attempt ended; None if the server ended it and wants no report."""
        self.released = asyncio.Event()
        """Set when its code has returned, or the process that ran it is gone."""
        self.step_rewards: list[Reward] = []
        """Rewards that the agent gave while it ran, in order."""
        self.task: asyncio.Task[None] | None = None

    def resolve(self, end: AttemptEnd | None) -> None:
        """Decide how the attempt ended, unless that is decided already."""
        if not self.end.done():
            self.end.set_result(end)

    def abandon(self) -> None:
        """Cancel what this worker does for the attempt, without a report."""
        if self.task is not None:
            self.task.cancel()
