from __future__ import annotations

import pytest

from rlflow.utils.spelling import nearest


@pytest.mark.parametrize(
    ("name", "near"),
    [("grppo", "grpo"), ("GRPO", "grpo"), ("mine", "Mine"), ("xyz", None), (None, None), (3, None), ("", None)],
)
def test_the_nearest_name_whatever_the_case(name: object, near: str | None) -> None:
    assert nearest(name, ["gae", "grpo", "Mine"]) == near
