"""The peer half of the loop's benchmark: TRL's GRPOTrainer, run by the interpreter of its own environment.

    python benchmarks/peer_trl.py PLAN.json

Prompts, group, lengths, optimiser and the number of steps are the plan's. On the CPU generation is TRL's own, through
`model.generate`, and every completion has the same length. With `cuda` in the plan the model is trained in bfloat16
with float32 weights, vLLM generates in this process (`colocate`), and completions end where they end. Whatever only
costs time is off (logging, checkpoints, gradient checkpointing), the reward is computed in this process, and old
logprobs are not, since there is one update a generation. The last line is one JSON object: seconds of each timed step,
and the parts of each that are generation and scoring.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

INSTALL: list[str] = ["trl==1.16.0", "torch==2.13.0", "transformers==5.22.2"]
"""Arguments of `pip install`: torch and transformers as on Leyden's side."""


def run(python: str | Path, plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run this file with the interpreter that has TRL; the plan is written into the folder."""
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    ran = subprocess.run([python, __file__, path], stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main(plan: dict[str, Any]) -> dict[str, Any]:
    """Train, and say how long each step took."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(plan["threads"])
    rollouts, tokens = plan["tasks"] * plan["group"], plan["tokens"]
    cuda = plan.get("cuda", False)
    model = AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(plan["model"])
    if not cuda:  # nothing ends a completion but its length, and all of it is trained on
        tokenizer.eos_token = tokenizer.pad_token
        model.generation_config.eos_token_id = None
    ends: list[float] = []
    generating: list[float] = []
    preparing: list[float] = []
    prompt_tokens: list[int] = []
    completion_tokens: list[int] = []

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            answer = super()._generate_single_turn(*args, **kwargs)
            generating.append(time.perf_counter() - began)
            return answer

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.perf_counter()
            batch = super()._generate_and_score_completions(inputs)
            preparing.append(time.perf_counter() - began)
            completion_tokens.append(int(batch["completion_mask"].sum()))
            assert cuda or completion_tokens[-1] == rollouts * tokens, "completions differ in length"
            prompt_tokens.append(int(batch["prompt_mask"].sum()))
            return batch

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [random.random() for _ in completions]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=plan["warmup"] + plan["steps"],
            per_device_train_batch_size=rollouts // plan["micro_batches"],
            gradient_accumulation_steps=plan["micro_batches"],
            num_generations=plan["group"],
            max_completion_length=tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            learning_rate=plan["learning_rate"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            adam_beta2=0.99,
            max_grad_norm=1.0,
            shuffle_dataset=False,
            use_cpu=not cuda,
            bf16=cuda,
            gradient_checkpointing=False,
            use_vllm=cuda,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=plan.get("vllm_memory", 0.3),
            dataloader_num_workers=0,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            generation_kwargs=None if cuda else {"eos_token_id": None},
        )
        trainer = Timed(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": messages} for messages in plan["prompts"]]),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    timed = slice(plan["warmup"], None)
    return {
        "step_s": [after - before for before, after in pairwise(ends)][plan["warmup"] - 1 :],
        "generating_s": generating[timed],
        "scoring_s": [whole - part for whole, part in zip(preparing, generating, strict=True)][timed],
        "prompt_tokens": prompt_tokens[timed],
        "completion_tokens": completion_tokens[timed],
    }


if __name__ == "__main__":
    report = main(json.loads(Path(sys.argv[1]).read_text()))
    print(json.dumps(report))
