"""What commands say of each policy of a run that trains several."""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from rich import box
from rich.table import Table

from leyden.api.views import RunCard, Series, SeriesQuery
from leyden.cli.printing import format_number
from leyden.runs.stored_runs import RunSource

_ALL_STEPS = 100_000
_LAST = ("reward/mean", "reward/own", "training/entropy", "training/kl_start")
_SUMS = ("calls/trained", "tokens/trained")


class PolicySummary(Struct, frozen=True):
    """The version of a policy, its last metrics, and the sums of what it was trained on."""

    version: int
    reward: float | None
    """Of the last step; its own if policies have rewards of their own."""
    entropy: float | None
    kl_start: float | None
    calls_trained: int
    tokens_trained: int


async def policy_series(
    source: RunSource, run: str, card: RunCard, names: Sequence[str] = ()
) -> dict[str, dict[str, Series]]:
    """Return metrics by policy, all or some, for each policy that a run trains."""
    query = ",".join(names)
    return {one: await source.run_series(run, SeriesQuery(_ALL_STEPS, query, one)) for one in card.policies}


async def summarise_policies(source: RunSource, run: str, card: RunCard | None) -> dict[str, PolicySummary]:
    """Summarise the policies of a run, by name; there are none if it trains one."""
    if card is None or len(card.policies) < 2:
        return {}
    found = await policy_series(source, run, card, (*_LAST, *_SUMS))
    return {name: _summary(card.policies[name], series) for name, series in found.items()}


def _summary(version: int, series: Mapping[str, Series]) -> PolicySummary:
    reward, own, entropy, kl_start = (series[name].values[-1] if name in series else None for name in _LAST)
    calls, tokens = (round(sum(series[name].values)) if name in series else 0 for name in _SUMS)
    return PolicySummary(version, reward if own is None else own, entropy, kl_start, calls, tokens)


def policies_table(policies: Mapping[str, PolicySummary]) -> Table:
    """Return a table of policies."""
    columns = ("policy", "version", "reward", "entropy", "KL from start", "calls trained", "tokens trained")
    table = Table(*columns, box=box.SIMPLE, pad_edge=False)
    for name, one in policies.items():
        measured = map(format_number, (one.reward, one.entropy, one.kl_start))
        table.add_row(name, str(one.version), *measured, f"{one.calls_trained:,}", f"{one.tokens_trained:,}")
    return table
