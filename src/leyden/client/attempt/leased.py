"""One leased attempt in a worker, from its lease until its end is reported."""

import asyncio

from leyden.client.host_protocol import AttemptEnd
from leyden.records import Reward
from leyden.wire import Lease


class ActiveAttempt:
    """One leased attempt. Whoever settles it first says how it ended."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.id = lease.attempt.id
        self.settled: asyncio.Future[AttemptEnd | None] = asyncio.get_running_loop().create_future()
        """None: the server has ended the attempt, and there is nothing to report."""
        self.left = asyncio.Event()
        """Its code has returned, or the process that ran it is gone."""
        self.rewards: list[Reward] = []
        """Those that it gave on its way, in order."""
        self.task: asyncio.Task[None] | None = None

    def settle(self, ended: AttemptEnd | None) -> None:
        """Say how it ended, unless that was said before."""
        if not self.settled.done():
            self.settled.set_result(ended)

    def abandon(self) -> None:
        """Leave it as it is: nothing more is done for it here."""
        if self.task is not None:
            self.task.cancel()
