"""Which requests get tokens in a step."""

import asyncio
from collections import deque

import pytest
import torch
from small_engines import CONTEXT, VOCABULARY, make, make_request, prompt

from leyden.engine.torch.batch import ContinuousBatch
from leyden.engine.torch.kv_cache import KVCache
from leyden.engine.torch.llama import LlamaForward
from leyden.engine.torch.request import ActiveRequest

SLOTS = 16


class SteppedBatch:
    """A batch whose steps a test takes itself."""

    def __init__(self, prefill_pause: int) -> None:
        model = make("llama")
        kv_cache = KVCache(SLOTS, CONTEXT, torch.float32, model.device)
        forward = LlamaForward(model, kv_cache)
        self.batch = ContinuousBatch(
            forward,
            kv_cache,
            slots=SLOTS,
            prefill_tokens=256,
            prefill_pause=prefill_pause,
            prefix_caching=True,
            overlap=False,
            version=0,
        )
        self.requests = 0

    def add(self, requests: int) -> None:
        """Admit requests with prompts of 10 tokens."""
        loop = asyncio.get_running_loop()
        numbers = range(self.requests, self.requests + requests)
        made = (make_request(prompt(i, 10), 100, f"s{i}") for i in numbers)
        self.batch.admit(deque(ActiveRequest(one, CONTEXT, VOCABULARY, loop, None) for one in made), deque())
        self.requests += requests

    @torch.inference_mode()
    def prompts_of_steps(self, steps: int) -> list[int]:
        """Take steps and return how many prompts each computed."""
        found = []
        for _ in range(steps):
            before = self.batch.stats.prompt_computed
            self.batch.step()
            found.append((self.batch.stats.prompt_computed - before) // 10)
        return found


@pytest.mark.parametrize(("pause", "expected"), [(0, [1, 1, 0, 0]), (3, [0, 0, 0, 2])])
async def test_a_few_prompts_wait_while_many_requests_decode(pause: int, expected: list[int]) -> None:
    stepped = SteppedBatch(pause)
    stepped.add(10)
    assert stepped.prompts_of_steps(1) == [10]
    stepped.add(1)
    first = stepped.prompts_of_steps(1)
    stepped.add(1)
    assert first + stepped.prompts_of_steps(3) == expected
    assert stepped.batch.stats.sampled_tokens == 5 * 10 + sum((4 - at) * n for at, n in enumerate(expected))


async def test_many_prompts_do_not_wait() -> None:
    stepped = SteppedBatch(3)
    stepped.add(4)
    assert stepped.prompts_of_steps(1) == [4]
    stepped.add(2)
    assert stepped.prompts_of_steps(2) == [2, 0]
