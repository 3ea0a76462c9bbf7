"""How an attempt ended, as the server is told: the outcome, the result, and the reward where there is one."""

import logging
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from leyden.client.contact import Contact
from leyden.client.messages import Ended
from leyden.client.rewards import NoReward, RewardFunction
from leyden.episodes import Episode
from leyden.outcomes import Ending, Outcome
from leyden.records import Reward
from leyden.remote import RemoteError
from leyden.wire import Finish, Lease

_log = logging.getLogger("leyden.worker")


class Reporter:
    """Scores what succeeded, and insists on being heard."""

    def __init__(self, contact: Contact, reward: RewardFunction | None) -> None:
        self._contact, self._reward = contact, reward

    @property
    def scores(self) -> bool:
        """Whether the run has a reward function."""
        return self._reward is not None

    async def report(self, lease: Lease, ended: Ended, given: Sequence[Reward] = ()) -> None:
        """Finish an attempt; returns when the server has acknowledged it, or knows of no such attempt.

        The rewards that it has `given` on its way go with its end: in one piece with what they belong to, and for
        nothing where the attempt is tried again.
        """
        finish = await self._finish(lease, ended, given)
        await self._send(lease, replace(finish, rewards=(*given, *finish.rewards), output=ended.output))

    async def give_back(self, lease: Lease) -> None:
        """Finish an attempt that this worker will not bring to its end, so that it is tried again at once."""
        message = f"worker {lease.attempt.worker} was stopped and gave it back"
        await self._send(lease, Finish(Outcome(Ending.LOST, message)))

    async def _finish(self, lease: Lease, ended: Ended, given: Sequence[Reward]) -> Finish:
        result = msgspec.json.decode(ended.result)
        if ended.outcome.ending is not Ending.SUCCEEDED:
            return Finish(ended.outcome, result)
        value, source = ended.reward, "agent"
        if self._reward is not None:
            try:
                value, source = await self._score(self._reward, lease, result, ended.output, given), "reward"
            except NoReward as error:
                return Finish(Outcome(Ending.NO_REWARD, str(error)), result)
        return Finish(ended.outcome, result, () if value is None else (Reward("final", value, source=source),))

    async def _score(
        self, reward: RewardFunction, lease: Lease, result: object, output: str, given: Sequence[Reward]
    ) -> float:
        async def episode() -> Episode:
            attempt = lease.attempt
            try:
                found = await self._contact.insist(lambda: self._contact.remote.episode(attempt.run, attempt.id))
            except RemoteError as refused:
                raise NoReward(f"the reward function asks for an episode that cannot be read: {refused}") from refused
            return replace(found, rewards=(*found.rewards, *given), output=output)

        return await reward.score(lease.task.input, result, episode)

    async def _send(self, lease: Lease, finish: Finish) -> None:
        run, attempt = lease.attempt.run, lease.attempt.id
        try:
            await self._contact.insist(lambda: self._contact.remote.finish(run, attempt, finish))
        except RemoteError as refused:
            if refused.status in (401, 403):
                raise  # the worker's key is no good: nothing it does will be
            if finish.rewards or finish.result is not None:  # a second source of the final reward, say, or no such call
                failed = finish.outcome.ending is not Ending.SUCCEEDED
                outcome = finish.outcome if failed else Outcome(Ending.AGENT_ERROR, str(refused))
                await self._send(lease, Finish(outcome, output=finish.output))
            elif refused.status == 404:
                _log.warning("attempt %s is not known any more: %s", attempt, refused)
            else:
                raise
