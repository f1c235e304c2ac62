"""Packed rows must not see each other, whatever their lengths, and a shared prompt must change nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.utils.errors import ConfigError, ContractError
from rlflow.workers.engine.fsdp.families import check_model_support
from rlflow.workers.engine.fsdp.packed_attention import (
    LAYOUT_KWARG,
    AttentionLayout,
    Row,
    packed_attention,
)

HEADS, KV_HEADS, DIM = 4, 2, 8


class _Module(torch.nn.Module):
    pass


def _qkv(total, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((1, HEADS, total, DIM), (1, KV_HEADS, total, DIM), (1, KV_HEADS, total, DIM))
    return [torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True) for s in shapes]


def _reference(rows, q, k, v, window=None, cap=None):
    """Row by row, token by token definition: each row attends over prefix + itself, through the window if any."""
    outputs = []
    for row in rows:
        own = list(range(row.start, row.start + row.length))
        keys = (list(range(*row.prefix)) if row.prefix else []) + own
        kk, vv = (x[:, :, keys].repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        offset = len(keys) - len(own)
        ages = torch.arange(len(own))[:, None] + offset - torch.arange(len(keys))[None]
        mask = (ages >= 0) & (ages < (window or len(keys)))
        scores = q[:, :, own] @ kk.transpose(2, 3) * 0.3
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        outputs.append(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ vv)
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _compare(rows, window=None, cap=None):
    total = sum(row.length for row in rows)
    layout = AttentionLayout.packed(rows)
    ours, theirs = _qkv(total), _qkv(total)
    options = {"sliding_window": window, "softcap": cap, LAYOUT_KWARG: layout}
    out, _ = packed_attention(_Module(), *ours, None, scaling=0.3, **options)
    expected = _reference(rows, *theirs, window, cap)
    exact = 1e-9 if cap is None else 1e-5  # capped scores are made in fp32
    torch.testing.assert_close(out, expected, rtol=exact, atol=exact)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        # k and v gradients of shared prompts are summed in fp32
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_rows_attend_within_themselves_only(lengths):
    rows, position = [], 0
    for length in lengths:
        rows.append(Row(position, length))
        position += length
    _compare(rows)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), max_size=4)), min_size=1, max_size=4))
def test_shared_prompts_serve_every_response(groups):
    _compare(_shared(groups))


def _shared(groups):
    rows, position = [], 0
    for prompt, responses in groups:
        start = position
        rows.append(Row(position, prompt))
        position += prompt
        for length in responses:
            rows.append(Row(position, length, (start, start + prompt)))
            position += length
    return rows


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), max_size=4)), min_size=1, max_size=4),
    st.integers(1, 14),
    st.sampled_from([None, 0.5]),
)
def test_windows_and_soft_caps_hold_within_rows_and_over_shared_prompts(groups, window, cap):
    _compare(_shared(groups), window, cap)


def test_padding_behind_a_window_stays_finite():
    """A padding query of the short row would look past the last key of its bucket."""
    _compare([Row(0, 30), Row(30, 12), Row(42, 2, (0, 30)), Row(44, 20, (30, 42))], window=4)


@pytest.mark.parametrize("cap", [None, 0.5])
def test_windows_of_a_padded_batch(cap):
    ours = _qkv(9)
    options = {"sliding_window": 4, "softcap": cap, LAYOUT_KWARG: AttentionLayout.padded(9)}
    out, _ = packed_attention(_Module(), *ours, None, scaling=0.3, **options)
    expected = _reference([Row(0, 9)], *ours, 4, cap)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "cap"), [(None, None), (4, None), (None, 0.5), (4, 0.5)])
@pytest.mark.parametrize("shared", [False, True], ids=["flash-attn where it is", "segments"])
def test_windows_and_soft_caps_on_a_gpu(window, cap, shared):
    rows = _shared([(7, [3, 9]), (5, [6])]) if shared else [Row(0, 9), Row(9, 30), Row(39, 2)]
    total = sum(row.length for row in rows)
    g = torch.Generator().manual_seed(1)
    shapes = ((1, HEADS, total, 64), (1, KV_HEADS, total, 64), (1, KV_HEADS, total, 64))
    qkv = [torch.randn(shape, generator=g).bfloat16() for shape in shapes]
    layout = AttentionLayout.packed(rows, "cuda")
    options = {"scaling": 0.3, "sliding_window": window, "softcap": cap, LAYOUT_KWARG: layout}
    out, _ = packed_attention(_Module(), *(x.cuda() for x in qkv), None, **options)
    expected = _reference(rows, *(x.float() for x in qkv), window, cap)
    torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-2, atol=2e-2)


def test_rows_with_gaps_are_refused():
    with pytest.raises(ContractError, match="without gaps"):
        AttentionLayout.packed([Row(0, 3), Row(4, 2)])


def test_attention_without_a_layout_is_refused():
    with pytest.raises(ContractError, match="see each other"):
        packed_attention(_Module(), *_qkv(3), None)


@pytest.mark.parametrize("kwargs", [{"position_bias": torch.zeros(1)}, {"s_aux": torch.zeros(4)}])
def test_arguments_that_change_the_scores_are_refused(kwargs):
    layout = AttentionLayout.packed([Row(0, 3)])
    with pytest.raises(ContractError, match=next(iter(kwargs))):
        packed_attention(_Module(), *_qkv(3), None, **{LAYOUT_KWARG: layout}, **kwargs)


def test_models_with_other_attention_are_refused_before_loading():
    import transformers as t

    for name in ("Llama", "Qwen2", "Qwen3"):
        check_model_support(getattr(t, f"{name}Config")(), getattr(t, f"{name}ForCausalLM"))
    refused = [
        (t.GptOssConfig(), t.GptOssForCausalLM, "sinks"),
        (t.CohereConfig(logit_scale=0.5), t.CohereForCausalLM, "logit_scale"),
        (t.Llama4TextConfig(), t.Llama4ForCausalLM, "chunked_attention"),
        (t.Gemma3TextConfig(use_bidirectional_attention=True), t.Gemma3ForCausalLM, "later tokens"),
        (t.Gemma3Config(), t.Gemma3ForConditionalGeneration, "more than text"),
        (t.LlamaConfig(quantization_config={"quant_method": "awq"}), t.LlamaForCausalLM, "quantised"),
        (t.LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), t.LlamaForCausalLM, "rotary"),
        (t.MambaConfig(), t.MambaForCausalLM, "attention interface"),
    ]
    for config, cls, reason in refused:
        with pytest.raises(ConfigError, match=reason):
            check_model_support(config, cls)
