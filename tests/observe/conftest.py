"""Run folders as a run leaves them, and a browser to look at pages with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from page_waits import settle  # noqa: E402 - found by the line above

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


# For one module: playwright keeps an event loop running in this thread, beside which other tests could start none.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium of the system; RLFLOW_CHROMIUM names another one."""
    from playwright.sync_api import sync_playwright

    names = [os.environ["RLFLOW_CHROMIUM"]] if os.environ.get("RLFLOW_CHROMIUM") else list(CHROMIUM)
    path = next((found for name in names if (found := shutil.which(name)) and starts(found)), None)
    if path is None:
        pytest.skip(f"no {' or '.join(names)} that starts: rlflow view's pages stay untested; install chromium")
    with sync_playwright() as playwright:
        # Chromium's own sandbox refuses to run as root, and /dev/shm is tiny in many containers.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


def starts(path: str) -> bool:
    """Whether it is a browser, not a stub that says how to get one."""
    return subprocess.run([path, "--version"], capture_output=True, timeout=60).returncode == 0


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """`open_page(folder, "#/steps", width=360, dark=True)` opens pages from disk, without any network.

    Fails the test at its end when a page asked for anything but its own files, or wrote an error to the console.
    """
    contexts: list[Any] = []
    problems: list[str] = []

    def open_(folder: Path, place: str = "", width: int = 1280, height: int = 800, dark: bool = False) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
            offline=True,
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        root = folder.resolve().as_uri() + "/"
        page.on("request", lambda request: problems.append(request.url) if not request.url.startswith(root) else None)
        page.on("requestfailed", lambda request: problems.append(f"failed: {request.url}"))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if line.type in ("error", "warning") else None)
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        page.goto(f"{root}index.html{place}")
        settle(page)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert problems == []
