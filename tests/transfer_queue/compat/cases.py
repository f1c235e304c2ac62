"""Sequences of calls on a table, the same for the public package and for ours."""

from __future__ import annotations

import cases_client  # noqa: F401 - adds its cases
import cases_kv  # noqa: F401
import cases_meta  # noqa: F401
import cases_samplers  # noqa: F401
from case_tools import CASES, CONTROLLERS

__all__ = ["CASES", "CONTROLLERS"]
