"""What the engine says it drew with is what the trainer computes: to 1e-4 in float32, turn after turn."""

import torch
from transformers import AutoModelForCausalLM

from leyden.config import TrainingConfig
from leyden.engine.protocol import EngineRequest
from leyden.engine.torch.engine import TorchEngine
from leyden.learner.policy import Policy
from leyden.learner.sample import Sample
from leyden.models.source import BUNDLED
from leyden.records import Sampling


async def test_the_engines_logprobs_are_the_trainers() -> None:
    model = AutoModelForCausalLM.from_pretrained(str(BUNDLED["spark"]), dtype=torch.float32).eval()
    engine = TorchEngine(model, slots=4)
    samples = []
    try:
        for session in range(3):
            prompt: tuple[int, ...] = (1, 50, 60, 70, 80)
            for turn in range(3):
                sampling = Sampling(temperature=1.0 - 0.2 * session, seed=10 * session + turn)
                request = EngineRequest(prompt, sampling, stop_ids=(2,), max_tokens=30, session=str(session))
                pieces = [piece async for piece in engine.generate(request)]
                ids = tuple(id for piece in pieces for id in piece.ids)
                logprobs = tuple(value for piece in pieces for value in piece.logprobs)
                samples.append(
                    Sample(
                        call=f"{session}-{turn}",
                        rollout=session,
                        call_index=turn,
                        prompt_ids=prompt,
                        completion_ids=ids,
                        token_indices=range(len(ids)),
                        sampler_logprobs=logprobs,
                        temperature=sampling.temperature,
                    )
                )
                prompt = (*prompt, *ids, 1, 90 + turn, 100)
    finally:
        engine.close()
    for layout in ("tree", "rows"):
        policy = Policy(model, TrainingConfig(layout=layout))
        for sample, found in zip(samples, policy.logprobs(samples), strict=True):
            torch.testing.assert_close(found, torch.tensor(sample.sampler_logprobs), atol=1e-4, rtol=0)
