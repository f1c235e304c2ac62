"""How many rows a batch must have."""

from __future__ import annotations

from rlflow.trainer.ppo.batching import required_multiple


def test_rows_split_over_ranks_and_into_the_mini_batches_of_every_model_that_is_updated() -> None:
    assert required_multiple(2) == 2, "values of a batch that only the ranks must share"
    assert required_multiple(2, 6) == 6
    assert required_multiple(4, 6, 10) == 60
