"""The peer half of the loop's benchmarks: TRL's GRPOTrainer, run by the interpreter of its own environment.

    python benchmarks/peer_trl.py PLAN.json

Prompts, group, lengths, optimiser and the number of steps are the plan's. On the CPU generation is TRL's own, through
`model.generate`, and every completion has the same length. With `cuda` in the plan the model is trained in bfloat16
with float32 weights, vLLM generates in this process (`colocate`), and completions end where they end. Whatever only
costs time is off (logging, checkpoints, gradient checkpointing), and the reward is computed in this process.

The plan has a list of `settings`, measured one after the other in this process, so that vLLM starts once:

- `micro_batches`: of a step, so `per_device_train_batch_size` is the batch divided by it;
- `compile`: "none", "whole" (`torch_compile=True`) or "layers" (`torch_compile=True` with accelerate's regional
  compilation of dynamic shapes, which compiles each kind of layer once);
- `correction`: whether tokens are weighted by the ratio of the trainer's and vLLM's probabilities, as is TRL's default
  and Leyden's. TRL computes old logprobs for it in a forward pass of its own; without it there is no such pass, since
  there is one update a generation.

Prints one JSON object a setting: seconds of the first step, of each other one that does not count and of each that
does, and the parts of those that are generation and scoring; or why the setting failed.
"""

import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

INSTALL: list[str] = ["trl==1.16.0", "torch==2.13.0", "transformers==5.22.2"]
"""Arguments of `pip install`: torch and transformers as on Leyden's side."""
DEFAULTS: dict[str, Any] = {"compile": "none", "correction": True}
"""Of a setting."""
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Set by TRL for its vLLM. A second trainer in the process would take them for a launcher's and wrap its model."""

REGIONAL = ("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "ACCELERATE_DYNAMO_USE_DYNAMIC")


def run(
    python: str | Path, plan: dict[str, Any], folder: Path, limit_s: float | None = None
) -> Iterator[dict[str, Any]]:
    """Run this file with the interpreter that has TRL; yield what it found of each setting as soon as it is there.

    Its processes are killed after `limit_s`. What they compile is kept in the folder alone, so that nothing is found
    compiled already.
    """
    path, environment = folder / "plan.json", {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    path.write_text(json.dumps(plan))
    command = ["timeout", "--kill-after=1", str(limit_s or 0), str(python), __file__, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment) as ran:
        assert ran.stdout is not None
        try:
            yield from (json.loads(line) for line in ran.stdout if line.startswith('{"setting"'))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(ran.pid, signal.SIGKILL)


def main(plan: dict[str, Any]) -> None:
    """Measure each setting, and say what it took."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch

    torch.set_num_threads(plan["threads"])
    torch._dynamo.config.recompile_limit = 64  # every setting compiles the same functions for a model of its own
    if plan.get("cuda"):
        start_vllm_once()
    for setting in ({**DEFAULTS, **setting} for setting in plan["settings"]):
        found: dict[str, Any]
        try:
            found = measure(plan, setting)
        except torch.OutOfMemoryError as error:
            found = {"failed": f"out of memory: {str(error).splitlines()[0]}"}
        gc.collect()
        if plan.get("cuda"):
            torch.cuda.empty_cache()
        print(json.dumps({"setting": setting, **found, "versions": versions()}), flush=True)


def start_vllm_once() -> None:
    """Let all trainers of this process share one vLLM: each sends it its weights before it generates."""
    from trl.generation import vllm_generation

    vllm_generation.LLM = cache(vllm_generation.LLM)


def versions() -> dict[str, str]:
    """Return those of the packages that matter here."""
    found = {}
    for name in ("trl", "torch", "transformers", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def measure(plan: dict[str, Any], setting: dict[str, Any]) -> dict[str, Any]:
    """Train with one setting, and say how long each step took."""
    for name in LAUNCHED:
        os.environ.pop(name, None)
    for name in REGIONAL:
        os.environ.pop(name, None)
    if setting["compile"] == "layers":
        os.environ |= dict.fromkeys(REGIONAL, "True")
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rollouts, tokens = plan["tasks"] * plan["group"], plan["tokens"]
    cuda = plan.get("cuda", False)
    model = AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.float32)
    model.train()  # with compiled layers only a copy of it would be, and TRL would generate for every micro-batch
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
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [random.random() for _ in completions]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=plan["warmup"] + plan["steps"],
            per_device_train_batch_size=rollouts // setting["micro_batches"],
            gradient_accumulation_steps=setting["micro_batches"],
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
            torch_compile=setting["compile"] != "none",
            use_vllm=cuda,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=plan.get("vllm_memory", 0.3),
            vllm_importance_sampling_correction=setting["correction"],
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
    took = [after - before for before, after in pairwise(ends)]
    timed = slice(plan["warmup"], None)
    return {
        "warmup_s": took[: plan["warmup"]],
        "step_s": took[timed],
        "generating_s": generating[timed],
        "scoring_s": [whole - part for whole, part in zip(preparing, generating, strict=True)][timed],
        "prompt_tokens": prompt_tokens[timed],
        "completion_tokens": completion_tokens[timed],
    }


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
