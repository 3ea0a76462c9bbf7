"""Automatic rewards are recorded beside the others, once, and those of an earlier start are not in force."""

from leyden.api.client import Remote
from leyden.api.wire import FinishRequest, GroupSpec, LeaseRequest, RunSpec
from leyden.orchestrator.rollouts.signals import reward_automatically
from leyden.outcomes import Ending, Outcome
from leyden.records import Call, Reward, RewardKind, Task
from leyden.rl.signals import SignalKind, SignalRules


async def test_a_signal_becomes_a_reward_in_the_record(remote: Remote) -> None:
    await remote.create_run(RunSpec("r"))
    await remote.enqueue("r", GroupSpec("g", Task("t", {}), 1))
    (lease,) = await remote.lease(LeaseRequest("w", 1, 0.0, "r"))
    attempt = lease.attempt.id
    call = Call(id="c", completion_ids=(1, 2), logprobs=(-1.0, -1.0), finish="length", response={"role": "assistant"})
    await remote.record_calls("r", attempt, [call])
    await remote.finish("r", attempt, FinishRequest(Outcome(Ending.SUCCEEDED), None, (Reward("final", 1.0),)))
    found = await remote.group_episodes("r", "g")
    assert await reward_automatically(remote, found, SignalRules(), 1) == found
    for weight in (-0.5, -0.25, -0.25):
        rules = SignalRules({SignalKind.CUT: weight})
        (given,) = await reward_automatically(remote, await remote.group_episodes("r", "g"), rules, 1)
        assert [transition.reward for transition in given.transitions] == [weight]
        assert given.final_reward(0.0) == 1.0  # apart from the task's reward
    (recorded,) = await remote.group_episodes("r", "g")
    assert [transition.reward for transition in recorded.transitions] == [-0.25]
    automatic = [reward for reward in recorded.rewards if reward.kind is RewardKind.AUTOMATIC]
    assert [reward.weight for reward in automatic] == [-0.5, -0.25]
    assert all(reward.source == "signals" and reward.why for reward in automatic)
