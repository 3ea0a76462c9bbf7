"""The pages in a real browser, against a real server."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from time import time
from typing import Any

import pytest
import requests
from browsing import AVAILABLE, MISSING, READY, open_browser
from serving import ServerProcess

from leyden.api.client import Remote
from leyden.api.wire import FinishRequest, GroupSpec, LeaseRequest, RunSpec
from leyden.outcomes import Ending, Outcome
from leyden.records import Call, CallCredit, Metric, Purpose, Reward, StepCredits, Task, Version, VersionRun
from leyden.server.control.keys import KeyKind

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
CONFIG = {"model": "spark", "training": {"steps": 4, "learning_rate": 0.001}}


async def step(
    remote: Remote,
    number: int,
    reward: float,
    purpose: Purpose = Purpose.TRAIN,
    task: str = "t",
    run: str = "calc",
) -> None:
    """One step of a run: two rollouts, of which the second fails, and its metrics."""
    group = f"{'step' if purpose is Purpose.TRAIN else 'eval'}-{number}-{task}" + ("" if run == "calc" else f"-{run}")
    await remote.enqueue(run, GroupSpec(group, Task(task, {"question": HOSTILE}), 2, purpose, step=number))
    good, bad = await remote.lease(LeaseRequest("w", 2, run=run))
    call = Call(
        "c",
        role="solver",
        messages=({"role": "user", "content": HOSTILE},),
        response={"role": "assistant", "content": HOSTILE},
        prompt_ids=(1, 2, 3),
        completion_ids=(4, 5),
        logprobs=(-0.1, -3.0),
        versions=(VersionRun(2, number),),
        started=1.0,
        ended=2.0,
    )
    await remote.record_calls(run, good.attempt.id, [call])
    done = FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("f", reward),), output=HOSTILE)
    await remote.finish(run, good.attempt.id, done)
    failed = Outcome(Ending.AGENT_ERROR, f"KeyError {number}: {HOSTILE}")
    await remote.finish(run, bad.attempt.id, FinishRequest(failed))
    if purpose is Purpose.TRAIN:
        metrics = {"training/entropy": 1 / number, **{f"advantage/turn/{turn}": turn / 10 for turn in (0, 2, 10)}}
        await remote.record_metrics(run, [Metric(number, name, value) for name, value in metrics.items()])


async def fill(server: ServerProcess) -> None:
    async with Remote(server.url, server.admin_key) as remote:
        await remote.create_run(RunSpec("calc", config=CONFIG))
        await remote.create_run(RunSpec("other", config={**CONFIG, "model": "larger"}))
        await step(remote, 0, 0.25, Purpose.EVAL)
        await step(remote, 1, 0.5)
        await step(remote, 2, 1.0)
        await step(remote, 0, 0.75, Purpose.EVAL, run="other")
        noise = [Metric(at, "training/kl_start", at * 1e-13, at=time() + 60 * at) for at in range(5)]
        await remote.record_metrics("other", noise)


@pytest.fixture(scope="module")
def filled(server: ServerProcess) -> ServerProcess:
    asyncio_run_elsewhere(fill(server))
    return server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not AVAILABLE:
        pytest.skip(MISSING)
    with open_browser() as running:
        yield running


@pytest.fixture
def page(browser: Any, filled: ServerProcess) -> Iterator[Any]:
    """A page of a browser that has opened the server's link."""
    context = browser.new_context(base_url=filled.url)
    opened = context.new_page()
    opened.goto(filled.running.dashboard)
    opened.wait_for_selector(READY)
    yield opened
    context.close()


# Keys


PATHS = (
    "/",
    "/workers",
    "/compare",
    "/runs/calc",
    "/runs/calc/tasks",
    "/runs/calc/rollouts",
    "/runs/calc/rollouts/step-1-t.0",
)


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_shown_without_a_key(filled: ServerProcess, path: str) -> None:
    reply = requests.get(filled.url + path, timeout=30)
    assert reply.status_code == 401
    assert 'type="password"' in reply.text
    assert "calc" not in reply.text
    assert "script-src 'self'" in reply.headers["content-security-policy"]


def test_a_cookie_holds_a_viewers_key_only(filled: ServerProcess) -> None:
    session = requests.Session()
    assert session.post(filled.url + "/signin", json={"key": filled.key(KeyKind.WORKER)}, timeout=30).status_code == 403
    assert session.post(filled.url + "/signin", json={"key": filled.admin_key}, timeout=30).status_code == 200
    (cookie,) = session.cookies
    assert cookie.value != filled.admin_key and cookie.has_nonstandard_attr("HttpOnly")
    assert session.get(filled.url + "/api/overview", timeout=30).status_code == 200
    assert session.delete(filled.url + "/api/runs/calc", timeout=30).status_code == 403
    forged = {cookie.name: filled.admin_key}
    assert requests.get(filled.url + "/api/overview", cookies=forged, timeout=30).status_code == 401


def test_a_cookie_of_any_form_is_read_at_once(filled: ServerProcess) -> None:
    strange = 'a="' + "\\\\" * 60_000 + '"'  # Python's own parser took a minute, in which the server did nothing else
    assert requests.get(filled.url + "/api/overview", headers={"cookie": strange}, timeout=20).status_code == 401
    key = filled.key(KeyKind.VIEWER)
    session = requests.Session()
    assert session.post(filled.url + "/signin", json={"key": key}, timeout=30).status_code == 200
    (cookie,) = session.cookies
    header = {"cookie": f"other=1; {cookie.name}={cookie.value}; more"}
    assert requests.get(filled.url + "/api/overview", headers=header, timeout=30).status_code == 200


def test_pages_need_a_key_on_a_server_without_keys(tmp_path_factory: pytest.TempPathFactory) -> None:
    with ServerProcess(tmp_path_factory.mktemp("open"), "--keyless") as server:
        assert requests.get(server.url + "/api/runs", timeout=30).status_code == 200
        assert requests.get(server.url + "/", timeout=30).status_code == 401


@pytest.mark.parametrize(
    ("to", "path"), [("/runs/calc", "/runs/calc"), ("//localhost/", "/"), ("/\\\\localhost/", "/")]
)
def test_a_link_may_lead_to_a_page_of_this_server_only(browser: Any, filled: ServerProcess, to: str, path: str) -> None:
    opened = browser.new_page()
    opened.goto(f"{filled.running.dashboard}&to={to}")
    opened.wait_for_url(filled.url + path)
    opened.close()


# Pages


async def fill_pair(server: ServerProcess) -> None:
    """A run that trains two policies, each of which makes a call of a rollout."""
    async with Remote(server.url, server.admin_key) as remote:
        await remote.create_run(RunSpec("pair", config={**CONFIG, "policies": {"writer": {}, "checker": {}}}))
        await remote.enqueue("pair", GroupSpec("pair-1", Task("t", {}), 1, Purpose.TRAIN, step=1))
        (leased,) = await remote.lease(LeaseRequest("w", 1, run="pair"))
        calls = [
            Call(name, policy=name, role=role, completion_ids=(4,), logprobs=(-0.1,), versions=(VersionRun(1, 0),))
            for name, role in (("writer", "author"), ("checker", "checker"))
        ]
        await remote.record_calls("pair", leased.attempt.id, calls)
        for policy, version in (("writer", 0), ("checker", 3)):
            await remote.publish_version("pair", Version(policy, version))
        done = FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("f", 1.0),))
        await remote.finish("pair", leased.attempt.id, done)
        left_out = CallCredit(leased.attempt.id, "checker", excluded="rewarded for other policies only")
        await remote.record_credits("pair", StepCredits(1, (left_out,), "checker"))
        for policy, metric in (("writer", "training/grad_norm"), ("checker", "training/loss")):
            both = {"training/entropy": 0.5, metric: 1.0}
            await remote.record_metrics("pair", [Metric(1, name, value, 1.0, policy) for name, value in both.items()])


def test_a_run_of_two_policies_is_watched_by_policy(page: Any, filled: ServerProcess) -> None:
    asyncio_run_elsewhere(fill_pair(filled))
    page.goto("/runs/pair")
    page.wait_for_selector("[data-chart='gradient norm']")
    assert "writer 0, checker 3" in page.locator(".facts").inner_text()
    assert page.locator("[data-chart='entropy by policy'] .key").all_inner_texts() == ["writer", "checker"]
    page.get_by_label("Policy", exact=True).select_option("checker")
    page.wait_for_selector("[data-chart=loss]")
    assert page.locator("[data-chart='gradient norm']").count() == 0
    page.goto("/runs/pair/rollouts/pair-1.0")
    page.wait_for_selector("article.call")
    heads = page.locator("article.call header").all_inner_texts()
    policies, roles = (page.locator(f"article.call .{kind}").all_inner_texts() for kind in ("policy", "role"))
    assert (policies, roles) == (
        ["writer", "checker"],
        ["author"],
    )  # a role with the name of its policy is not repeated
    assert "left out: rewarded for other policies only" in heads[1]
    tips = [token.get_attribute("title") for token in page.locator(".conversation .token").all()]
    assert ["3 behind" in tip for tip in tips] == [False, True]
    assert page.locator(".waterfall .name").all_inner_texts()[1:] == [
        "model · writer · author · 1 token",
        "model · checker · 1 token",
    ]
    page.goto("/compare?runs=calc,pair")
    page.wait_for_selector(READY)
    page.locator("summary:has-text('training')").click()
    page.wait_for_selector("[data-chart='training/entropy'] .key")
    keys = page.locator("[data-chart='training/entropy'] .key").all_inner_texts()
    assert keys == ["calc", "pair: writer", "pair: checker"]
    page.goto("/runs/calc")
    page.wait_for_selector(READY)
    assert page.get_by_label("Policy", exact=True).count() == 0


def test_a_page_names_its_scripts_before_they_are_imported(page: Any, filled: ServerProcess) -> None:
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url) if request.url.endswith(".js") else None)
    for path in PATHS:
        loaded.clear()
        document = page.goto(path)
        page.wait_for_selector(READY)
        named = [part for part in document.text().split('"') if part.endswith(".js")]
        named += [link.partition(">")[0].lstrip(" <") for link in document.headers["link"].split(",")]
        assert sorted(loaded) == sorted(filled.url + name for name in named)


def test_numbers_and_times_are_written_as_the_browser_would(page: Any) -> None:
    values = [0, 1, 12.34, 999, 1000, 1049, 99_949, 999_949, 999_950, 1_250_000, 123_456_789, 1.5e12, -250_000]
    counts = [0, 999, 1000, 12_345, 1_234_567]
    times = [0, 951_782_400, 1_794_894_161.384]
    assert (
        page.evaluate(
            """([values, counts, times]) => import("/static/dom.js").then((dom) => {
            const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
            return [
                ...values.map((one) => [dom.compact(one), short.format(one)]),
                ...counts.map((one) => [dom.whole(one), one.toLocaleString("en")]),
                ...times.map((one) => [dom.moment(one), new Date(one * 1000).toLocaleString("sv-SE").slice(0, 16)]),
            ].filter(([ours, browsers]) => ours !== browsers);
        })""",
            [values, counts, times],
        )
        == []
    )


def test_questions_and_answers_are_shown_without_the_json_around_them(page: Any) -> None:
    """Their beginnings may be cut anywhere; a task without an id is named by its beginning."""
    shown = {
        '"Ten \\"miles\\""': 'Ten "miles"',
        "12.5": "12.5",
        '{"question":"What is 2 + 3?"}': "What is 2 + 3?",
        '{"id":"add","question":"2: \\"a\\", {b}","answer":5,"hard":true}': '2: "a", {b} · 5 · true',
        '{"question":"Ünicode\\nand mo': "Ünicode and mo",
        '{"messages":[{"role":"user","content":"Hi"}],"n":null}': "user · Hi · null",
        '{"id":"add"}': '{"id":"add"}',
        "[1,2]": "[1,2]",
        "": "",
    }
    read = page.evaluate("(all) => import('/static/dom.js').then((dom) => all.map(dom.plain))", list(shown))
    assert read == list(shown.values())
    names = "() => import('/static/dom.js').then(({ taskName }) => [taskName('t', 'q'), taskName('0'.repeat(16), 'q')])"
    assert page.evaluate(names) == ["t", "q"]


def test_a_run_is_watched_from_its_list_to_one_rollout(page: Any, filled: ServerProcess) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    row = page.locator("tr[data-run=calc]")
    assert "2 / 4" in row.inner_text() and "spark" in row.inner_text()
    row.get_by_role("link", name="calc").click()
    page.wait_for_selector("[data-chart=entropy] path.line")
    assert page.locator("[data-chart='held-out reward'] circle[data-step='0']").count() == 1
    assert page.locator("[data-chart^='mean advantage by turn'] .key").all_inner_texts() == ["0", "2", "10"]
    page.wait_for_selector(".live.on")

    async def train_on() -> None:
        async with Remote(filled.url, filled.admin_key) as remote:
            await step(remote, 3, 1.0)

    asyncio_run_elsewhere(train_on())
    page.wait_for_selector("dd:has-text('3 / 4')", timeout=30_000)  # without loading the page again

    page.locator("[data-chart='held-out reward'] svg").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("tr[data-rollout='eval-0-t.0']")
    assert page.locator("tr[data-rollout]").count() == 2
    page.locator("tr[data-rollout='eval-0-t.0'] a.row").click()
    page.wait_for_selector(".tokens .token")
    assert HOSTILE in page.locator("article.call").first.inner_text()
    assert page.title() == "eval-0-t.0 · Leyden"  # no script of the agent's text has run
    assert page.locator("main img, main script").count() == 0
    assert not errors


def test_rollouts_are_filtered_and_failures_grouped(page: Any) -> None:
    page.goto("/runs/calc/rollouts?purpose=train")
    page.wait_for_selector(READY)
    page.locator("select[name=ending]").select_option("agent_error")
    page.wait_for_url("**ending=agent_error**")
    page.wait_for_selector(READY)
    assert all("agent error" in row for row in page.locator("tbody tr[data-rollout]").all_inner_texts())
    page.fill("input[name=text]", "no such text")
    page.press("input[name=text]", "Enter")
    page.wait_for_selector("td:has-text('No rollout matches')")
    page.fill("input[name=text]", "onerror")
    page.press("input[name=text]", "Enter")
    page.wait_for_selector("tr[data-rollout]")
    assert HOSTILE[:20] in page.locator("tr[data-rollout] td").nth(2).inner_text()
    page.locator("summary").click()
    group = page.locator("details button.link")
    group.first.wait_for()
    assert group.count() == 1  # messages that differ in a number only
    assert HOSTILE in group.inner_text()


def test_tasks_are_listed_by_success_rate(page: Any) -> None:
    page.goto("/runs/calc/tasks?purpose=eval")
    page.wait_for_selector(READY)
    row = page.locator("tr[data-task=t]")
    assert row.inner_text().split()[-6:] == ["0", "0.125", "0", "1", "2", "0"]
    assert HOSTILE[:8] in row.inner_text() and page.locator("main img").count() == 0
    page.get_by_role("button", name="reward").click()
    page.wait_for_url("**sort=-reward**")
    page.wait_for_selector("th[aria-sort=descending] >> text=reward")
    page.locator("tr[data-task=t] a.row").click()
    page.wait_for_selector("tr[data-rollout='eval-0-t.0']")
    assert page.locator("tr[data-rollout]").count() == 2


def test_charts_are_zoomed_smoothed_and_drawn_by_time(page: Any) -> None:
    page.goto("/runs/other")
    page.wait_for_selector(READY)
    name = "divergence from the starting model"
    chart = page.locator(f"[data-chart='{name}']")
    assert "e-13" not in chart.inner_html()  # rounding is 0
    drawing = chart.locator("svg")

    def axis() -> list[str]:
        return drawing.locator("text[text-anchor=middle]").all_text_contents()

    assert axis() == ["0", "1", "2", "3", "4"]
    box = drawing.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 50)
    page.mouse.up()
    page.get_by_role("button", name="Whole range").wait_for()
    page.wait_for_selector(f"[data-chart='{name}'] svg[aria-label$='step 3']")
    assert axis()[0] == "1" and axis()[-1] == "3"
    assert page.url.endswith("/runs/other")  # a drag opens no step
    drawing.focus()
    page.keyboard.press("Escape")
    page.wait_for_selector(f"[data-chart='{name}'] svg[aria-label$='step 4']")
    page.get_by_label("Smoothing").fill("0.5")
    page.wait_for_selector(f"[data-chart='{name}'] path.raw", state="attached")
    page.get_by_label("Horizontal axis").select_option("time")
    page.wait_for_selector(f"[data-chart='{name}'] text:has-text('4:00')", state="attached")
    assert page.evaluate(
        """() => import("/static/chart.js").then(({ smoothed }) => smoothed([4, 0, 0], 0.5))"""
    ) == pytest.approx([4, 4 / 3, 4 / 7])


def test_the_time_that_is_left_follows_the_last_steps(page: Any) -> None:
    left = """([steps, values, more]) =>
        import("/static/view.js").then(({ timeLeft }) => timeLeft({ steps, values }, more))"""
    assert page.evaluate(left, [[1, 2, 4], [100, 110, 130], 3]) == 30
    assert page.evaluate(left, [[1], [100], 3]) is None
    assert page.evaluate(left, [[1, 2], [100, 110], 0]) is None


def test_runs_are_compared_in_pairs_and_in_every_metric(page: Any) -> None:
    page.goto("/compare?runs=calc,other")
    page.wait_for_selector("[data-chart='held-out reward'] path.line >> nth=1", state="attached")
    assert page.locator("[data-difference=other]").inner_text() == "+0.250 1 task"
    page.locator("summary", has_text="training").click()
    page.wait_for_selector("[data-chart='training/kl_start'] path.line", state="attached")
    assert page.locator("[data-chart='training/entropy'] .key").all_inner_texts() == ["calc"]


@pytest.mark.slow
def test_every_page_works_in_the_dark_on_a_phone(filled: ServerProcess, browser: Any) -> None:
    context = browser.new_context(base_url=filled.url, color_scheme="dark", viewport={"width": 390, "height": 800})
    opened = context.new_page()
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(filled.running.dashboard)
    opened.wait_for_selector(READY)
    long = "a-long-name-" * 8

    async def fill_long() -> None:
        async with Remote(filled.url, filled.admin_key) as remote:
            await remote.create_run(RunSpec(long, config={**CONFIG, "model": long}))
            await remote.enqueue(long, GroupSpec("long-group", Task("t", {"question": long * 5}), 1, step=1))
            (leased,) = await remote.lease(LeaseRequest("w", 1, run=long))
            call = Call("c", role=long, messages=({"role": "user", "content": long * 5},), completion_ids=(4,))
            await remote.record_calls(long, leased.attempt.id, [call])
            await remote.finish(long, leased.attempt.id, FinishRequest(Outcome(Ending.AGENT_ERROR, long * 5)))

    asyncio_run_elsewhere(fill_long())
    of_long = (f"/runs/{long}", f"/runs/{long}/rollouts", f"/runs/{long}/rollouts/long-group.0")
    for path in (*PATHS, *of_long, f"/compare?runs=calc,{long}", "/compare?runs=calc,other"):
        opened.goto(path)
        opened.wait_for_selector(READY)
        assert opened.evaluate("document.documentElement.scrollWidth") <= 390, path
    assert "larger" in opened.locator("table").last.inner_text()
    assert not errors
    context.close()


@pytest.mark.slow
def test_charts_are_whole_and_their_data_can_be_downloaded(page: Any, filled: ServerProcess) -> None:
    async def measure() -> None:
        async with Remote(filled.url, filled.admin_key) as remote:
            outcomes = {"rollouts/succeeded": (2, 1, 2), "rollouts/agent_error": (None, 1, None)}
            found = [(1 + at, name, value) for name, values in outcomes.items() for at, value in enumerate(values)]
            await remote.record_metrics(
                "calc", [Metric(at, name, value) for at, name, value in found if value is not None]
            )
            await step(remote, 4, 0.5, Purpose.EVAL)
            await step(remote, 4, 1.0, Purpose.EVAL, "u")

    asyncio_run_elsewhere(measure())
    page.goto("/runs/calc")
    page.wait_for_selector(READY)
    whisker = page.locator("[data-chart='held-out reward'] .whisker").first
    ends = [float(whisker.get_attribute(name)) for name in ("y1", "y2")]
    assert all(0 <= end <= 190 for end in ends) and abs(ends[0] - ends[1]) > 10
    stacked = page.locator("[data-chart='outcomes of a step'] path.stacked")
    assert stacked.count() == 2  # failures at step 2 only: 0 at the other steps, so that areas do not overlap
    assert all(path.get_attribute("d").count("L") == 5 for path in stacked.all())
    with page.expect_download() as loading:
        page.get_by_label("Data of entropy as CSV").click()
    assert loading.value.path().read_text().splitlines()[:2] == ["step,training/entropy", "1,1.0"]
    page.goto("/compare?runs=calc,other")
    page.wait_for_selector(READY)
    with page.expect_download() as loading:
        page.get_by_label("Data of held-out reward as CSV").click()
    assert loading.value.path().read_text().splitlines()[0].startswith("step,calc,calc: standard error")


def asyncio_run_elsewhere(work: Any) -> None:
    """Run a coroutine on another thread: Playwright's loop is active on this one."""
    from threading import Thread

    thread = Thread(target=lambda: asyncio.run(work))
    thread.start()
    thread.join()


@pytest.mark.slow
def test_live_pages_keep_the_readers_marker_focus_and_filter(page: Any, filled: ServerProcess) -> None:
    async def record(number: int) -> None:
        async with Remote(filled.url, filled.admin_key) as remote:
            await remote.record_metrics("calc", [Metric(number, "training/entropy", 0.1)])

    page.locator("tr[data-run=calc] a.row").focus()
    page.wait_for_selector(".live.on")
    asyncio_run_elsewhere(record(7))
    page.wait_for_selector("tr[data-run=calc]:has-text('7 / 4')")
    assert page.evaluate("document.activeElement.textContent") == "calc"  # drawn again, and still focused

    page.goto("/runs/calc")
    page.wait_for_selector(".live.on")
    page.locator("[data-chart=entropy] svg").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    marked = page.locator("[data-chart=entropy] .tip .step").inner_text()
    asyncio_run_elsewhere(record(8))
    page.wait_for_selector("dd:has-text('8 / 4')")
    page.wait_for_selector("[data-chart=entropy] svg[aria-label$='step 8']")
    assert page.locator("[data-chart=entropy] .tip .step").inner_text() == marked != "step 8"
    assert page.evaluate("document.activeElement.closest('[data-chart]').dataset.chart") == "entropy"

    page.goto("/runs/calc/rollouts")
    page.wait_for_selector(READY)
    field = page.get_by_label("step from")
    field.press_sequentially("x")  # no number: ignored, and not an error of the server
    field.fill("1")
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Clear").wait_for()  # drawn again with the filter
    assert page.evaluate("document.activeElement.name") == "step_to"


def test_an_open_page_outlives_its_server(browser: Any, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path).start()
    asyncio_run_elsewhere(fill(server))
    opened = browser.new_page()
    opened.goto(f"{server.running.dashboard}&to=/runs/calc")
    opened.wait_for_selector(".live.on")

    async def end() -> None:
        async with Remote(server.url, server.admin_key) as remote:
            await remote.end_run("calc")

    asyncio_run_elsewhere(end())
    server.process.terminate()
    assert server.process.wait() == 0
    opened.wait_for_selector(".live.finished")
    assert opened.inner_text(".head .badge") == "finished"
    assert opened.locator(".charts svg").count() > 1
    opened.click("nav a:has-text('Workers')")
    opened.wait_for_selector("[role=alert]:has-text('leyden serve')")
    opened.close()
