"""Many rollouts at once with plain transformers: the real tool of each problem answers spark, until it is done."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from conversations import FAMILIES, plain
from families.asking import Offer, chat_message
from families.problem import Message, Problem
from transformers import LlamaForCausalLM

from leyden.rendering.tokenizer import Tokenizer

TURNS = 5
LENGTH = 80
END = "<|im_end|>"
_CALL = re.compile(r"\n?<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@dataclass
class Rollout:
    """One try at one problem."""

    family: str
    problem: Problem
    messages: list[Message]
    offer: Offer
    valid: list[bool] = field(default_factory=list)
    """Of each turn, whether its form is right: it ends, and calls only what is offered, as offered."""
    lengths: list[int] = field(default_factory=list)
    text: str | None = None
    """The final answer."""

    @property
    def success(self) -> bool:
        """Whether the final answer is right."""
        return self.text is not None and FAMILIES[self.family].check(self.problem, self.text)


def read(completion: str, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]], bool]:
    """Return the text of a completion, the calls in it, and whether all of it has the right form."""
    offered = {tool["function"]["name"]: set(tool["function"]["parameters"]["properties"]) for tool in tools}
    text, valid = completion.removesuffix(END), completion.endswith(END)
    calls = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
            good = set(call["arguments"]) == offered[call["name"]]
        except (ValueError, KeyError, TypeError):
            good = False
        valid = valid and good
        if good:
            calls.append(call)
    text = _CALL.sub("", text)
    return text, calls, valid and bool(calls or text.strip()) and "tool_call>" not in text


@torch.no_grad()
def complete(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompts: list[list[int]], temperature: float
) -> list[list[int]]:
    """Sample one completion of each prompt, to its end or to the length allowed."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=LENGTH, **{"do_sample": False, "temperature": None, **how}
    )
    completions = []
    for row in out[:, width:].tolist():
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        completions.append(row[:end])
    return completions


def roll(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    family: str,
    problems: list[Problem],
    temperature: float = 1.0,
    batch: int = 1024,
) -> list[Rollout]:
    """Run one rollout of each problem, as the examples' agents ask it."""
    rollouts = [Rollout(family, problem, *plain(family, problem)) for problem in problems]
    for _ in range(TURNS):
        open_ones = [one for one in rollouts if one.text is None and (not one.valid or one.valid[-1])]
        for start in range(0, len(open_ones), batch):
            group = open_ones[start : start + batch]
            prompts = [
                tokenizer.apply_chat_template(one.messages, tools=one.offer.tools, add_generation_prompt=True)
                for one in group
            ]
            for one, ids in zip(group, complete(model, tokenizer, prompts, temperature), strict=True):
                _take(one, tokenizer.decode(ids), len(ids))
    return rollouts


def _take(one: Rollout, completion: str, length: int) -> None:
    text, calls, valid = read(completion, one.offer.tools)
    one.valid.append(valid)
    one.lengths.append(length)
    if not valid:
        return
    if not calls:
        one.text = text
        return
    one.messages.append({**chat_message("assistant", text), "tool_calls": [{"function": call} for call in calls]})
    use = FAMILIES[one.family].tool(one.problem)
    one.messages += [chat_message("tool", use(str(call["arguments"][one.offer.parameter]))) for call in calls]
