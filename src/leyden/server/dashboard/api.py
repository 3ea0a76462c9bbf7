"""Handlers of the data that the pages show. They read the store only."""

# ruff: noqa: D103  (the endpoint of a handler says what it does: api/endpoints.py)

import csv
import io
import time
from contextlib import suppress

from msgspec.structs import replace
from sqlalchemy import Connection

from leyden.api.fleet import Fleet, add_engines, join_fleets
from leyden.api.views import (
    AttemptQuery,
    Comparison,
    ComparisonQuery,
    EvaluationQuery,
    Facets,
    PointsQuery,
    PrefixTree,
    RolloutView,
    RunCard,
    RunFiles,
    RunRewards,
    SeriesQuery,
)
from leyden.records import DEFAULT_POLICY, Run
from leyden.runs.run_files import read_run_files
from leyden.runs.run_names import name_leases
from leyden.server.control.engine_reports import report_engines
from leyden.server.control.keys import Key
from leyden.server.dashboard.prefix_tree import prefix_tree
from leyden.server.dashboard.rollout_view import rollout_view, tokenizer_of
from leyden.server.dashboard.run_stores import StoreRun
from leyden.server.http.responses import Raw, Request
from leyden.server.service import ServerContext
from leyden.store.errors import NotFound
from leyden.store.files.engine_file import read_reports
from leyden.store.files.run_lock import is_run_held
from leyden.store.read import evaluations, fleet_queries, queries, rollout_search, views


async def overview(service: ServerContext, key: Key) -> list[RunCard]:
    cards: list[RunCard] = []
    for run, at in (await service.run_stores.runs(key.run)).items():
        with suppress(NotFound, OSError):  # deleted meanwhile
            cards.append(await _card(service, run, at))
    return sorted(cards, key=lambda card: -card.created)


async def run_card(service: ServerContext, key: Key, run: str) -> RunCard:
    return await _card(service, run, await service.run_stores.find(run))


async def _card(service: ServerContext, run: str, at: StoreRun) -> RunCard:
    digest, held = await service.run_stores.digest(at), is_run_held(at[0] or service.options.home)
    return replace(await service.run_stores.read_at(at, views.run_card, time.time(), digest, held), id=run)


async def view_run(service: ServerContext, key: Key, run: str) -> Run:
    return replace(await service.run_stores.read(run, queries.get_run), id=run)


async def run_files(service: ServerContext, key: Key, run: str) -> RunFiles:
    folder, _ = at = await service.run_stores.find(run)
    await service.run_stores.read_at(at, queries.get_run)
    return await service.run_stores.in_thread(lambda: read_run_files(folder or service.options.home))


async def series_csv(service: ServerContext, request: Request[None, SeriesQuery]) -> Raw:
    """Return metrics as CSV: a row for each step."""
    run = request.path["run"]
    found = await service.run_stores.read(run, views.read_series, request.query)
    rows: dict[int, dict[str, float]] = {}
    for name, series in found.items():
        for step, value in zip(series.steps, series.values, strict=True):
            rows.setdefault(step, {})[name] = value
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["step", *found])
    for step in sorted(rows):
        writer.writerow([step, *(rows[step].get(name, "") for name in found)])
    headers = (("content-disposition", f'attachment; filename="{run}.csv"'),)
    return Raw(text.getvalue().encode(), "text/csv; charset=utf-8", headers)


async def run_rewards(service: ServerContext, key: Key, run: str, query: PointsQuery) -> RunRewards:
    return (await service.run_stores.digest(await service.run_stores.find(run))).rewards(query)


async def compare_run(service: ServerContext, key: Key, run: str, query: ComparisonQuery) -> Comparison:
    key.check_run(query.other)
    first, second = [
        replace(await service.run_stores.read(name, evaluations.read_evaluation, EvaluationQuery()), run=name)
        for name in (run, query.other)
    ]
    return evaluations.compare_evaluations(first, second)


async def facets(service: ServerContext, key: Key, run: str) -> Facets:
    at = await service.run_stores.find(run)
    return await service.run_stores.read_at(at, rollout_search.facets, await service.run_stores.digest(at))


async def view_rollout(service: ServerContext, key: Key, run: str, rollout: str, query: AttemptQuery) -> RolloutView:
    folder, _ = at = await service.run_stores.find(run)

    def read(connection: Connection, run: str) -> RolloutView:
        detail = queries.get_rollout(connection, run, rollout)
        wanted = query.attempt or detail.rollout.attempts
        attempt = next((one for one in detail.attempts if one.number == wanted), None)
        if attempt is None and not detail.attempts:
            raise NotFound(f"rollout {rollout!r} waits in the queue: no worker has started it yet")
        if attempt is None:
            raise NotFound(f"rollout {rollout!r} has no attempt {wanted}")
        episode = queries.get_episode(connection, run, attempt.id)
        tokenizers = {call.policy: tokenizer_of(service, call.policy, folder) for call in episode.calls}
        siblings = rollout_search.group_rollouts(connection, run, detail.rollout.group)
        credits = queries.rollout_credits(connection, run, rollout)
        versions = views.versions_at(connection, run, attempt.ended)
        several = views.has_policies(connection, run)
        return rollout_view(detail, episode, siblings, credits, versions, several, tokenizers)

    return await service.run_stores.read_at(at, read)


async def view_tree(service: ServerContext, key: Key, run: str, group: str) -> PrefixTree:
    folder, _ = at = await service.run_stores.find(run)

    def read(connection: Connection, run: str) -> PrefixTree:
        episodes = queries.group_episodes(connection, run, group)
        policy = next((call.policy for episode in episodes for call in episode.calls), DEFAULT_POLICY)
        tokenizer = tokenizer_of(service, policy, folder)
        return prefix_tree(episodes, tokenizer.decode if tokenizer is not None else lambda ids: "")

    return await service.run_stores.read_at(at, read)


async def fleet(service: ServerContext, key: Key) -> Fleet:
    def read(connection: Connection) -> Fleet:
        return fleet_queries.read_fleet(connection, time.time())

    own = replace(await service.store.read(read), running=len(service.leases))
    others = await service.run_stores.read_active(lambda connection, runs: name_leases(read(connection), runs))
    reports = await service.run_stores.in_thread(lambda: read_reports(service.run_stores.folders()))
    fleet = join_fleets(own, [other for other in others if other.has_worker()])
    return add_engines(fleet, [await report_engines(service), *reports])
