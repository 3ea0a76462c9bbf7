"""Measure spark: how often it is right, and how often it speaks the format, on problems that no teacher showed it.

    PYTHONPATH=src python spark/evaluate.py --model src/leyden/models/spark --out results/spark/evaluation.json

Every problem is tried several times at temperature 1, and once greedily, with the real tools and the examples' prompts.
The last line of output is one JSON object.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from conversations import FAMILIES, conversation
from lessons import FOLDER, POSITIONS
from rollouts import LENGTH, Rollout, complete, read, roll

from leyden.rendering.tokenizer import Tokenizer

SPLITS = ("held_out", "unseen")
FORM_SEED = 2_000_003


def summarise(rollouts: list[Rollout], samples: int) -> dict[str, Any]:
    """What the tries at some problems amount to; each problem's tries stand together."""
    right = [one.success for one in rollouts]
    groups = [right[start : start + samples] for start in range(0, len(right), samples)]
    turns = [valid for one in rollouts for valid in one.valid]
    lengths = [length for one in rollouts for length in one.lengths]
    return {
        "success": round(sum(right) / len(right), 4),
        f"pass@{samples}": round(sum(map(any, groups)) / len(groups), 4),
        "mixed_groups": round(sum(any(group) and not all(group) for group in groups) / len(groups), 4),
        "valid_turns": round(sum(turns) / len(turns), 4),
        "turns": round(len(turns) / len(rollouts), 2),
        "tokens_a_turn": round(sum(lengths) / len(lengths), 1),
        "used_tool": round(sum(len(one.valid) > 1 for one in rollouts) / len(rollouts), 4),
    }


def kind_of(one: Rollout) -> str:
    """Return what sort of problem it is, within its family."""
    facts = one.problem.facts
    if one.family == "arithmetic":
        return "+".join(facts["cues"])
    return facts["form"] if one.family == "sql" else facts["kind"]


def form(model: LlamaForCausalLM, tokenizer: Tokenizer, number: int, batch: int, least: int) -> dict[str, Any]:
    """Measure how well conversations with any tools are continued, where at least so many tokens came before."""
    turns: list[tuple[list[int], list[Any], Any]] = []
    index = 0
    while len(turns) < number:
        rng = Random(f"{FORM_SEED}/{index}")
        index += 1
        messages, tools, _ = conversation(rng)
        at = rng.choice([at for at, message in enumerate(messages) if message["role"] == "assistant"])
        prompt = tokenizer.apply_chat_template(messages[:at], tools=tools or None, add_generation_prompt=True)
        if least <= len(prompt) <= POSITIONS - LENGTH:
            turns.append((prompt, tools, messages[at]))
    turns.sort(key=lambda turn: len(turn[0]))
    completions = []
    for start in range(0, number, batch):
        completions += complete(model, tokenizer, [prompt for prompt, _, _ in turns[start : start + batch]], 1.0)
    valid, alike = [], []
    for (_, tools, taught), ids in zip(turns, completions, strict=True):
        _, calls, good = read(tokenizer.decode(ids), tools)
        valid.append(good)
        if calls and taught.get("tool_calls"):
            alike.append(calls[0]["arguments"].keys() == taught["tool_calls"][0]["function"]["arguments"].keys())
    longest = len(turns[-1][0])
    return {
        "valid_turns": round(sum(valid) / number, 4),
        "right_tool": round(sum(alike) / max(1, len(alike)), 4),
        "calls": len(alike),
        "longest_prompt": longest,
    }


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Return all metrics, by family and split."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device).eval()
    tokenizer = Tokenizer.load(FOLDER)
    torch.manual_seed(options.seed)
    found: dict[str, Any] = {
        "form/any": form(model, tokenizer, options.problems * 4, 64, 0),
        "form/long": form(model, tokenizer, options.problems // 2, 64, 1500),
    }
    sys.stdout.write(f"{json.dumps({name: found[name] for name in found})[1:-1]}\n")
    for name, family in FAMILIES.items():
        for split in SPLITS:
            rng = Random(f"evaluate/{options.seed}/{name}/{split}")
            problems = [family.problem(rng, split) for _ in range(options.problems)]
            many = [problem for problem in problems for _ in range(options.samples)]
            rollouts = roll(model, tokenizer, name, many, batch=options.batch)
            greedy = roll(model, tokenizer, name, problems, temperature=0.0, batch=options.batch)
            kinds = defaultdict(list)
            for one in rollouts:
                kinds[kind_of(one)].append(one.success)
            found[f"{name}/{split}"] = {
                **summarise(rollouts, options.samples),
                "greedy": round(sum(one.success for one in greedy) / len(greedy), 4),
                "greedy_valid_turns": summarise(greedy, 1)["valid_turns"],
                "by_kind": {kind: round(sum(right) / len(right), 3) for kind, right in sorted(kinds.items())},
            }
            sys.stdout.write(f"{name}/{split}: {json.dumps(found[f'{name}/{split}'])}\n")
            sys.stdout.flush()
    return {"problems": options.problems, "samples": options.samples, "seed": options.seed, **found}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--problems", type=int, default=256, help="problems of each family and split")
    parser.add_argument("--samples", type=int, default=8, help="tries at each problem")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for the metrics")
    options = parser.parse_args()
    found = evaluate(options)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
