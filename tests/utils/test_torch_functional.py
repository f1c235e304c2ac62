"""Tensor primitives: measured values, definitions and edges."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from rlflow.utils import torch_functional as F  # noqa: N812
from rlflow.utils.errors import ConfigError, DataError
from rlflow.utils.nested import nested_from_list

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "core_algos.json").read_text())
VALUES = torch.tensor(GOLDEN["inputs"]["log_prob"])
MASK = torch.tensor(GOLDEN["inputs"]["response_mask"])
LOGITS = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
NAN = float("nan")


# --- measured values ---


def test_masked_mean_is_the_measured_one() -> None:
    assert F.masked_mean(VALUES, MASK).item() == pytest.approx(GOLDEN["prims"]["masked_mean"], abs=1e-5)


def test_masked_var_is_the_measured_one() -> None:
    assert F.masked_var(VALUES, MASK).item() == pytest.approx(GOLDEN["prims"]["masked_var"], abs=1e-5)


def test_masked_whiten_is_the_measured_one() -> None:
    expected = torch.tensor(GOLDEN["prims"]["whiten"])
    torch.testing.assert_close(F.masked_whiten(VALUES, MASK), expected, atol=1e-4, rtol=1e-4)
    shifted = F.masked_whiten(VALUES, MASK, shift_mean=False)
    torch.testing.assert_close(shifted, expected + GOLDEN["prims"]["masked_mean"], atol=1e-4, rtol=1e-4)


def test_sum_pi_squared_is_the_measured_one() -> None:
    assert F.calculate_sum_pi_squared_from_logits(LOGITS).tolist() == pytest.approx(
        GOLDEN["prims"]["sum_pi_sq"], abs=1e-6
    )


def test_entropy_is_the_measured_one() -> None:
    assert F.entropy_from_logits(LOGITS).tolist() == pytest.approx(GOLDEN["prims"]["entropy"], abs=1e-6)


# --- masks ---


def test_nothing_outside_the_mask_leaks_in() -> None:
    values, mask = torch.tensor([[1.0, NAN, 3.0], [math.inf, 5.0, NAN]]), torch.tensor([[1, 0, 1], [0, 1, 0]])
    assert F.masked_sum(values, mask).item() == 9
    assert F.masked_sum(values, mask, axis=-1).tolist() == [4, 5]
    assert F.masked_mean(values, mask).item() == pytest.approx(3)
    assert F.masked_var(values, mask).item() == pytest.approx(4)
    assert F.masked_var(values, mask, unbiased=False).item() == pytest.approx(8 / 3)
    assert F.masked_whiten(values, mask)[mask.bool()].tolist() == pytest.approx([-1, 0, 1])


def test_the_sample_variance_of_fewer_than_two_values_is_refused_and_whitening_gives_zero() -> None:
    values = torch.tensor([3.0, NAN])
    for count, mask in ((0, torch.zeros(2)), (1, torch.tensor([1.0, 0.0]))):
        with pytest.raises(ValueError, match=f"there are {count}"):
            F.masked_var(values, mask)
        assert F.masked_var(values, mask, unbiased=False).item() == 0
    assert F.masked_whiten(values, torch.tensor([1.0, 0.0]))[0] == 0
    assert F.masked_mean(values, torch.zeros(2)).item() == 0


@pytest.mark.parametrize("value", [0.9, 100.7])
def test_whitening_many_equal_values_leaves_nothing(value: float) -> None:
    values, mask = torch.full((512, 1000), value), torch.ones(512, 1000)
    mask[:, 900:] = 0
    assert F.masked_whiten(values, mask).abs().max().item() < 1e-5
    assert F.masked_whiten(values, mask, shift_mean=False)[0, 0].item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_do_not_overflow(dtype: torch.dtype) -> None:
    values = torch.full((100_000,), 3.0, dtype=dtype)
    mask = torch.ones_like(values)
    assert F.masked_sum(values, mask).item() == 300_000
    assert F.masked_mean(values, mask).item() == pytest.approx(3)
    assert F.masked_mean(values, 0 * mask).item() == 0
    assert not F.masked_whiten(values, mask).any()


def test_clipping_by_numbers_and_by_tensors() -> None:
    x = torch.tensor([-2.0, 0.5, 2.0])
    assert F.clip_by_value(x, -1, 1).tolist() == [-1, 0.5, 1]
    assert F.clip_by_value(x, torch.tensor([0.0, 1, 0]), torch.tensor([1.0, 0, 1])).tolist() == [0, 1, 1]


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=1, max_size=5), st.sets(st.integers(0, 4))
)
def test_the_response_mask_ends_with_the_first_eos(ids: list[list[int]], eos: set[int]) -> None:
    mask = F.get_response_mask(torch.tensor(ids), sorted(eos), dtype=torch.bool)
    for row, valid in zip(ids, mask.tolist(), strict=True):
        ends = [t for t, token in enumerate(row) if token in eos]
        length = ends[0] + 1 if ends else len(row)
        assert valid == [True] * length + [False] * (len(row) - length)


def test_one_eos_id_and_the_default_dtype() -> None:
    assert F.get_response_mask(torch.tensor([[5, 2, 2, 7]])).tolist() == [[1, 1, 0, 0]]
    assert F.get_response_mask(torch.tensor([[5, 2]])).dtype == torch.int64


# --- logits ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_form_of_the_log_probs_is_the_definition(dtype: torch.dtype) -> None:
    logits = 5 * torch.randn(2, 4, 11, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8).view(2, 4)
    exact = torch.log_softmax(logits.to(dtype).double(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.05)
    for function in (F.logprobs_from_logits, F.logprobs_from_logits_naive, F.logprobs_from_logits_v2):
        leaf = logits.to(dtype, copy=True).requires_grad_()
        result = function(leaf, labels)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), exact, atol=tolerance, rtol=tolerance)
        result.sum().backward()
        onehot = torch.nn.functional.one_hot(labels, 11)
        expected = onehot - torch.softmax(logits.to(dtype).double(), -1)
        torch.testing.assert_close(leaf.grad.double(), expected, atol=tolerance, rtol=tolerance)
    assert F.logprobs_from_logits_v2(logits[:, :0], labels[:, :0]).shape == (2, 0)


@pytest.mark.gpu
def test_the_fused_kernel_gives_the_log_probs_of_the_definition() -> None:
    pytest.importorskip("flash_attn")
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(0)).cuda()
    labels = torch.arange(4).cuda()
    fused = F.logprobs_from_logits(logits.clone(), labels)
    torch.testing.assert_close(fused, F.logprobs_from_logits_naive(logits, labels), atol=1e-4, rtol=1e-4)


def test_entropy_in_chunks_is_the_entropy_and_impossible_tokens_add_nothing() -> None:
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    logits[2, :3] = float("-inf")
    whole = F.entropy_from_logits(logits)
    assert whole.isfinite().all()
    expected = torch.distributions.Categorical(logits=logits[3:]).entropy()
    torch.testing.assert_close(whole[3:], expected)
    torch.testing.assert_close(whole[2], F.entropy_from_logits(logits[2, 3:]))
    chunked = F.entropy_from_logits_with_chunking(logits.bfloat16(), chunk_size=3)
    assert chunked.dtype == torch.float32
    torch.testing.assert_close(chunked, F.entropy_from_logits(logits.bfloat16().float()))
    assert F.entropy_from_logits_with_chunking(logits[:0]).shape == (0,)


@pytest.mark.parametrize("function", [F.entropy_from_logits, F.entropy_from_logits_with_chunking])
def test_the_gradient_of_the_entropy_passes_by_impossible_tokens(function) -> None:
    logits = torch.tensor([[1.0, -math.inf, 2.0]], requires_grad=True)
    possible = torch.tensor([[1.0, 2.0]], requires_grad=True)
    function(logits).sum().backward()
    function(possible).sum().backward()
    assert logits.grad[0, 1] == 0
    torch.testing.assert_close(logits.grad[:, [0, 2]], possible.grad)


def test_sum_pi_squared_of_large_logits() -> None:
    logits = 1e4 + torch.tensor([[0.0, math.log(3)], [0.0, float("-inf")]]).double()
    result = F.calculate_sum_pi_squared_from_logits(logits)
    torch.testing.assert_close(result, torch.tensor([10 / 16, 1.0]).double(), atol=1e-3, rtol=0)


def test_log_probs_of_a_response_padded_and_packed() -> None:
    rng = torch.Generator().manual_seed(2)
    # Left-padded prompts of 3, right-padded responses of 4.
    mask = torch.tensor([[0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    ids = torch.randint(0, 9, (2, 7), generator=rng)
    logits = torch.randn(2, 7, 9, generator=rng)
    full = F.log_probs_from_logits_response(ids, logits, 4)
    expected = torch.log_softmax(logits, -1)
    for row in range(2):
        for t in range(4):
            assert full[row, t].item() == pytest.approx(expected[row, t + 2, ids[row, t + 3]].item(), abs=1e-5)
    packed = F.log_probs_from_logits_response_rmpad(ids, mask, logits[mask.bool()], 4)
    torch.testing.assert_close(packed, full * mask[:, 3:])
    same = F.log_probs_from_logits_all_rmpad(ids[mask.bool()].unsqueeze(0), logits[mask.bool()], mask, 2, 7, 4)
    torch.testing.assert_close(same, packed)


def test_temperature_divides_in_place() -> None:
    logits = torch.tensor([2.0, 4.0])
    assert F.post_process_logits(None, logits, 2.0) is logits
    assert logits.tolist() == [1.0, 2.0]


# --- padding ---


def test_lists_and_tensors_are_padded_to_a_length() -> None:
    assert F.pad_2d_list_to_length([[1], [2, 3]], 0).tolist() == [[1, 0], [2, 3]]
    assert F.pad_2d_list_to_length([[1], [2, 3]], 0, max_length=3).tolist() == [[1, 0, 0], [2, 3, 0]]
    row = torch.tensor([[1, 2]])
    assert F.pad_sequence_to_length(row, 4, 9).tolist() == [[1, 2, 9, 9]]
    assert F.pad_sequence_to_length(row, 4, 9, left_pad=True).tolist() == [[9, 9, 1, 2]]
    assert F.pad_sequence_to_length(row, 2, 9) is row


@pytest.mark.parametrize(("truncation", "expected"), [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])])
def test_long_rows_lose_the_part_that_truncation_names(truncation: str, expected: list[int]) -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    cut, mask = F.postprocess_data(ids, ids % 2, 3, 0, truncation=truncation)
    assert cut.tolist() == [expected]
    assert mask.tolist() == [[i % 2 for i in expected]]


def test_short_rows_are_padded_and_errors_say_what_to_try() -> None:
    ids = torch.tensor([[1, 2]])
    left = F.postprocess_data(ids, torch.ones_like(ids), 3, 7)
    right = F.postprocess_data(ids, torch.ones_like(ids), 3, 7, left_pad=False)
    assert [t.tolist() for t in left] == [[[7, 1, 2]], [[0, 1, 1]]]
    assert [t.tolist() for t in right] == [[[1, 2, 7]], [[1, 1, 0]]]
    with pytest.raises(DataError, match="2 tokens are more than max_length=1"):
        F.postprocess_data(ids, ids, 1, 0)
    with pytest.raises(ConfigError, match="truncation='centre'"):
        F.postprocess_data(ids, ids, 1, 0, truncation="centre")


def test_a_text_is_tokenized_without_special_tokens() -> None:
    def tokenizer(text: str, return_tensors: str, add_special_tokens: bool) -> dict[str, torch.Tensor]:
        assert return_tensors == "pt" and not add_special_tokens
        ids = torch.tensor([[ord(c) for c in text]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    ids, mask = F.tokenize_and_postprocess_data("ab", tokenizer, 3, 0)
    assert ids.tolist() == [[0, 97, 98]] and mask.tolist() == [[0, 1, 1]]


def test_padding_comes_off_again() -> None:
    ids, mask = torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert F.remove_pad_token(ids, mask) == [[1, 2], [3, 4, 5]]
    indices, bounds, longest = F.get_unpad_data(mask)
    assert ids.flatten()[indices].tolist() == [1, 2, 3, 4, 5]
    assert bounds.tolist() == [0, 2, 5] and bounds.dtype == torch.int32 and longest == 3


def test_a_value_a_row_is_expanded_to_its_tokens() -> None:
    like = nested_from_list([torch.zeros(2), torch.zeros(1)])
    expanded = F.expand_as_nested(torch.tensor([3.0, 4.0]), like)
    assert (expanded + like).values().tolist() == [3, 3, 4]


# --- ranks and modules ---


def test_batches_must_divide_the_rows() -> None:
    data = TensorDict({"a": torch.arange(4)}, batch_size=4)
    assert [part["a"].tolist() for part in F.split_dict_tensor_into_batches(data, 2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="4 rows cannot be cut into batches of 3"):
        F.split_dict_tensor_into_batches(data, 3)


def test_the_gradient_norm_is_the_squared_one() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    parameters[0].grad = torch.tensor([3.0, 4.0])
    assert F.compute_grad_norm(SimpleNamespace(parameters=lambda: iter(parameters))) == 25.0


RANK = """
import sys, torch, torch.distributed as dist
from rlflow.utils import torch_functional as F

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
values = torch.tensor([[1.0, 2.0, float("nan")], [7.0, 8.0, 9.0]][rank])
mask = torch.tensor([[1, 1, 0], [0, 0, 1]][rank])
assert F.distributed_masked_mean(values, mask).item() == 4.0
mean, high, low, std = F.distributed_mean_max_min_std(torch.tensor([[1.0, 2.0], [6.0]][rank]))
assert (mean.item(), high.item(), low.item()) == (3.0, 6.0, 1.0) and abs(std.item() - 7**0.5) < 1e-6
assert F.distributed_mean_max_min_std(values[:1], False, False, False)[1:] == (None, None, None)
gathered = F.allgather_dict_tensors({"b": values[:1], "a": values[:2]}, 2, None)
assert gathered["a"].tolist() == [1, 2, 7, 8] and gathered["b"].tolist() == [1, 7]
assert F.allgather_dict_into_dict({"rank": rank}) == {"rank": [0, 1]}
own = {"a": torch.full((2,), float(rank))}
F.broadcast_dict_tensor(own, src=1, group=None)
assert own["a"].tolist() == [1, 1]
dist.destroy_process_group()
"""


def test_statistics_over_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")]) for rank in range(2)]
    assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]


def test_the_package_needs_torch_only() -> None:
    heavy = "{'ray', 'hydra', 'omegaconf', 'transformers', 'tensordict', 'flash_attn'}"
    code = f"import rlflow.utils.torch_functional, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
