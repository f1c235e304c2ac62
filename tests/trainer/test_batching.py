"""How many rows a batch must have, and in which order the ranks get them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.config import TrainerConfig
from rlflow.trainer.ppo.batching import balance, order_rows, required_multiple
from rlflow.trainer.ppo.replay_buffer import uid_of
from rlflow.transfer_queue import KVBatchMeta


def test_rows_split_over_ranks_and_into_the_mini_batches_of_every_model_that_is_updated() -> None:
    assert required_multiple(2) == 2, "values of a batch that only the ranks must share"
    assert required_multiple(2, 6) == 6
    assert required_multiple(4, 6, 10) == 60


def meta(lengths: list[list[int]], padding: int = 0) -> KVBatchMeta:
    """One prompt a list, one session a length, `padding` rows behind."""
    rows = [(f"e0r{i}a0_{j}_0", {"seq_len": n}) for i, group in enumerate(lengths) for j, n in enumerate(group)]
    rows += [(f"pad1_{i}_0", {"seq_len": 2, "is_padding": True}) for i in range(padding)]
    return KVBatchMeta(keys=[key for key, _ in rows], tags=[tag for _, tag in rows], partition_id="train")


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(2, 900), min_size=1, max_size=5), min_size=1, max_size=12),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_every_rank_gets_as_many_rows_and_no_row_is_lost(groups: list[list[int]], ranks: int, keep: bool) -> None:
    batch = meta(groups, padding=-sum(map(len, groups)) % ranks)
    before = dict(zip(batch.keys, batch.tags, strict=True))
    metrics: dict[str, float] = {}
    after = balance(batch, ranks, metrics, keep_groups=keep)
    assert dict(zip(after.keys, after.tags, strict=True)) == before
    assert metrics["global_seqlen/balanced_max"] >= metrics["global_seqlen/mean"]
    size = len(after) // ranks
    blocks = [{uid_of(key) for key in after.keys[i * size : (i + 1) * size]} - {"pad1"} for i in range(ranks)]
    if keep:
        split = sum(len(a & b) for i, a in enumerate(blocks) for b in blocks[:i])
        assert split <= (ranks - 1) * max(map(len, groups))


def test_the_rows_of_a_prompt_stay_on_one_rank_when_asked() -> None:
    batch = balance(meta([[100, 10], [100, 10], [50, 20], [50, 20]]), 2, {}, keep_groups=True)
    blocks = [[uid_of(key) for key in batch.keys[:4]], [uid_of(key) for key in batch.keys[4:]]]
    assert all(len(set(block)) == 2 and all(block.count(uid) == 2 for uid in block) for block in blocks)
    loads = [sum(tag["seq_len"] for tag in batch.tags[:4]), sum(tag["seq_len"] for tag in batch.tags[4:])]
    assert loads == [180, 180]


def test_the_model_decides_what_a_long_row_costs() -> None:
    """Where attention is everything, a row of 100 weighs as much as four of 50; where products are, as two."""
    lengths = [[100], [50], [50], [50], [50], [1], [1], [1]]
    loads = {}
    for work in (1, 10**6):
        batch = balance(meta(lengths), 2, {}, linear_work=work)
        loads[work] = sorted(sum(tag["seq_len"] for tag in batch.tags[i : i + 4]) for i in (0, 4))
    assert loads == {1: [103, 200], 10**6: [151, 152]}


def test_the_configuration_decides_the_order() -> None:
    def order(**options: bool) -> tuple[list[str], dict[str, float]]:
        metrics: dict[str, float] = {}
        batch = order_rows(meta([[9, 9], [100, 100]]), TrainerConfig(**options), 2, metrics)
        return [uid_of(key) for key in batch.keys], metrics

    kept, metrics = order(balance_batch=False)
    assert kept == ["e0r0a0", "e0r0a0", "e0r1a0", "e0r1a0"] and not metrics
    balanced, metrics = order()
    assert set(balanced[:2]) == set(balanced[2:]) and metrics["global_seqlen/balanced_max"] == 109
    whole, _ = order(balance_keep_groups=True)
    assert whole[0] == whole[1] != whole[2]
