"""Chooses the tokens of a step: decoding requests never wait for prompts, and prompts get a fixed number of tokens."""

from leyden.engine.torch.forward import UNREAD, Segment
from leyden.engine.torch.prefix_cache import PrefixCache, Slot


def schedule_step(cache: PrefixCache, prefill_tokens: int) -> list[tuple[Slot, Segment]]:
    """Return one token per decoding request, by slot, then up to `prefill_tokens` of prompts in order of admission.

    A request whose last token is not read yet continues from the token on the device, unless that token fills its
    length, or its next token depends on it (penalties, grammars).
    """
    decode, prefill, budget = [], [], prefill_tokens
    for slot in cache.active:
        request, length = slot.request, len(slot.tokens)
        if slot.unread:
            if request is not None and length + 1 < request.max_length and not request.sampler.needs_tokens:
                decode.append((slot, Segment(slot.index, length, (UNREAD,), True)))
        elif length - slot.computed == 1:
            decode.append((slot, Segment(slot.index, slot.computed, slot.tokens[-1:], True)))
        elif budget and not cache.must_wait(slot):
            end = min(slot.computed + budget, length)
            ids = slot.tokens[slot.computed : end]
            prefill.append((slot, Segment(slot.index, slot.computed, ids, end == length)))
            budget -= len(ids)
    decode.sort(key=lambda one: one[1].slot)
    return decode + prefill
