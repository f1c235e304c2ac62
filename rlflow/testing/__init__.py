"""Checks for code that extends rlflow; for your test suite. Needs neither Ray nor a GPU.

    from rlflow.testing import check_policy_loss

    def test_my_loss():
        check_policy_loss("my_loss", loss_agg_mode="token-mean")

A check returns nothing, or raises an AssertionError that says which property broke, where, and by how much.
"""

from __future__ import annotations

from rlflow.testing.invariance import PROPERTIES, LossFn, check_loss
from rlflow.testing.losses import check_policy_loss, check_value_loss
from rlflow.testing.rows import Rows, random_rows

__all__ = [
    "PROPERTIES",
    "LossFn",
    "Rows",
    "check_loss",
    "check_policy_loss",
    "check_value_loss",
    "random_rows",
]
