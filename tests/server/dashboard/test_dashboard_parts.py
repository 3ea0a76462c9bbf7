"""The parts of a rollout's page: prefix tree, text of tokens, credit; the page of workers; runs of other folders."""

import asyncio
import gc
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, cast

import pytest
import requests
from browsing import AVAILABLE, MISSING, READY, open_browser
from modelserving import eventually
from serving import ServerProcess
from smallepisodes import episode
from sqlalchemy import Connection

from leyden.api.client import Remote
from leyden.api.wire import FinishRequest, GroupSpec, LeaseRequest, RunSpec
from leyden.models.source import BUNDLED
from leyden.outcomes import Ending, Outcome
from leyden.process.usage import ResourceUse
from leyden.records import Call, CallCredit, Metric, Reward, RewardKind, StepCredits, Task, Version, VersionRun
from leyden.rendering.tokenizer import Tokenizer
from leyden.runs.run_files import read_run_files
from leyden.server.control.keys import KeyKind
from leyden.server.dashboard.prefix_tree import prefix_tree
from leyden.server.dashboard.rollout_view import untrained_tokens
from leyden.server.dashboard.run_stores import RunStores
from leyden.server.dashboard.store_polling import Counts, StorePolling
from leyden.server.gateway.prompts.prompt_tokens import token_texts
from leyden.store.database import Database
from leyden.store.errors import NotFound, StoreClosed
from leyden.store.read import queries
from leyden.store.read.run_digest import RunDigest, digest_run
from leyden.store.store import Store

SPARK = Path(str(BUNDLED["spark"]))


def test_a_tree_has_every_shared_token_once() -> None:
    first = Call("a", prompt_ids=(1, 2, 3), completion_ids=(4, 5), logprobs=(0.0, 0.0))
    second = Call("b", parent="a", kept_ids=5, prompt_ids=(6,), completion_ids=(7,), logprobs=(0.0,))
    other = Call("c", prompt_ids=(1, 2, 3), completion_ids=(4, 8), logprobs=(0.0, 0.0))
    tree = prefix_tree([episode(0, 1.0, [first, second]), episode(1, 0.0, [other])], lambda ids: "".join(map(str, ids)))
    assert (tree.tokens, tree.distinct) == (5 + 7 + 5, 8)
    found = [(node.parent, node.text, node.sampled, node.calls, node.rollouts) for node in tree.nodes]
    assert found == [
        (-1, "123", False, 3, (0, 1)),
        (0, "4", True, 3, (0, 1)),
        (1, "5", True, 2, (0,)),
        (1, "8", True, 1, (1,)),
        (2, "6", False, 1, (0,)),
        (4, "7", True, 1, (0,)),
    ]


@pytest.mark.parametrize("text", ["What is 2 plus 3?", " leading space", "naïve – 漢字 🙂 end", "a\n\nb"])
def test_the_texts_of_tokens_add_up_to_the_text(text: str) -> None:
    tokenizer = Tokenizer.load(SPARK)
    ids = tokenizer.encode(text)
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == tokenizer.decode(ids)


def test_tokens_that_are_not_trained_on_say_why() -> None:
    call = Call(
        "c",
        completion_ids=(1, 2, 3, 4, 5),
        logprobs=(0.0,) * 5,
        allowed=(1.0, 0.0, 1.0, 1.0, 1.0),
        context_tail=1,
        versions=(VersionRun(3, 6), VersionRun(2, 7)),
    )
    assert untrained_tokens(call, None) == ["", "forced by the grammar", "", "", "after the stop string"]
    stale = CallCredit("a", "c", 1.0, 0.5, 0.5, tokens=1)
    assert untrained_tokens(call, stale)[::2] == ["too old", "too old", "after the stop string"]
    assert untrained_tokens(call, CallCredit("a", "c", excluded="its advantage is 0"))[0] == ""


def test_a_runs_files_are_its_checkpoints_and_the_ends_of_its_logs(tmp_path: Path) -> None:
    for step, best in ((1, 1), (2, 1)):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "state.json").write_text(f'{{"step": {step}, "best_step": {best}}}')
    (tmp_path / "train.log").write_text("x" * 70_000 + "\nlast line\n")
    found = read_run_files(tmp_path)
    assert [(one.step, one.best, one.bytes > 0) for one in found.checkpoints] == [(1, True, True), (2, False, True)]
    assert found.logs == {"train.log": "last line\n"}
    (tmp_path / "step-2" / "state.json").write_text("damaged")
    assert read_run_files(tmp_path).checkpoints == ()


async def fill(server: ServerProcess, run: str = "calc") -> None:
    """A run with one group of two rollouts that answered in spark's tokens, and one rollout that is running."""
    tokenizer = Tokenizer.load(SPARK)
    prompt, answers = (
        tuple(tokenizer.encode("What is 2 plus 3?")),
        [tuple(tokenizer.encode(t)) for t in ("five", "six")],
    )
    async with Remote(server.url, server.admin_key) as remote:
        await remote.create_run(RunSpec(run, config={"model": "spark"}))
        await remote.publish_version(run, Version("policy", 3))
        await remote.enqueue(run, GroupSpec(f"{run}-1", Task("t", {"question": "2 + 3"}), 2, step=1))
        leased = await remote.lease(LeaseRequest("worker-one", 2, run=run))
        for number, (lease, ids) in enumerate(zip(leased, answers, strict=True)):
            call = Call(
                "c",
                role="solver",
                prompt_ids=prompt,
                completion_ids=ids,
                logprobs=(-0.5,) * len(ids),
                versions=(VersionRun(len(ids), 2),),
                messages=({"role": "user", "content": "What is 2 plus 3?"},),
                response={"role": "assistant", "content": "five"},
            )
            await remote.record_calls(run, lease.attempt.id, [call])
            step = Reward("s", 0.25, RewardKind.STEP, "brevity", call="c")
            done = FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("f", float(1 - number)), step))
            await remote.finish(run, lease.attempt.id, done)
        credits = [
            CallCredit(leased[0].attempt.id, "c", 1.0, 0.75, 0.5, 2),
            CallCredit(leased[1].attempt.id, "c", excluded="its advantage is 0"),
        ]
        await remote.record_credits(run, StepCredits(1, tuple(credits)))
        await remote.enqueue(run, GroupSpec(f"{run}-2", Task("u", {}), 3, step=2))
        await remote.lease(LeaseRequest("worker-two", 1, run=run, use=ResourceUse(1.5, 2.5)))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(SPARK, home / "step-1")  # a checkpoint, whose tokenizer is used
    (home / "step-1" / "state.json").write_text('{"step": 1}')
    with ServerProcess(home) as server:
        asyncio.run(fill(server))
        yield server


def test_runs_trained_in_folders_of_the_home_are_shown_too(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "runs" / "trained") as elsewhere:
        asyncio.run(fill(elsewhere, "trained"))
    shutil.copytree(SPARK, tmp_path / "runs" / "trained" / "step-2")
    (tmp_path / "runs" / "trained" / "step-2" / "state.json").write_text('{"step": 2}')
    with ServerProcess(tmp_path / "runs") as server:
        asyncio.run(fill(server))
        session = requests.Session()
        session.headers["authorization"] = f"Bearer {server.key(KeyKind.VIEWER)}"

        def get(path: str) -> Any:
            reply = session.get(server.url + path, timeout=30)
            assert reply.status_code == 200, reply.text
            return reply.json()

        assert {card["id"] for card in get("/api/overview")} == {"calc", "trained"}
        assert get("/api/runs/trained/card")["model"] == get("/api/runs/trained/view")["config"]["model"] == "spark"
        assert get("/api/runs/trained/search")["total"] == 5
        assert get("/api/runs/trained/facets")["roles"] == ["solver"]
        assert get("/api/runs/trained/rewards")["train"][0]["mean"] == 0.5
        view = get("/api/runs/trained/rollouts/trained-1.0/view")
        assert "".join(token[0] for token in view["calls"][0]["tokens"]) == "five"
        assert get("/api/runs/trained/groups/trained-1/tree")["distinct"] > 0
        mine = {"authorization": f"Bearer {server.key(KeyKind.VIEWER, run='calc')}"}
        assert requests.get(server.url + "/api/runs/trained/card", headers=mine, timeout=30).status_code == 403
        assert [card["id"] for card in requests.get(server.url + "/api/overview", headers=mine, timeout=30).json()] == [
            "calc"
        ]
        assert session.get(server.url + "/api/runs/nothing/card", timeout=30).status_code == 404


async def test_a_damaged_store_hides_no_other_run(tmp_path: Path) -> None:
    for name in ("sound", "damaged"):
        other = await Store(tmp_path / name / "leyden.db").start()
        await other.create_run(RunSpec(name))
        await other.close()
    with closing(sqlite3.connect(tmp_path / "damaged" / "leyden.db")) as database:
        database.execute("ALTER TABLE runs RENAME TO lost")
    store = await Store(tmp_path / "leyden.db").start()
    stores = RunStores(store, tmp_path)
    assert list(await stores.runs(None)) == ["sound"]
    stores.close()
    await store.close()


async def test_a_page_of_a_run_reads_no_names_of_others(tmp_path: Path) -> None:
    other = await Store(tmp_path / "trained" / "leyden.db").start()
    await other.create_run(RunSpec("trained"))
    await other.close()
    store = await Store(tmp_path / "leyden.db").start()
    for run in ("calc", "sums"):
        await store.create_run(RunSpec(run))
    read: list[list[str]] = []

    class Counted:
        async def read(self, query: Any, *args: Any) -> Any:
            read.append(await store.read(query, *args))
            return read[-1]

    stores = RunStores(cast("Store", Counted()), tmp_path)
    assert await stores.find("calc") == (None, "calc")
    assert await stores.find("trained") == (tmp_path / "trained", "trained")
    assert {name for names in read for name in names} == {"calc"}
    assert await stores.find("trained:trained") == (None, "trained:trained")
    await store.create_run(RunSpec("trained"))
    assert await stores.find("trained:trained") == (tmp_path / "trained", "trained")
    stores.close()
    await store.close()


async def test_a_store_that_is_deleted_while_the_stores_are_listed_is_left_out(tmp_path: Path) -> None:
    class OneDeleted(RunStores):
        def folders(self) -> list[Path]:
            return [tmp_path / "deleted", *super().folders()]

    other = await Store(tmp_path / "other" / "leyden.db").start()
    store = await Store(tmp_path / "leyden.db").start()
    stores = OneDeleted(store, tmp_path)
    assert await stores.read_active(lambda connection, runs: "read") == ["read"]
    stores.close()
    await store.close()
    await other.close()


async def test_a_run_whose_folder_was_deleted_is_not_found_and_its_store_is_closed(tmp_path: Path) -> None:
    other = await Store(tmp_path / "other" / "leyden.db").start()
    await other.create_run(RunSpec("other"))
    await other.close()
    store = await Store(tmp_path / "leyden.db").start()
    stores = RunStores(store, tmp_path)
    assert (await stores.read("other", queries.get_run)).id == "other"
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(NotFound, match="no run 'other'"):
        await stores.read("other", queries.get_run)
    assert list(await stores.runs(None)) == []
    assert not [path for path in open_files() if path.startswith(str(tmp_path / "other"))]
    stores.close()
    await store.close()


async def test_the_totals_of_a_run_that_was_started_over_are_its_own(tmp_path: Path) -> None:
    """Its store counts events from 1 again."""
    store = await Store(tmp_path / "leyden.db").start()
    stores, found = RunStores(store, tmp_path), []
    for size in (2, 5):
        other = await Store(tmp_path / "other" / "leyden.db").start()
        await other.create_run(RunSpec("other"))
        await other.enqueue("other", GroupSpec("g", Task("t", {}), size))
        await other.close()
        found.append((await stores.digest(await stores.find("other"))).states)
        shutil.rmtree(tmp_path / "other")
    assert found == [{"queued": 2}, {"queued": 5}]
    stores.close()
    await store.close()


class CountingLock:
    """Counts how often it was asked for."""

    def __init__(self) -> None:
        self.asked, self._lock = 0, Lock()

    def __enter__(self) -> None:
        self.asked += 1
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


async def test_a_store_that_a_thread_opens_while_the_server_stops_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, going, lock = Event(), Event(), CountingLock()

    class SlowDatabase(Database):
        def __init__(self, location: str, *, readonly: bool) -> None:
            begun.set()
            going.wait(120)
            super().__init__(location, readonly=readonly)

    await (await Store(tmp_path / "other" / "leyden.db").start()).close()
    store = await Store(tmp_path / "leyden.db").start()
    monkeypatch.setattr("leyden.server.dashboard.run_stores.Database", SlowDatabase)
    stores = RunStores(store, tmp_path)
    monkeypatch.setattr(stores, "_opening", lock)
    read = partial(stores.read_other, tmp_path / "other", lambda connection: "read")
    reading = asyncio.create_task(stores.in_thread(read))
    await eventually(begun.is_set)
    stopping = asyncio.create_task(asyncio.to_thread(stores.close))
    await eventually(lambda: lock.asked == 2 or stopping.done())
    going.set()
    await stopping
    assert await reading == "read"
    gc.collect()  # a connection that was in use at the time ends with its pool
    assert not [path for path in open_files() if path.startswith(str(tmp_path / "other"))]
    with pytest.raises(StoreClosed):
        read()
    await store.close()


async def test_totals_of_runs_that_are_gone_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def count(connection: Connection, run: str) -> RunDigest:
        read.append(run)
        return digest_run(connection, run)

    async def digest_all() -> list[str]:
        read.clear()
        for run in ("mine", "stays", "other", "never"):
            await stores.digest(await stores.find(run))
        return list(read)

    async def train_other() -> None:
        other = await Store(tmp_path / "other" / "leyden.db").start()
        await other.create_run(RunSpec("other"))
        await other.close()

    monkeypatch.setattr("leyden.server.dashboard.run_stores.digest_run", count)
    store = await Store(tmp_path / "leyden.db").start()
    for run in ("mine", "stays"):
        await store.create_run(RunSpec(run))
    await train_other()
    stores = RunStores(store, tmp_path)
    await digest_all()
    await store.delete_run("mine")
    shutil.rmtree(tmp_path / "other")
    assert list(await stores.runs(None)) == ["stays"]
    await store.create_run(RunSpec("mine"))
    await train_other()
    assert await digest_all() == ["mine", "other", "never"]
    assert sorted(await stores.runs(None)) == ["mine", "other", "stays"]
    assert await digest_all() == ["never"]
    stores.close()
    await store.close()


async def test_pages_that_read_other_stores_leave_threads_for_model_calls(tmp_path: Path) -> None:
    other = await Store(tmp_path / "other" / "leyden.db").start()
    await other.create_run(RunSpec("other"))
    store = await Store(tmp_path / "leyden.db").start()
    stores, done, begun = RunStores(store, tmp_path), Event(), list[object]()

    def query(connection: object, run: str) -> bool:
        begun.append(connection)
        return done.wait(120)

    pages = [asyncio.create_task(stores.read("other", query)) for _ in range(40)]
    await eventually(lambda: len(begun) == 4)
    async with asyncio.timeout(20):
        await asyncio.to_thread(lambda: None)
    done.set()
    assert all(await asyncio.gather(*pages))
    stores.close()
    await store.close()
    await other.close()


def test_runs_that_another_process_writes_are_live(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    with ServerProcess(home / "trained") as elsewhere, ServerProcess(home) as server:
        asyncio.run(fill(elsewhere, "trained"))
        headers = {"authorization": f"Bearer {server.key(KeyKind.VIEWER)}"}

        def step() -> int:
            card = requests.get(server.url + "/api/runs/trained/card", headers=headers, timeout=30).json()
            return int(card["step"])

        async def train_on(number: int) -> None:
            async with Remote(elsewhere.url, elsewhere.admin_key) as remote:
                await remote.record_metrics("trained", [Metric(number, "reward/mean", 0.5)])

        assert step() == 0
        asyncio.run(train_on(1))  # after the page has read its data, and before it listens
        for path in ("/api/runs/trained/stream", "/api/stream"):
            with requests.get(server.url + path, headers=headers, stream=True, timeout=30) as stream:
                lines = stream.iter_lines()
                assert b'"metrics"' in next(line for line in lines if b"trained" in line)
                assert step() >= 1
                asyncio.run(train_on(2))
                assert b'"metrics"' in next(line for line in lines if b"trained" in line)
                assert step() == 2
        fleet = requests.get(server.url + "/api/fleet", headers=headers, timeout=30).json()
        assert {worker["id"] for worker in fleet["workers"]} == {"worker-one", "worker-two"}
        assert [lease["run"] for lease in fleet["leases"]] == ["trained"]
        assert (fleet["queued"], fleet["running"], fleet["ended"]) == (2, 1, 2)
        other = {"authorization": f"Bearer {server.key(KeyKind.VIEWER, run='calc')}"}
        assert requests.get(server.url + "/api/runs/trained/stream", headers=other, timeout=30).status_code == 403


async def test_a_run_that_is_started_anew_is_followed_from_its_first_event(tmp_path: Path) -> None:
    own = await Store(tmp_path / "own.db").start()
    counted: asyncio.Queue[Counts] = asyncio.Queue()
    polling = StorePolling(RunStores(own, tmp_path))
    with polling.listen(counted.put_nowait):
        for names in (("a", "b"), ("c",)):
            store = await Store(new_folder(tmp_path / "run") / "leyden.db").start()
            for name in names:
                await store.create_run(RunSpec(name))
            async with asyncio.timeout(30):
                found: set[str] = set()
                while not found.issuperset(f"run:{name}" for name in names):
                    found |= {run for run, _ in await counted.get()}
            await store.close()
    await own.close()


def open_files() -> list[str]:
    """The files that this process has open, deleted ones included."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(str(descriptor.readlink()))
    return found


def new_folder(path: Path) -> Path:
    """An empty folder; one that was there before is moved aside."""
    if path.exists():
        path.rename(path.with_name("earlier"))
    path.mkdir()
    return path


def test_a_queued_rollout_says_that_it_waits(shown: ServerProcess) -> None:
    headers = {"authorization": f"Bearer {shown.key(KeyKind.VIEWER)}"}
    reply = requests.get(shown.url + "/api/runs/calc/rollouts/calc-2.2/view", headers=headers, timeout=30)
    assert reply.status_code == 404 and "waits in the queue" in reply.json()["error"]["message"]


@pytest.fixture
def page(shown: ServerProcess) -> Iterator[Any]:
    if not AVAILABLE:
        pytest.skip(MISSING)
    with open_browser() as browser:
        opened = browser.new_context(base_url=shown.url).new_page()
        opened.goto(shown.running.dashboard)
        opened.wait_for_selector(READY)
        yield opened


@pytest.mark.slow
def test_a_rollouts_page_has_token_texts_credit_and_the_tree(page: Any) -> None:
    page.goto("/runs/calc/rollouts/calc-1.0")
    page.wait_for_selector(READY)
    tokens = page.locator(".tokens .token")
    assert "".join(tokens.all_text_contents()) == "five"
    assert "logprob -0.500" in tokens.first.get_attribute("title")
    assert "version 2, 1 behind" in tokens.first.get_attribute("title")
    chips = page.locator("article.call .chip").all_inner_texts()
    assert any("value 1, advantage 0.750" in chip for chip in chips), chips
    assert any("brevity 0.250" in chip for chip in chips), chips
    page.get_by_label("Shade tokens by").select_option("advantage")
    assert "up" in page.locator(".tokens .token").first.get_attribute("class")
    page.locator("summary", has_text="Prefix tree").click()
    page.wait_for_selector("svg.tree rect")
    assert page.locator("svg.tree rect.prompt").count() == 1
    assert page.locator("svg.tree rect.sampled").count() >= 2
    page.locator("summary", has_text="side by side").click()
    page.wait_for_selector(".column")
    columns = page.locator(".column").all_inner_texts()
    assert len(columns) == 2 and "five" in columns[0] and "six" in columns[1]
    assert "advantage 0.750" in columns[0] and page.locator(".column.own").count() == 1
    assert "agent · attempt 1" in page.locator(".waterfall").inner_text()
    page.locator("nav.siblings a").nth(1).click()
    page.wait_for_selector("text=left out: its advantage is 0")


@pytest.mark.slow
def test_a_call_is_branched_from_by_a_command_or_with_the_admin_key_by_a_live_server(
    page: Any, shown: ServerProcess
) -> None:
    page.goto("/runs/calc/rollouts/calc-1.0")
    page.get_by_role("button", name="branch here").click()
    command = page.locator(".branch pre")
    assert command.inner_text() == "leyden replay calc calc-1.0 --from 1 --model calc"
    assert page.get_by_label("Admin key").count() == 0  # no model is served here
    page.get_by_role("button", name="branch here").click()
    assert command.count() == 0

    def with_engine(route: Any) -> None:
        fleet = route.fetch().json()
        route.fulfill(json={**fleet, "engines": [{"run": ""}]})

    page.route("**/api/fleet", with_engine)
    page.get_by_role("button", name="branch here").click()
    page.get_by_label("Admin key").fill(shown.key(KeyKind.VIEWER))
    page.get_by_role("button", name="Run").click()
    page.wait_for_selector(".branch [role=status]:has-text('lacks the permission')")
    page.get_by_label("Admin key").fill(shown.admin_key)
    page.get_by_role("button", name="Run").click()
    link = page.locator(".branch a")
    link.wait_for()
    headers = {"authorization": f"Bearer {shown.admin_key}"}
    url = f"{shown.url}/api/runs/calc/rollouts/{link.inner_text()}"
    rollout = requests.get(url, headers=headers, timeout=30).json()["rollout"]
    assert rollout["purpose"] == "dev" and rollout["origin"] == {"attempt": "calc-1.0.1", "calls": 1}
    assert not page.context.storage_state()["origins"]  # the key is kept nowhere


@pytest.mark.slow
def test_a_running_rollout_is_followed_call_by_call(page: Any, shown: ServerProcess) -> None:
    page.goto("/runs/calc/rollouts/calc-2.0")
    page.wait_for_selector("text=The agent made no model call")
    page.locator("summary", has_text="Prefix tree").click()

    async def call() -> None:
        async with Remote(shown.url, shown.admin_key) as remote:
            made = Call("c", completion_ids=(1,), logprobs=(-0.5,), response={"role": "assistant", "content": "x"})
            await remote.record_calls("calc", "calc-2.0.1", [made])

    thread = Thread(target=lambda: asyncio.run(call()))  # Playwright's loop is active on this one
    thread.start()
    thread.join()
    page.wait_for_selector("article.call")
    assert page.locator("details", has_text="Prefix tree").get_attribute("open") is not None  # as the reader left it


@pytest.mark.slow
def test_the_page_of_workers_has_leases_and_the_queue(page: Any) -> None:
    page.goto("/workers")
    page.wait_for_selector(READY)
    text = page.locator("main").inner_text()
    for fact in ("worker-one", "worker-two", "calc-2.0", "1.5", "2.5 GB"):
        assert fact in text
    facts = dict(zip(page.locator("dt").all_inner_texts(), page.locator("dd").all_inner_texts(), strict=True))
    assert (facts["queued"], facts["running"], facts["ended in ten minutes"]) == ("2", "1", "2")


async def test_a_live_run_lists_the_runs_beside_it(tmp_path: Path) -> None:
    own = await Store(tmp_path / "mine" / "leyden.db").start()
    await own.create_run(RunSpec("mine"))
    other = await Store(tmp_path / "other" / "leyden.db").start()
    await other.create_run(RunSpec("other"))
    await other.close()
    stores = RunStores(own, tmp_path, tmp_path / "mine")
    assert list(await stores.runs(None)) == ["mine", "other"]
    assert (await stores.read("other", queries.get_run)).id == "other"
    stores.close()
    await own.close()
