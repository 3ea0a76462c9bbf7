"""How much of a LoRA update is left in bfloat16, by the way in which the adapter is added.

The bundled model is trained with LoRA in float32, on its own samples. After some steps the change of their logprobs
since the first is compared with the same in bfloat16: with the adapter merged and rounded to the nearest number, with
the adapter's output added to that of each layer (PEFT, vLLM), and merged and rounded stochastically, as the embedded
engine and the trainer compute.

    python benchmarks/lora_rounding.py

The last line is one JSON object: by way and step, the share of the change that is left, and the KL divergence a token
from the model in float32. `ratio` is the share after the first of these steps, rounded stochastically over rounded to
the nearest number.
"""

import argparse
from copy import deepcopy

import torch
from reporting import add_out, report_result
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from leyden.config import AdapterConfig
from leyden.learner.lora import LoraAdapter
from leyden.models.source import BUNDLED

PROMPT, SAMPLES = 8, 8
STEPS = (10, 30, 100)


class Adapted:
    """The bundled model with an adapter, in one precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        in_bfloat16 = AutoModelForCausalLM.from_pretrained(str(BUNDLED["spark"]), dtype=torch.bfloat16).eval()
        self.served: PreTrainedModel = in_bfloat16.to(dtype)
        self.base = deepcopy(self.served)
        torch.manual_seed(0)
        self.adapter = LoraAdapter(self.served, AdapterConfig())
        named = self.adapter.model.named_parameters()
        self.trained = [parameter for name, parameter in named if ".lora_" in name]

    @torch.no_grad()
    def take(self, other: "Adapted") -> None:
        """Take the adapter of another, and merge it."""
        for ours, theirs in zip(self.trained, other.trained, strict=True):
            ours.copy_(theirs)
        self.adapter.publish()

    @torch.no_grad()
    def rounded_to_nearest(self) -> PreTrainedModel:
        """Return the model with the adapter merged and rounded to the nearest number."""
        merged, tensors = deepcopy(self.base), self.adapter.weights().tensors
        for name in {name.partition(".lora_")[0] for name in tensors}:
            added = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
            weight = merged.get_parameter(f"{name}.weight")
            weight.copy_(weight + added)
        return merged


def logprobs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the logprobs of all tokens after each token of the prompt's end and the completion."""
    return torch.log_softmax(model(ids, use_cache=False).logits[:, PROMPT - 1 : -1].float(), -1)


def main() -> None:
    """Train, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    add_out(parser)
    options = parser.parse_args()
    exact, rounded = Adapted(torch.float32), Adapted(torch.bfloat16)
    prompts = torch.randint(5, exact.served.config.vocab_size, (SAMPLES, PROMPT))
    ids = exact.served.generate(prompts, min_new_tokens=32, max_new_tokens=32, do_sample=True, top_k=0)
    sampled = ids[:, PROMPT:, None]
    with torch.no_grad():
        before = {model: logprobs(model.base, ids) for model in (exact, rounded)}
    optimiser = torch.optim.AdamW(exact.trained, lr=options.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    good = torch.arange(SAMPLES) % 2 * 2.0 - 1
    result: dict[str, dict[int, dict[str, float]]] = {way: {} for way in ("nearest", "unmerged", "stochastic")}
    for step in range(1, max(STEPS) + 1):
        advantages = good + 0.7 * torch.randn(SAMPLES)
        found = logprobs(exact.adapter.model, ids).gather(-1, sampled)[..., 0].mean(1)
        (-(found * advantages).mean()).backward()
        torch.nn.utils.clip_grad_norm_(exact.trained, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        exact.adapter.publish()
        if step not in STEPS:
            continue
        with torch.no_grad():
            rounded.take(exact)
            right = logprobs(exact.served, ids)
            change = (right - before[exact]).gather(-1, sampled).flatten()
            rounded.adapter.compute_unmerged()
            models = rounded.rounded_to_nearest(), rounded.adapter.model, rounded.served
            for way, model in zip(result, models, strict=True):
                here = logprobs(model, ids)
                left = (here - before[rounded]).gather(-1, sampled).flatten() @ change / (change @ change)
                apart = (right.exp() * (right - here)).sum(-1).mean()
                result[way][step] = {"left": round(left.item(), 2), "kl": round(apart.item(), 6)}
                print(f"step {step:3}  {way:10}  left {left.item():5.0%}  KL {apart.item():.1e}", flush=True)
    stochastic, nearest = (result[way][STEPS[0]]["left"] for way in ("stochastic", "nearest"))
    report = {"ratio": round(stochastic / nearest, 2), **result}
    report_result(report, options.out, learning_rate=options.learning_rate)


if __name__ == "__main__":
    main()
