"""The site of docs/ is built without a warning; its pages fit a real browser on a desk and on a phone."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browsing import AVAILABLE, MISSING, open_browser

ROOT = Path(__file__).parents[1]
NAMES = sorted(f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md") if page.stem != "README")
WIDEST = ("configuration.html", "harnesses.html", "results.html")
"""Pages with tables that a phone has no room for."""
WIDTHS = {"desk": 1366, "phone": 390}


class Silent(SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True)
    assert built.returncode == 0, built.stderr.decode()
    return folder


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_pages_name_each_other_by_their_titles(site: Path) -> None:
    moving = (site / "moving.html").read_text()
    assert '">Algorithms</a>, and known differences' in moving
    assert not any(".md</a>" in (site / name).read_text() for name in NAMES)


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Say where it was that the browser waited in vain."""
    try:
        yield
    except Exception as error:
        raise AssertionError(where) from error


@pytest.mark.skipif(not AVAILABLE, reason=MISSING)
@pytest.mark.parametrize("names", [WIDEST, pytest.param(NAMES, id="all", marks=pytest.mark.slow)])
def test_pages_fit_a_desk_and_a_phone_and_ask_nobody_else(names: Sequence[str], site: Path, url: str) -> None:
    index = {**json.loads((site / "search" / "search_index.json").read_text()), "docs": []}  # a page builds all of it
    with open_browser() as browser:
        page, errors = browser.new_page(), list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith(url) or errors.append(asked.url))
        page.on("response", lambda got: got.status < 400 or errors.append(f"{got.status} {got.url}"))
        page.route("**/search_index.json", lambda route: route.fulfill(json=index))
        for name in ("index.html", *names):
            page.goto(f"{url}/{name}")
            for screen, width in WIDTHS.items():
                page.set_viewport_size({"width": width, "height": 150})  # little is drawn
                wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                with naming(f"{name} on a {screen}"):
                    page.wait_for_function(f"{wider} == 0", timeout=30_000)  # scripts lay it out again
            assert not errors, (name, errors)


@pytest.mark.skipif(not AVAILABLE, reason=MISSING)
def test_the_search_finds_a_key(url: str) -> None:
    with open_browser() as browser:
        page = browser.new_page()
        page.goto(f"{url}/index.html")
        page.locator("input.md-search__input").press_sequentially("learning_rate")  # the page reads it at each key
        page.wait_for_selector(".md-search-result__item")
        found = page.locator(".md-search-result__item h1").all_inner_texts()
        assert "Configuration" in found, found
