"""What TRL's own code says of some tensors, written to trl.json beside this file.

TRL is no dependency: run this in an environment of its own that has `trl==1.16.0`. The trainer is TRL's, made whole
with a model of a few parameters; only the logprobs of tokens are given to it instead of computed, so that its loss and
its gradient are recorded as functions of them.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

LENGTHS = (6, 2, 4, 1)
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.28},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "dual clip": {"loss_type": "dapo", "delta": 1.6},
    "grpo with KL": {"loss_type": "grpo", "beta": 0.3},
    "gspo with KL": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.3},
    "cispo with KL": {"loss_type": "cispo", "epsilon_high": 1.28, "beta": 0.3},
}
DEFAULTS = {
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "beta": 0.0,
    "use_bias_correction_kl": False,
    "max_completion_length": 10,
}


class Given(GRPOTrainer):
    """TRL's trainer, with logprobs that it is given."""

    logprobs: Tensor

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
        return self.logprobs, torch.ones_like(self.logprobs), None


def trainer(folder: str, settings: dict[str, Any]) -> Given:
    vocabulary = Tokenizer(models.WordLevel({"[PAD]": 0, "[EOS]": 1, "a": 2}, unk_token="[PAD]"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="[PAD]", eos_token="[EOS]")
    shape = LlamaConfig(vocab_size=3, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(shape).save_pretrained(folder)  # TRL loads the reference model from where the model came
    config = GRPOConfig(
        folder,
        per_device_train_batch_size=len(LENGTHS),
        num_generations=len(LENGTHS),
        use_cpu=True,
        bf16=False,
        report_to=[],
        **{**DEFAULTS, **settings},
    )
    return Given(
        folder,
        reward_funcs=lambda **_: [0.0],
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
    )


def tensors() -> dict[str, Tensor]:
    """Policies near enough that most tokens are within every clip range, and some are not."""
    draw = torch.Generator().manual_seed(6)
    shape = (len(LENGTHS), max(LENGTHS))
    proximal = -3 * torch.rand(shape, generator=draw, dtype=torch.float64)
    current = proximal + 0.4 * torch.randn(shape, generator=draw, dtype=torch.float64)
    reference = proximal + 0.6 * torch.randn(shape, generator=draw, dtype=torch.float64)
    return {
        "current": current,
        "proximal": proximal,
        "reference": reference,
        "advantages": torch.tensor([1.3, -0.8, -1.1, 0.6], dtype=torch.float64),
        "mask": (torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]).long(),
    }


def told(settings: dict[str, Any], given: dict[str, Tensor]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(folder, settings)
    made.logprobs = given["current"].clone().requires_grad_()
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    ids = torch.full_like(given["mask"], 2)
    loss = made._compute_loss(
        made.model,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones_like(ids[:, :1]),
            "completion_ids": ids,
            "completion_mask": given["mask"],
            "advantages": given["advantages"],
            "old_per_token_logps": given["proximal"],
            "ref_per_token_logps": given["reference"],
            "num_items_in_batch": given["mask"].sum(),
        },
    )
    (gradient,) = torch.autograd.grad(loss, made.logprobs)
    figures = {name: values[-1] for name, values in made._metrics["train"].items() if "clip" in name or name == "kl"}
    return {
        "settings": {**DEFAULTS, **settings},
        "loss": loss.item(),
        "gradient": gradient.tolist(),
        "figures": figures,
    }


if __name__ == "__main__":
    given = tensors()
    record = {
        "tensors": {name: tensor.tolist() for name, tensor in given.items()},
        "cases": {name: told(settings, given) for name, settings in CASES.items()},
    }
    Path(__file__).with_name("trl.json").write_text(json.dumps(record, indent=1) + "\n")
