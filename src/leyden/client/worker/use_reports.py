"""Measures what a worker and its agents use, for the page of workers."""

import asyncio

from leyden.process.usage import ResourceMeter, ResourceUse

_INTERVAL_S = 5.0


class UseReports:
    """Measures every five seconds. Each measurement goes with one request for rollouts."""

    def __init__(self) -> None:
        self._latest: ResourceUse | None = None

    async def run(self) -> None:
        """Measure until cancelled."""
        meter = ResourceMeter()
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self._latest = await asyncio.to_thread(meter.measure)

    def take(self) -> ResourceUse | None:
        """Return the last measurement, unless it was returned before."""
        latest, self._latest = self._latest, None
        return latest
