"""Parts of sequence parallelism and sharding, and what they refuse; their numbers: test_parallel_table.py."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import tiny
import torch
import torch.distributed as dist
from rank_jobs import build
from torch.distributed.fsdp import FSDPModule

from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ConfigError, ContractError
from rlflow.workers.engine.fsdp.inputs import build_inputs
from rlflow.workers.engine.fsdp.ulysses import check_heads, over_sequence_ranks, scatter_heads, split_sequence
from rlflow.workers.engine.options import batch_defaults

pytestmark = pytest.mark.usefixtures("single_process_group")
CPU = torch.device("cpu")


# ---- sequences ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "fits"),
    [(8, 8, 4, True), (8, 2, 4, True), (8, 4, 2, True), (8, 2, 8, True), (9, 3, 2, False), (12, 3, 2, False)],
)
def test_heads_must_split_over_the_ranks(heads, kv_heads, size, fits):
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)
    if fits:
        check_heads(config, size)
        return
    with pytest.raises(ConfigError, match=f"{heads} attention heads with {kv_heads}.*allows 1, 3"):
        check_heads(config, size)


def test_the_model_is_refused_before_its_weights_are_read(tmp_path):
    path = tiny.save_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="does not divide the 1 ranks"):
        build(path, ulysses_sequence_parallel_size=2)


@pytest.mark.parametrize("multiple", [2, 4, 7])
@pytest.mark.parametrize("share", [True, False])
def test_packed_tokens_fill_up_to_a_multiple_with_a_row_of_their_own(multiple, share):
    data = tiny.make_batch(6)
    plain = build_inputs(data, temperature=1.0, device=CPU, share_prompts=share)
    filled = build_inputs(data, temperature=1.0, device=CPU, share_prompts=share, multiple_of=multiple)
    tokens, rest = plain.input_ids.shape[1], filled.input_ids.shape[1] - plain.input_ids.shape[1]
    assert rest == -tokens % multiple
    assert torch.equal(filled.input_ids[:, :tokens], plain.input_ids)
    assert torch.equal(filled.predict_index, plain.predict_index)
    assert filled.layout.out_index.numel() == tokens + rest


def test_padded_rows_have_no_sequence_to_split():
    inputs = build_inputs(tiny.make_batch(4), temperature=1.0, device=CPU, packed=False)
    with pytest.raises(ContractError, match="needs packed tokens"):
        split_sequence(inputs, dist.group.WORLD)


def test_tensors_of_single_heads_are_refused_only_over_ranks():
    @over_sequence_ranks("layout")
    def attention(module, query, key, value, mask, **kwargs):
        return query.transpose(1, 2), None

    x = torch.zeros(1, 2, 4, 8)
    sinks = {"sinks": torch.zeros(2), "position_ids": torch.zeros(1, 4)}
    alone, shared = SimpleNamespace(sequence_group=None), SimpleNamespace(sequence_group=dist.group.WORLD)
    attention(torch.nn.Identity(), x, x, x, None, layout=alone, **sinks)
    assert attention(torch.nn.Identity(), x, x, x, None, layout=shared)[0].shape == (1, 4, 2, 8)
    with pytest.raises(ContractError, match="sinks.*ulysses_sequence_parallel_size=1"):
        attention(torch.nn.Identity(), x, x, x, None, layout=shared, **sinks)


def test_one_rank_exchanges_with_itself():
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    for got, given in zip(scatter_heads(q, k, k, dist.group.WORLD), (q, k, k), strict=True):
        assert torch.equal(got, given)


# ---- shards ------------------------------------------------------------------------------------------------------


def groups(engine):
    return [
        type(part).__name__.removeprefix("FSDP") for part in engine.module.modules() if isinstance(part, FSDPModule)
    ]


def test_the_wrap_policy_says_which_layers_become_groups(tiny_model):
    half = {"dtype": "bfloat16"}  # one rank is sharded only to compute in another precision
    assert groups(build(tiny_model, **half)) == ["PolicyModel", *["LlamaDecoderLayer"] * 2]
    assert groups(build(tiny_model, wrap_policy={"disable": True}, **half)) == ["PolicyModel"]
    by_name = {"transformer_layer_cls_to_wrap": ["LlamaMLP"]}
    assert groups(build(tiny_model, wrap_policy=by_name, **half)) == ["PolicyModel", *["LlamaMLP"] * 2]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"wrap_policy": {"min_num_params": 5}}, "min_num_params=5"),
        ({"wrap_policy": {"transformer_layer_cls_to_wrap": "Nothing"}}, "no layer of class.*Nothing"),
        ({"wrap_policy": {"min_params": 5}}, "it knows disable"),
        ({"mixed_precision": {"params_dtype": "bf16"}}, "it knows param_dtype"),
        ({"mixed_precision": {"param_dtype": "bf16", "buffer_dtype": "bf16"}}, "buffer_dtype=bf16"),
        ({"fsdp_size": 0}, "fsdp_size=0"),
        ({"grad_offload": True}, "param_offload=true"),
    ],
)
def test_what_cannot_be_sharded_is_named(tiny_model, options, problem):
    with pytest.raises(ConfigError, match=problem):
        build(tiny_model, **{"dtype": "bfloat16"} | options)


def test_a_cpu_says_once_that_it_has_nothing_to_move(tiny_model, caplog):
    with caplog.at_level(logging.WARNING):
        engine = build(tiny_model, param_offload=True, optimizer_offload=True, offload_policy=True)
    warnings = [record.message for record in caplog.records if "nothing to move" in record.message]
    assert warnings == [
        "param_offload=true, optimizer_offload=true, offload_policy=true has nothing to move on device cpu: all state "
        "is in host memory"
    ]
    assert not engine.is_param_offload_enabled and not engine.is_optimizer_offload_enabled


def test_the_engine_passes_its_switches_to_the_head(tiny_model):
    engine = build(tiny_model, entropy_checkpointing=False, use_torch_compile=True)
    assert engine.module.options == {"recompute": False, "compiled": True, "fused": False}


def test_shared_prompts_follow_the_key(tiny_model):
    data = tiny.make_batch(4)
    for key, shared in ((None, True), (True, True), (False, False)):
        engine = build(tiny_model, share_prompts=key)
        assert batch_defaults(engine.engine_config, "cpu", forward_only=True)["share_prompts"] is shared
    seen = tu.nested_values(engine.infer_batch(data)["model_output"]["log_probs"])
    torch.testing.assert_close(
        tu.nested_values(build(tiny_model).infer_batch(data)["model_output"]["log_probs"]), seen, rtol=1e-5, atol=1e-5
    )
