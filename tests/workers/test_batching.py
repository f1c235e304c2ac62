"""Cutting a batch: the budget is a cap, every row comes once, and rows come back in order."""

from __future__ import annotations

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError
from rlflow.workers.engine.batching import (
    BatchOptions,
    count_loss_tokens,
    prepare_micro_batches,
    restore_rows,
    split_padded,
)
from rlflow.workers.engine.fsdp.inputs import build_inputs, prompt_keys

CPU = torch.device("cpu")


def batch_of(lengths):
    ids = tu.nested_from_list([torch.arange(n) for n in lengths])
    return tu.get_tensordict({"input_ids": ids})


def rows_of(parts):
    return sorted(row for part in parts for row in part.rows)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(60, 200))
def test_the_token_budget_is_a_cap(lengths, budget):
    parts = prepare_micro_batches(batch_of(lengths), BatchOptions(max_token_len_per_gpu=budget))
    assert rows_of(parts) == list(range(len(lengths)))
    for part in parts:
        assert part.rows == sorted(part.rows)
        assert sum(lengths[i] for i in part.rows) <= budget
        assert tu.nested_lengths(part.data["input_ids"]).tolist() == [lengths[i] for i in part.rows]
    # never twice as many as there must be: first-fit-decreasing bounds it
    assert len(parts) <= max(1, 2 * -(-sum(lengths) // budget))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(60, 200))
def test_a_padded_micro_batch_counts_its_padding(lengths, budget):
    parts = split_padded(lengths, budget)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(len(part) * max(lengths[i] for i in part) <= budget for part in parts)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_rows_with_one_prompt_stay_together_while_the_budget_allows(data):
    budget = data.draw(st.integers(40, 80))
    groups = data.draw(st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(1, 15), min_size=1)), min_size=1))
    rows, prompts = [], []
    for number, (prompt, responses) in enumerate(groups):
        for response in responses:
            rows.append(torch.cat([torch.full((prompt,), number), torch.arange(response)]))
            prompts.append(prompt)
    responses = [row[p:] for row, p in zip(rows, prompts, strict=True)]
    batch = tu.get_tensordict({"input_ids": tu.nested_from_list(rows), "responses": tu.nested_from_list(responses)})
    options = BatchOptions(max_token_len_per_gpu=budget, share_prompts=True)
    parts = prepare_micro_batches(batch, options, prompt_keys=prompt_keys, prompt_lengths=prompts)
    assert rows_of(parts) == list(range(len(rows)))
    for part in parts:
        inputs = build_inputs(part.data, temperature=1.0, device=CPU, share_prompts=True)
        assert inputs.input_ids.numel() <= budget


def test_static_micro_batches_keep_the_order_and_may_end_short():
    options = BatchOptions(use_dynamic_bsz=False, micro_batch_size_per_gpu=3)
    parts = prepare_micro_batches(batch_of([5, 1, 2, 9, 4]), options)
    assert [part.rows for part in parts] == [[0, 1, 2], [3, 4]]


def test_a_row_over_the_budget_is_named():
    with pytest.raises(ContractError, match="row 1 has 30 tokens.*at least 30"):
        prepare_micro_batches(batch_of([5, 30]), BatchOptions(max_token_len_per_gpu=20))


@pytest.mark.parametrize(
    "options",
    [{"use_dynamic_bsz": True}, {"use_dynamic_bsz": False}, {"temperature": -1.0, "max_token_len_per_gpu": 9}],
)
def test_options_without_a_size_or_a_distribution_are_refused(options):
    with pytest.raises(ContractError):
        BatchOptions.from_batch(tu.assign_non_tensor_whole(batch_of([2]), options), {})


def test_an_option_of_the_batch_wins_over_the_default():
    data = tu.assign_non_tensor_whole(batch_of([2]), {"max_token_len_per_gpu": 7})
    options = BatchOptions.from_batch(data, {"max_token_len_per_gpu": 5, "use_remove_padding": False})
    assert options.max_token_len_per_gpu == 7
    assert options.use_remove_padding is False
    assert options.temperature == 1.0


def test_counts_are_those_of_the_mask_and_skip_rows_without_tokens():
    data = tiny.make_batch(6)
    counts = count_loss_tokens(data, None, 1, CPU)
    masks = data["response_mask"].unbind()
    assert counts.batch_num_tokens == sum(int(m.sum()) for m in masks)
    assert counts.global_batch_size == sum(bool(m.any()) for m in masks) <= 5
    dense = tu.get_tensordict({"loss_mask": torch.tensor([[1, 1, 0], [0, 0, 0]])})
    assert count_loss_tokens(dense, None, 1, CPU).batch_num_tokens == 2
    with pytest.raises(ContractError, match="response_mask"):
        count_loss_tokens(batch_of([3]), None, 1, CPU)


def test_rows_come_back_in_order():
    parts = [
        ([1, 3], torch.tensor([10, 11, 30]), torch.tensor([2, 1])),
        ([0, 2], torch.tensor([20]), torch.tensor([0, 1])),
    ]
    assert [row.tolist() for row in restore_rows(parts).unbind()] == [[], [10, 11], [20], [30]]
    assert restore_rows([]) is None


def test_positions_travel_with_their_tokens_and_separate_equal_prompts():
    rows = [torch.tensor([7, 8, 9]), torch.tensor([7, 8, 4])]
    positions = [torch.tensor([0, 1, 2]), torch.tensor([5, 6, 7])]
    responses = [torch.tensor([9]), torch.tensor([4])]
    data = tu.get_tensordict(
        {
            "input_ids": tu.nested_from_list(rows),
            "position_ids": tu.nested_from_list(positions),
            "responses": tu.nested_from_list(responses),
        }
    )
    inputs = build_inputs(data, temperature=1.0, device=CPU, share_prompts=True)
    assert inputs.input_ids.tolist() == [[7, 8, 7, 8]]
    assert inputs.position_ids.tolist() == [[0, 1, 5, 6]]
    assert inputs.labels.tolist() == [9, 4]
    del data["position_ids"]
    shared = build_inputs(data, temperature=1.0, device=CPU, share_prompts=True)
    assert shared.input_ids.tolist() == [[7, 8]]
    assert shared.predict_index.tolist() == [1, 1]


def test_plain_sequences_predict_every_token_but_the_first():
    inputs = build_inputs(batch_of([4, 1, 2]), temperature=1.0, device=CPU)
    assert inputs.lengths.tolist() == [3, 0, 1]
    assert inputs.labels.tolist() == [1, 2, 3, 1]
