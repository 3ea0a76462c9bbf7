"""The learner in this process: an update is accumulated, made, saved and restored by the name of its policy."""

from pathlib import Path

import torch
from smallpolicy import OBJECTIVE, small_policy, some_samples

from leyden.config import CheckpointConfig
from leyden.learner.checkpoint import Checkpoints
from leyden.learner.local import LocalLearner, TrainedPolicy
from leyden.learner.policy import Policy
from leyden.learner.protocol import TrainerState, Update
from leyden.models.source import ModelSource

SPARK = ModelSource("spark", Path(__file__).parents[2] / "src/leyden/models/spark")


def learner_of(policy: Policy, folder: Path) -> LocalLearner:
    checkpoints = Checkpoints(folder, "mine", SPARK, CheckpointConfig())
    return LocalLearner({"mine": TrainedPolicy(policy, OBJECTIVE, checkpoints)})


async def test_a_policy_learns_and_is_restored_by_its_name(tmp_path: Path) -> None:
    policy, samples = small_policy(), some_samples()
    with learner_of(policy, tmp_path) as learner:
        assert await learner.restore("mine") == TrainerState(policy="mine")
        assert await learner.start_step("mine", 1) == policy.learning_rate
        before = await learner.logprobs("mine", samples)
        assert await learner.divergence("mine", samples, [one.tolist() for one in before]) == 0.0
        assert (await learner.accumulate("mine", Update(samples))).grad_norm > 0
        assert (await learner.logprobs("mine", samples))[0].tolist() == before[0].tolist()  # nothing is written yet
        await learner.apply("mine")
        after = await learner.logprobs("mine", samples)
        assert after[0].tolist() != before[0].tolist()
        state = TrainerState(step=1, policy="mine", version=1)
        await learner.save("mine", state)
        published = dict(learner.weights("mine").tensors())
        assert torch.equal(published["model.norm.weight"], policy.model.state_dict()["model.norm.weight"])
    with learner_of(small_policy(seed=9), tmp_path) as again:
        assert await again.restore("mine") == state
        assert [one.tolist() for one in await again.logprobs("mine", samples)] == [one.tolist() for one in after]
        assert await again.version_of("mine", 1) == 1
