"""A real browser: Debian's chromium, driven by Playwright without its own download."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "no browser: apt-get install chromium, pip install playwright"
AVAILABLE = CHROMIUM is not None and find_spec("playwright") is not None
READY = "body[data-ready=yes]"


@contextmanager
def open_browser() -> Iterator[Any]:
    """Run a browser within this context."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
