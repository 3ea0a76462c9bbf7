"""What is refused, what is migrated, and what is given back to the disk."""

import asyncio
import hashlib
import resource
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, inspect, select, text

from leyden.api.wire import FinishRequest, GroupSpec, RunSpec
from leyden.outcomes import Ending, Outcome
from leyden.records import DEFAULT_POLICY, Call, Reward, RunSettings, Task
from leyden.store import migrations
from leyden.store.codec import pack_ids
from leyden.store.database import Database
from leyden.store.errors import StoreUnavailable, StoreUnusable
from leyden.store.files.page_checksums import checksums_file
from leyden.store.read import queries, views
from leyden.store.schema import meta
from leyden.store.store import Store
from leyden.store.write.queue import LeaseQuery


async def fill(path: Path, calls: int = 3, run: str = "r") -> None:
    store = await Store(path).start()
    await store.create_run(RunSpec(run))
    for number in range(calls):
        await store.enqueue(run, GroupSpec(f"{run}-{number}", Task("t", {})))
        (grant,) = await store.lease(LeaseQuery("w", 1, run, None))
        call = Call("c", prompt_ids=tuple(range(10_000)), completion_ids=(1,), logprobs=(-0.5,))
        await store.record_calls(run, grant.attempt.id, [call])
        await store.finish(run, grant.attempt.id, FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("f", 1.0),)))
    await store.close()


def fingerprint(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def refuse(path: Path, complaint: str) -> None:
    """Opening fails with a clear message and leaves every byte as it was."""
    before = fingerprint(path)
    for readonly in (False, True):
        with pytest.raises(StoreUnusable, match=complaint) as refusal:
            Database(path, readonly=readonly)
        assert str(path) in str(refusal.value)
        assert "\n" not in str(refusal.value)
    assert fingerprint(path) == before


async def test_a_store_of_a_newer_schema_is_refused_and_left_untouched(tmp_path: Path) -> None:
    path = tmp_path / "leyden.db"
    await fill(path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = '999'")
    connection.close()
    refuse(path, "newer Leyden")


async def test_a_damaged_store_is_refused_and_left_untouched(tmp_path: Path) -> None:
    path = tmp_path / "leyden.db"
    await fill(path)
    whole = path.read_bytes()
    for damaged in (
        whole[: len(whole) // 2],  # cut short
        whole[:20_000] + b"\xff" * 8192 + whole[28_192:],  # overwritten in the middle
        b"not a database at all" * 100,
    ):
        path.write_bytes(damaged)
        refuse(path, "corrupt")


async def test_changed_bytes_that_sqlite_does_not_notice_are_refused_with_what_they_belong_to(tmp_path: Path) -> None:
    path = tmp_path / "leyden.db"
    await fill(path)
    whole = path.read_bytes()
    tokens = whole.index(pack_ids(range(1000, 1100))[1:])
    path.write_bytes(whole[:tokens] + b"\x07\x07" + whole[tokens + 2 :])
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with pytest.raises(StoreUnusable, match=r"damaged after it was closed \(1 page of calls\)") as refusal:
        Database(path)
    assert "\n" not in str(refusal.value)
    path.write_bytes(whole)
    Database(path).close()
    path.write_bytes(whole[:tokens] + b"\x07\x07" + whole[tokens + 2 :])
    checksums_file(path).unlink()
    Database(path).close()  # the user wants it as it is


async def test_a_store_of_zero_bytes_is_not_an_empty_store(tmp_path: Path) -> None:
    path = tmp_path / "leyden.db"
    await fill(path)
    path.write_bytes(b"")
    refuse(path, "has 0 bytes")


async def test_a_schema_version_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "leyden.db"
    await fill(path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = 'eight' WHERE name = 'schema'")
    connection.close()
    refuse(path, "its schema version is 'eight'")


def test_a_full_disk_at_the_start_is_one_line_and_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 4096, 3 * 4096):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            with pytest.raises(StoreUnusable, match=r"leyden\.db cannot be written: ") as refusal:
                Database(tmp_path / "leyden.db")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "\n" not in str(refusal.value)
    Database(tmp_path / "leyden.db").close()


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE meta (name TEXT)")
    connection.close()
    refuse(path, "not a Leyden store")


@pytest.mark.parametrize("location", ["mysql://localhost/x", "://", "postgresql://nobody@127.0.0.1:1/none"])
def test_a_location_that_cannot_be_opened_is_one_line(location: str) -> None:
    with pytest.raises(StoreUnusable) as refusal:
        Database(location)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("key", ["password", "sslpassword"])
def test_no_password_is_in_an_error(key: str) -> None:
    with pytest.raises(StoreUnusable) as refusal:
        Database(f"postgresql://me:secret@127.0.0.1:1/none?sslmode=disable&{key}=secret")
    assert "secret" not in str(refusal.value) and "sslmode=disable" in str(refusal.value)


async def test_two_servers_cannot_write_to_one_file(tmp_path: Path) -> None:
    store = await Store(tmp_path / "leyden.db").start()
    with pytest.raises(StoreUnusable, match="in use"):
        Database(tmp_path / "leyden.db")
    Database(tmp_path / "leyden.db", readonly=True).close()
    await store.close()
    Database(tmp_path / "leyden.db").close()


async def test_an_older_store_is_brought_forward_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "leyden.db"
    await fill(path)
    steps: list[int] = []

    following = migrations.SCHEMA + 1

    def add_colour(connection: Connection) -> None:
        steps.append(following)
        connection.execute(text("ALTER TABLE runs ADD COLUMN colour VARCHAR"))

    monkeypatch.setattr(migrations, "SCHEMA", following)
    monkeypatch.setattr(migrations, "STEPS", {following: add_colour})
    for _ in range(2):
        database = Database(path)
        with database.reader.connect() as connection:
            assert "colour" in {column["name"] for column in inspect(connection).get_columns("runs")}
            assert connection.scalar(select(meta.c.value)) == str(following)
            assert queries.summarise_run(connection, "r").calls == 3
        database.close()
    assert steps == [following]


def _undo_listing(connection: sqlite3.Connection) -> None:
    """Make a store one of schema 5."""
    for index in ("rollouts_listed", "metrics_by_name", "attempts_of_run", "attempts_ended"):
        connection.execute(f"DROP INDEX {index}")
    connection.execute("CREATE INDEX ix_attempts_run_id ON attempts (run_id)")
    connection.execute("DROP TABLE roles")
    connection.execute("ALTER TABLE metrics DROP COLUMN policy")
    for column in ("step", "reward", "calls", "tokens"):
        connection.execute(f"ALTER TABLE rollouts DROP COLUMN {column}")


async def test_lists_of_an_older_store_are_filled_from_its_record(tmp_path: Path) -> None:
    store = await Store(tmp_path / "leyden.db").start()
    await store.create_run(RunSpec("r", RunSettings(failure_reward=-1.0)))
    await store.enqueue("r", GroupSpec("step-7-0", Task("t", {}), 2))
    one, other = await store.lease(LeaseQuery("w", 2, "r", None))
    await store.finish("r", one.attempt.id, FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("f", 0.5),)))
    await store.finish("r", other.attempt.id, FinishRequest(Outcome(Ending.TIMEOUT)))
    await store.close()
    with sqlite3.connect(tmp_path / "leyden.db") as connection:
        _undo_listing(connection)
        connection.execute("DROP TABLE deleted_responses")
        connection.executemany(
            "INSERT INTO metrics (run_id, step, name, value, at) VALUES ('r', 1, 'loss', ?, 0)", [(1.0,), (2.0,)]
        )
        connection.execute("UPDATE meta SET value = '5' WHERE name = 'schema'")
    connection.close()
    checksums_file(tmp_path / "leyden.db").unlink()
    database = Database(tmp_path / "leyden.db", readonly=True)
    with database.reader.connect() as opened:
        listed = queries.list_rollouts(opened, "r", after="", limit=10)
        metrics = [(metric.policy, metric.value) for _, metric in queries.list_metrics(opened, "r", after=0, limit=10)]
        series = views.read_series(opened, "r", ["loss"], 10)
    database.close()
    assert [(rollout.reward, rollout.step) for rollout in listed] == [(0.5, 7), (-1.0, 7)]
    assert metrics == [(DEFAULT_POLICY, 2.0)] and series["loss"].values == (2.0,)


@pytest.mark.parametrize("readonly", [True, False])
async def test_a_store_of_the_first_schema_is_brought_forward(tmp_path: Path, readonly: bool) -> None:
    path = tmp_path / "leyden.db"
    await fill(path, 1)
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE attempts DROP COLUMN output")
        for table in ("scorings", "credits", "deleted_responses"):
            connection.execute(f"DROP TABLE {table}")
        for index, columns in (("queue", "position, seq"), ("queue_of_run", "run_id, position, seq")):
            connection.execute(f"DROP INDEX {index}")
            connection.execute(f"CREATE INDEX {index} ON rollouts ({columns}) WHERE state = 'queued'")
        for column in ("not_before", "alone"):
            connection.execute(f"ALTER TABLE rollouts DROP COLUMN {column}")
        _undo_listing(connection)
        connection.execute("UPDATE meta SET value = '1' WHERE name = 'schema'")
    connection.close()
    checksums_file(path).unlink()
    database = Database(path, readonly=readonly)
    with database.reader.connect() as connection:
        assert queries.get_episode(connection, "r", "r-0.0.1").output == ""
        (listed,) = queries.list_rollouts(connection, "r", after="", limit=10)
        assert (listed.reward, listed.calls, listed.tokens, listed.step) == (1.0, 1, 1, None)
    database.close()
    store = await Store(path).start()
    await store.enqueue("r", GroupSpec("new", Task("t", {})))
    (grant,) = await store.lease(LeaseQuery("w", 1, "r", None))
    await store.finish("r", grant.attempt.id, FinishRequest(Outcome(Ending.AGENT_ERROR), output="hello\n\0"))
    assert (await store.read(queries.get_episode, "r", grant.attempt.id)).output == "hello\n\0"
    await store.close()


async def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "leyden.db"
    await fill(path)

    def fail_halfway(connection: Connection) -> None:
        connection.execute(text("DROP TABLE metrics"))
        raise RuntimeError("halfway")

    with monkeypatch.context() as patch:
        patch.setattr(migrations, "SCHEMA", migrations.SCHEMA + 1)
        patch.setattr(migrations, "STEPS", {migrations.SCHEMA: fail_halfway})
        with pytest.raises(RuntimeError, match="halfway"):
            Database(path)
    database = Database(path)
    with database.reader.connect() as connection:
        assert queries.list_metrics(connection, "r", after=0, limit=1) == []
    database.close()


async def test_deleting_a_run_frees_its_space(tmp_path: Path) -> None:
    path = tmp_path / "leyden.db"
    await fill(path, 2, "small")
    await fill(path, 100, "large")
    store = await Store(path).start()
    before = store.database.size()
    await store.delete_run("large")
    assert store.database.size() < before / 5
    assert (await store.read(queries.summarise_run, "small")).calls == 2
    await store.close()


async def test_a_reader_that_takes_long_stops_no_writer_while_a_run_is_deleted(tmp_path: Path) -> None:
    await fill(tmp_path / "leyden.db", 5)
    store = await Store(tmp_path / "leyden.db").start()
    with store.database.reader.begin() as reader:
        queries.list_run_ids(reader)
        async with asyncio.timeout(20):  # as a writer that waits for a connection has 30 s
            await store.delete_run("r")
            await store.create_run(RunSpec("other"))
    await store.close()


async def test_an_interrupted_deletion_continues_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "leyden.db"
    await fill(path, 5)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE runs SET state = 'deleting'")
    connection.close()
    checksums_file(path).unlink()
    store = await Store(path).start()
    with store.notifications.listen("r", "run.deleted") as gone:
        await gone.wait()
    assert await store.read(lambda c: c.scalar(text("SELECT count(*) FROM calls"))) == 0
    await store.close()


async def test_a_conversation_takes_space_linear_in_its_tokens(tmp_path: Path) -> None:
    sizes = []
    for turns in (50, 100):
        store = await Store(tmp_path / f"{turns}.db").start()
        await store.create_run(RunSpec("r"))
        await store.enqueue("r", GroupSpec("g", Task("t", {})))
        (grant,) = await store.lease(LeaseQuery("w", 1, None, None))
        parent, length = None, 0
        for turn in range(turns):
            added = tuple(range(300, 400))
            call = Call(
                f"c{turn}",
                parent=parent,
                kept_ids=length,
                prompt_ids=added,
                completion_ids=added,
                logprobs=(-0.5,) * 100,
                messages=({"role": "user", "content": "x" * 300},),
                response={"role": "assistant", "content": "y" * 300},
            )
            await store.record_calls("r", grant.attempt.id, [call])
            parent, length = call.id, length + 200
        episode = await store.read(queries.get_episode, "r", grant.attempt.id)
        assert len(episode.prompt_ids(episode.calls[-1])) == 200 * turns - 100
        rows = await store.read(lambda c: c.execute(text("SELECT * FROM calls")).all())
        sizes.append(sum(len(cell) for row in rows for cell in row if isinstance(cell, (str, bytes))))
        await store.close()
    assert sizes[1] < 2.1 * sizes[0]


async def test_a_copy_taken_while_the_store_is_in_use_is_a_sound_store(tmp_path: Path) -> None:
    """The files of a process that was killed are a copy of this kind."""
    store = await Store(tmp_path / "leyden.db").start()
    await store.create_run(RunSpec("r"))
    (tmp_path / "copy").mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(tmp_path / f"leyden.db{suffix}", tmp_path / "copy" / f"leyden.db{suffix}")
    await store.close()
    copy = await Store(tmp_path / "copy" / "leyden.db").start()
    assert await copy.read(queries.list_run_ids) == ["r"]
    await copy.close()


async def test_space_is_given_back_while_the_writer_writes(store: Store) -> None:
    if store.database.dialect == "sqlite":
        pytest.skip("SQLite shrinks in short steps between transactions")
    with store.database.transaction():  # the only connection of the writer
        async with asyncio.timeout(20):
            assert not await asyncio.to_thread(store.database.shrink)


async def test_a_store_that_cannot_recover_lets_go_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: Store) -> None:
        raise StoreUnavailable("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(Store, "renew_leases", fail)
        with pytest.raises(StoreUnavailable):
            await Store(tmp_path / "leyden.db").start()
    await (await Store(tmp_path / "leyden.db").start()).close()
