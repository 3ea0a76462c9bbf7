"""Puts together what the page of one rollout shows: conversation with tokens, spans, rewards, signals and credit."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from leyden.api.views import CallView, RolloutView, SignalView, TokenView
from leyden.api.wire import ListedRollout, RolloutDetail
from leyden.episodes import Episode
from leyden.records import Call, CallCredit, StepCredits
from leyden.rendering.tokenizer import Tokenizer, TokenizerError
from leyden.runs.checkpoint_files import latest_checkpoint
from leyden.server.gateway.prompts.prompt_tokens import token_texts
from leyden.server.service import ServerContext


def rollout_view(
    detail: RolloutDetail,
    episode: Episode,
    siblings: Sequence[ListedRollout],
    credits: Sequence[StepCredits],
    versions: dict[str, int],
    several: bool,
    tokenizers: dict[str, Tokenizer | None],
) -> RolloutView:
    """Build the view of one attempt, of a run that may have several policies."""
    from leyden.rl.signals import find  # jsonschema is slow to import

    by_call = {credit.call: credit for step in credits for credit in step.calls if credit.attempt == episode.attempt.id}
    return RolloutView(
        rollout=next(one for one in siblings if one.id == detail.rollout.id),
        task=detail.task,
        attempt=episode.attempt,
        attempts=detail.attempts,
        calls=tuple(_call(episode, call, by_call.get(call.id), tokenizers[call.policy]) for call in episode.calls),
        spans=episode.spans,
        rewards=episode.effective_rewards,
        signals=tuple(SignalView(one.call.id, str(one.kind), one.why, one.tool) for one in find(episode)),
        siblings=tuple(siblings),
        output=episode.output,
        versions=versions,
        trained=credits[-1].step if credits else None,
        several=several,
    )


def _call(episode: Episode, call: Call, credit: CallCredit | None, tokenizer: Tokenizer | None) -> CallView:
    return CallView(
        id=call.id,
        parent=call.parent,
        role=episode.role(call),
        policy=call.policy,
        status=str(call.status),
        prompt_origin=str(call.prompt_origin),
        origin_reason=call.origin_reason,
        finish=call.finish,
        span=call.span,
        started=call.started,
        ended=call.ended,
        prompt_tokens=len(episode.prompt_ids(call)),
        new_prompt_tokens=len(call.prompt_ids),
        messages=call.messages,
        kept_messages=call.kept_messages,
        prompt=tokenizer.decode(call.prompt_ids) if tokenizer is not None else None,
        response=call.response,
        tokens=_tokens(call, credit, tokenizer),
        untrainable=call.untrainable,
        credit=credit,
    )


def _tokens(call: Call, credit: CallCredit | None, tokenizer: Tokenizer | None) -> tuple[TokenView, ...]:
    ids = call.completion_ids
    texts = token_texts(tokenizer, ids) if tokenizer is not None else [f"#{id} " for id in ids]
    logprobs: Sequence[float | None] = call.logprobs or [None] * len(ids)
    versions: Sequence[int | None] = _versions(call) or [None] * len(ids)
    return tuple(map(TokenView, texts, logprobs, versions, untrained_tokens(call, credit)))


def _versions(call: Call) -> list[int]:
    return [run.number for run in call.versions for _ in range(run.tokens)]


def untrained_tokens(call: Call, credit: CallCredit | None) -> list[str]:
    """Return for each token of a call why it is not trained on; empty if it is, or if its call is left out."""
    count = len(call.completion_ids)
    reasons = ["forced by the grammar"] * count
    for index in call.chosen:
        reasons[index] = ""
    reasons[count - call.context_tail :] = ["after the stop string"] * call.context_tail
    if credit is not None and not credit.excluded and (versions := _versions(call)):
        stale = len(call.chosen) - credit.tokens
        for index in sorted(call.chosen, key=versions.__getitem__)[:stale]:  # the oldest
            reasons[index] = "too old"
    return reasons


def tokenizer_of(service: ServerContext, policy: str, folder: Path | None = None) -> Tokenizer | None:
    """Return the tokenizer of a served policy, or of its newest checkpoint in a run's folder (default: the home)."""
    if folder is None and service.gateway is not None and policy in service.gateway.models:
        return service.gateway.models[policy].tokenizer
    checkpoint = latest_checkpoint(folder or service.options.home, policy)
    return _load(checkpoint / "tokenizer.json") if checkpoint is not None else None


@lru_cache(maxsize=8)  # every checkpoint has its own file
def _load(path: Path) -> Tokenizer | None:
    try:
        return Tokenizer.load(path)
    except TokenizerError:
        return None
