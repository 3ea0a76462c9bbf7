"""Teach spark: a Llama of two million parameters learns what the erring teachers' conversations say.

    PYTHONPATH=src python spark/teach.py --out build/spark

The loss is on assistants' tokens alone. Writes the model in bf16, and `metrics.jsonl` with one line of figures for
every 50 steps; the last line of output is one JSON object. Minutes on a GPU; for a trial on a CPU give few lessons and
tokens.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from lessons import POSITIONS, batches, lessons

WARMUP = 150
CHECK_SEED = 1_000_003
"""The seed of the lessons that the loss is checked on."""


def config() -> LlamaConfig:
    """Spark's shape."""
    return LlamaConfig(
        vocab_size=1024,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        attention_bias=False,
    )


def loss_of(model: LlamaForCausalLM, batch: Any, device: str) -> torch.Tensor:
    """Return the mean loss over the tokens that assistants said."""
    ids, learned = (torch.from_numpy(rows).to(device, non_blocking=True) for rows in batch)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    targets = ids[:, 1:].masked_fill(~learned[:, 1:], -100)
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def teach(options: argparse.Namespace, say: Any) -> LlamaForCausalLM:
    """Train one model from scratch."""
    began = time.monotonic()
    checks = list(batches(lessons(CHECK_SEED, min(options.lessons // 10, 2000), options.processes), options.tokens, 0))
    taught = lessons(options.seed, options.lessons, options.processes)
    say(lessons=len(taught), tokens=sum(len(ids) for ids, _ in taught), made_s=round(time.monotonic() - began, 1))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape of a batch
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(config()).to(device)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=options.rate, betas=(0.9, 0.98), weight_decay=0.02, fused=device == "cuda"
    )
    steps = options.epochs * sum(1 for _ in batches(taught, options.tokens, 0))
    rate = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, steps))
    began, step, losses = time.monotonic(), 0, []
    for epoch in range(options.epochs):
        for batch in batches(taught, options.tokens, epoch):
            loss = loss_of(model, batch, device)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
            rate.step()
            step += 1
            losses.append(loss.detach())
            if step % 50 == 0:
                mean = torch.stack(losses).mean().item()
                say(step=step, loss=round(mean, 4), rate=rate.get_last_lr()[0], s=round(time.monotonic() - began, 1))
                losses = []
    with torch.no_grad():
        held = torch.stack([loss_of(model, batch, device) for batch in checks]).mean().item()
    parameters = sum(one.numel() for one in model.parameters())
    say(parameters=parameters, steps=step, check_loss=round(held, 4), taught_s=round(time.monotonic() - began, 1))
    return model


def _rate(step: int, steps: int) -> float:
    """Up in a line, down to a hundredth along a cosine."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    share = torch.tensor(min(1.0, (step - WARMUP) / max(1, steps - WARMUP)))
    return 0.01 + 0.99 * 0.5 * (1 + torch.cos(share * torch.pi).item())


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Weights in bf16 and both configurations, as transformers reads them."""
    model = model.to("cpu", torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, do_sample=True, temperature=1.0)
    model.save_pretrained(folder)


def main() -> None:
    """Teach and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to write the model into")
    parser.add_argument("--lessons", type=int, default=350_000, help="conversations to learn from")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens a batch, padding included")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes that make lessons")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "metrics.jsonl").open("w", encoding="utf-8") as metrics:

        def say(**figures: Any) -> None:
            line = json.dumps(figures)
            metrics.write(line + "\n")
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

        save(teach(options, say), options.out)


if __name__ == "__main__":
    main()
