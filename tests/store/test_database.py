"""What is refused, and what is given back to the disk."""

import asyncio
import hashlib
import resource
import shutil
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import text

from leyden.api.wire import FinishRequest, GroupSpec, LeaseRequest, RunSpec
from leyden.outcomes import Ending, Outcome
from leyden.records import Call, Reward, Task
from leyden.store.database import Database
from leyden.store.errors import StoreUnavailable, StoreUnusable
from leyden.store.read import queries
from leyden.store.store import Store


async def fill(path: Path, calls: int = 3, run: str = "r") -> None:
    store = await Store(path).start()
    await store.create_run(RunSpec(run))
    for number in range(calls):
        await store.enqueue(run, GroupSpec(f"{run}-{number}", Task("t", {})))
        (grant,) = await store.lease(LeaseRequest("w", run=run))
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


@pytest.mark.parametrize("schema", ["8", "999", "eight"])
async def test_a_store_of_another_schema_is_refused_and_left_untouched(tmp_path: Path, schema: str) -> None:
    path = tmp_path / "leyden.db"
    await fill(path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = ? WHERE name = 'schema'", [schema])
    connection.close()
    refuse(path, rf"another version of Leyden \(schema {schema}, and this one reads \d+\): open it with that version")


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


async def test_a_store_of_zero_bytes_is_not_an_empty_store(tmp_path: Path) -> None:
    path = tmp_path / "leyden.db"
    await fill(path)
    path.write_bytes(b"")
    refuse(path, "has 0 bytes")


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
    assert str(refusal.value).startswith("postgresql://me:***@127.0.0.1:1/none?sslmode=disable cannot be opened")
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("first", ["host=db.internal", "dbname = leyden"])
def test_words_of_a_connection_are_no_name_of_a_file(first: str) -> None:
    with pytest.raises(StoreUnusable, match=r"write postgresql://USER:PASSWORD@HOST/DATABASE$"):
        Database(f"{first} password=hunter2")


async def test_two_servers_cannot_write_to_one_file(tmp_path: Path) -> None:
    store = await Store(tmp_path / "leyden.db").start()
    with pytest.raises(StoreUnusable, match="in use"):
        Database(tmp_path / "leyden.db")
    Database(tmp_path / "leyden.db", readonly=True).close()
    await store.close()
    Database(tmp_path / "leyden.db").close()


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
        (grant,) = await store.lease(LeaseRequest("w"))
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
