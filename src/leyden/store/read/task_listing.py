"""Lists the tasks of a run by what their rollouts earned."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import BigInteger, Connection, Double, Select, case, cast, func, select

from leyden.api.views import ListedTask, TaskListing, TaskQuery
from leyden.defaults import SUCCESS
from leyden.store.read.queries import configuration, require_run, section
from leyden.store.schema import rollouts, tasks

_BEGINNING = 200
"""Characters of a task's input that are listed."""


def list_tasks(connection: Connection, run: str, query: TaskQuery) -> TaskListing:
    """Return one page of a run's tasks, and how many there are; a task has a row for each purpose of its rollouts."""
    require_run(connection, run)
    rows = _tasks(run, query, _success(connection, run)).subquery()
    column = rows.c[query.sort.removeprefix("-")]
    order = column.desc() if query.sort.startswith("-") else column
    page = select(func.count().over(), rows).order_by(column.is_(None), order, rows.c.id, rows.c.purpose)
    found = connection.execute(page.limit(query.limit).offset(query.offset)).all()
    total = found[0][0] if found else connection.scalar(select(func.count()).select_from(rows)) or 0
    beginnings = read_beginnings(connection, run, {row.id for row in found})
    listed = (
        ListedTask(
            *(row.id, row.purpose, row.groups, row.rollouts),
            *(row.success, row.reward, row.flat, row.step),
            beginnings[row.id],
        )
        for row in found
    )
    return TaskListing(tuple(listed), total)


def read_beginnings(connection: Connection, run: str, ids: Collection[str]) -> dict[str, str]:
    """Return the beginnings of the inputs of some tasks, by id."""
    inputs = connection.execute(select(tasks.c.id, tasks.c.input).where(tasks.c.run_id == run, tasks.c.id.in_(ids)))
    return {id: beginning(data) for id, data in inputs}


def beginning(data: bytes) -> str:
    """Return the beginning of a stored text."""
    return data.decode(errors="replace")[:_BEGINNING]


def _tasks(run: str, query: TaskQuery, success: float) -> Select[Any]:
    """Select the columns of `ListedTask`, in its order, from one pass over the rollouts."""
    reward = rollouts.c.reward
    of_group = (
        select(
            rollouts.c.task_id,
            rollouts.c.purpose,
            func.count().label("rollouts"),
            func.count(reward).label("counted"),
            func.sum(case((reward >= success, 1.0), else_=0.0)).label("succeeded"),
            func.sum(reward).label("reward"),
            case((func.count(reward) < 2, None), (func.min(reward) == func.max(reward), 1.0), else_=0.0).label("flat"),
            func.max(rollouts.c.step).label("step"),
        )
        .where(rollouts.c.run_id == run, *([rollouts.c.purpose == query.purpose] if query.purpose else ()))
        .group_by(rollouts.c.group_id, rollouts.c.task_id, rollouts.c.purpose)
    ).subquery()
    group, counted = of_group.c, func.nullif(func.sum(of_group.c.counted), 0)
    return select(
        group.task_id.label("id"),
        group.purpose,
        func.count().label("groups"),
        cast(func.sum(group.rollouts), BigInteger).label("rollouts"),
        (cast(func.sum(group.succeeded), Double) / counted).label("success"),
        (func.sum(group.reward) / counted).label("reward"),
        cast(func.avg(group.flat), Double).label("flat"),
        func.max(group.step).label("step"),
    ).group_by(group.task_id, group.purpose)


def _success(connection: Connection, run: str) -> float:
    """Return the reward from which a rollout of a run counts as solved."""
    found = section(configuration(connection, run), "evaluation").get("success")
    return float(found) if isinstance(found, (int, float)) else SUCCESS
