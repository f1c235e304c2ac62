"""Waits of the page tests."""

from __future__ import annotations

from typing import Any


def settle(page: Any) -> None:
    """Wait until the page shows what its address says."""
    page.wait_for_function("() => document.documentElement.dataset.shown === location.hash")
