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


class PatientBrowser:
    """A browser whose pages wait long enough for what a busy machine does late."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser

    def new_context(self, **how: Any) -> Any:
        """Return a context of its own for some pages."""
        context = self._browser.new_context(**how)
        context.set_default_timeout(120_000)
        return context

    def new_page(self) -> Any:
        """Return a page in a context of its own."""
        return self.new_context().new_page()


@contextmanager
def open_browser() -> Iterator[PatientBrowser]:
    """Run a browser within this context."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield PatientBrowser(browser)
        finally:
            browser.close()
