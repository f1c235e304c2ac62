"""Options of a batch: one table of names, the reference's old ones too."""

from __future__ import annotations

import dataclasses
import enum

import pytest
import tiny
import torch

from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError
from rlflow.workers.engine.options import (
    OLD_NAMES,
    OPTIONS,
    BatchOptions,
    CallOptions,
    Read,
    UpdateOptions,
    read_names,
)

# What the reference's workers and engines read from a batch.
REFERENCE = """
temperature calculate_entropy calculate_sum_pi_squared compute_loss no_lora_adapter use_remove_padding use_dynamic_bsz
max_token_len_per_gpu micro_batch_size_per_gpu use_fused_kernels pad_mode pad_token_id force_group_size sp_size
global_batch_size mini_batch_size num_mini_batch epochs seed dataloader_kwargs global_token_num images_seqlens
update_lr_scheduler disable_auto_offload return_model_output distillation_use_topk distillation_only
enable_routing_replay max_response_len
""".split()


class PadMode(enum.Enum):
    NO_PADDING = "no_padding"
    LEFT_RIGHT = "left_right"


def batch(**options):
    return tu.assign_non_tensor_whole(tiny.make_batch(4), options)


def test_the_table_has_every_name_and_every_record_its_fields():
    assert set(REFERENCE) <= set(OPTIONS)
    assert set(OLD_NAMES.values()) <= set(OPTIONS)
    for cls, reader in ((BatchOptions, Read.BATCH), (CallOptions, Read.CALL), (UpdateOptions, Read.UPDATE)):
        assert reader.value == cls.__name__
        assert {f.name for f in dataclasses.fields(cls)} == {name for name, who in OPTIONS.items() if who is reader}


def test_old_names_mean_the_new_ones():
    data = batch(micro_batch_size=3, max_token_len=77, is_lora=True, use_dynamic_bsz=False)
    read = read_names(data)
    options = BatchOptions.from_batch(read, {})
    assert (options.micro_batch_size_per_gpu, options.max_token_len_per_gpu) == (3, 77)
    assert CallOptions.pop_from(read).no_lora_adapter
    assert "micro_batch_size" in data.keys(), "the caller's batch stays as it is"
    with pytest.raises(ContractError, match="two names of one option"):
        read_names(batch(max_token_len=77, max_token_len_per_gpu=78))


def test_what_the_engine_finds_itself_is_not_passed_on():
    found = {name: 1 for name, who in OPTIONS.items() if who is Read.FOUND}
    data = read_names(batch(mine="stays", **found))
    assert not set(found) & set(data.keys())
    assert tu.get(data, "mine") == "stays"
    assert torch.equal(data["input_ids"].values(), tiny.make_batch(4)["input_ids"].values())


@pytest.mark.parametrize(
    ("neutral", "asking", "advice"),
    [
        ({"pad_mode": "no_padding"}, {"pad_mode": "left_right"}, "use_remove_padding=False"),
        ({"pad_mode": PadMode.NO_PADDING}, {"pad_mode": PadMode.LEFT_RIGHT}, "use_remove_padding=False"),
        ({"force_group_size": 1}, {"force_group_size": 4}, "share_prompts"),
        ({"images_seqlens": None}, {"images_seqlens": [5]}, "text models"),
        ({"distillation_only": False}, {"distillation_only": True}, "distillation"),
        ({"enable_routing_replay": False}, {"enable_routing_replay": True}, "routing"),
    ],
)
def test_what_is_not_there_is_refused_and_its_neutral_value_is_not(neutral, asking, advice):
    read_names(batch(**neutral))
    sizes = {"max_token_len_per_gpu": 64}
    BatchOptions.from_batch(batch(**neutral), sizes)
    for read in (read_names, lambda data: BatchOptions.from_batch(data, sizes)):
        with pytest.raises(ContractError, match=advice):
            read(batch(**asking))


def test_records_have_defaults_and_leave_nothing_behind():
    data = batch(epochs=2, mini_batch_size=4, compute_loss=False)
    assert UpdateOptions.pop_from(data) == UpdateOptions(mini_batch_size=4, epochs=2)
    assert CallOptions.pop_from(data) == CallOptions(compute_loss=False)
    assert not set(OPTIONS) & set(data.keys())
