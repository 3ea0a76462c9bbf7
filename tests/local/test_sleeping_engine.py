"""An engine that does not fit beside training sleeps from the end of sampling until it gets the new weights.

vLLM frees memory only on a GPU. Here the embedded engine stands in its place, so that the order of calls is tested.
"""

from pathlib import Path
from typing import Any

import pytest
from trainings import Training

import leyden
from leyden.api.client import Remote
from leyden.engine.protocol import EngineRequest, Publication, WeightUpdate
from leyden.engine.torch.engine import TorchEngine
from leyden.learner.policy import Policy


class Recorder:
    """Records what happens to an engine that sleeps while a policy is trained."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        publish, hold, accumulate = TorchEngine.publish, Remote.hold_calls, Policy.accumulate
        logprobs, generate = Policy.logprobs, TorchEngine.generate

        async def recorded_sleep(engine: TorchEngine) -> None:
            self.add("sleeps")

        async def recorded_publish(engine: TorchEngine, update: WeightUpdate, version: int) -> Publication:
            self.add(f"gets version {version}")
            return await publish(engine, update, version)

        async def recorded_apply(engine: TorchEngine, update: WeightUpdate, version: int) -> None:
            self.add(f"applies version {version}")
            await publish(engine, update, version)

        async def recorded_hold(remote: Remote, run: str, policy: str) -> Any:
            self.add("calls held")
            return await remote.call(hold, run, policy)

        def recorded_accumulate(policy: Policy, *arguments: Any) -> Any:
            self.add("gradient")
            return accumulate(policy, *arguments)

        def recorded_logprobs(policy: Policy, samples: Any) -> Any:
            self.add("logprobs")
            return logprobs(policy, samples)

        def recorded_generate(engine: TorchEngine, request: EngineRequest) -> Any:
            self.add("samples")
            return generate(engine, request)

        monkeypatch.setattr(TorchEngine, "sleeps_while_training", True)
        monkeypatch.setattr(TorchEngine, "sleep", recorded_sleep)
        monkeypatch.setattr(TorchEngine, "apply", recorded_apply)
        monkeypatch.setattr(TorchEngine, "publish", recorded_publish)
        monkeypatch.setattr(TorchEngine, "generate", recorded_generate)
        monkeypatch.setattr(Remote, "hold_calls", recorded_hold)
        monkeypatch.setattr(Policy, "accumulate", recorded_accumulate)
        monkeypatch.setattr(Policy, "logprobs", recorded_logprobs)

    def add(self, event: str) -> None:
        """Record an event, once if it is repeated."""
        if self.events[-1:] != [event]:
            self.events.append(event)


def train(folder: Path, **settings: Any) -> None:
    Training(folder)
    leyden.train(folder / "small.toml", home=str(folder / "runs"), held_out=0, **settings)


def test_it_sleeps_before_anything_is_computed_and_wakes_with_the_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    training = {"steps": 1, "tasks_per_step": 8, "updates_per_step": 2}
    train(tmp_path, training=training)
    assert recorder.events == [
        *("samples", "calls held", "sleeps", "logprobs"),
        *("calls held", "sleeps", "gradient", "calls held", "applies version 1"),
        *("calls held", "sleeps", "gradient", "calls held", "gets version 2"),
    ]


def test_a_step_without_an_update_wakes_it_with_the_weights_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    train(tmp_path, reward=lambda task, result: 1.0, training={"steps": 2})
    step = ["samples", "calls held", "sleeps", "logprobs", "calls held", "gets version 0"]  # logprobs: for `kl_start`
    assert recorder.events == step * 2
