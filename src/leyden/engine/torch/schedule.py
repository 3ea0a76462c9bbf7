"""Chooses the tokens of a step: decoding requests never wait for prompts, and prompts get a fixed number of tokens.

On a GPU a step without prompts is the replay of a graph, which is several times faster than a step with prompts. A few
prompts may therefore wait while many requests decode, and are then computed together.
"""

from leyden.engine.torch.forward import UNREAD, Segment
from leyden.engine.torch.prefix_cache import PrefixCache, Slot

PROMPT_LOGITS = 512
"""Prompt tokens of one step whose logits are computed: those of a large vocabulary take much memory."""

MAX_WAITING_SHARE = 0.25
"""Prompts wait only while they are fewer than this part of the requests that decode."""


def schedule_step(cache: PrefixCache, prefill_tokens: int, prompts_wait: bool = False) -> list[tuple[Slot, Segment]]:
    """Return one token per decoding request, by slot, then up to `prefill_tokens` of prompts in order of admission.

    With `prompts_wait`, prompts get no tokens in this step if they are few in comparison with decoding requests.
    A request whose last token is not read yet continues from the token on the device, unless that token fills its
    length, or its next token depends on it (penalties, grammars).
    """
    decode, prefill, budget, logits_budget = [], [], prefill_tokens, PROMPT_LOGITS
    for slot in cache.active:
        request, length = slot.request, len(slot.tokens)
        if slot.unread:
            if request is not None and length + 1 < request.max_length and not request.sampler.needs_tokens:
                decode.append((slot, Segment(slot.index, length, (UNREAD,), True)))
        elif length - slot.computed == 1:
            decode.append((slot, Segment(slot.index, slot.computed, slot.tokens[-1:], True)))
        elif budget and not cache.must_wait(slot):
            needs_all = request is not None and request.needs_prompt_logprobs
            end = min(slot.computed + (min(budget, logits_budget) if needs_all else budget), length)
            if ids := slot.tokens[slot.computed : end]:
                prefill.append((slot, Segment(slot.index, slot.computed, ids, end == length, needs_all)))
            budget -= len(ids)
            logits_budget -= len(ids) if needs_all else 0
    decode.sort(key=lambda one: one[1].slot)
    waits = prompts_wait and len(cache.active) - len(decode) < MAX_WAITING_SHARE * len(decode)
    return decode if waits else decode + prefill
