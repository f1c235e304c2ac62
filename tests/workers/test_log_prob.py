"""Chunked log-probs and entropies against the plain formula."""

from __future__ import annotations

import pytest
import torch

from rlflow.workers.engine.fsdp.log_prob import linear_log_probs

N, H, V = 37, 16, 101


def _inputs(seed=0, bias=False):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=g, requires_grad=True)
    weight = torch.randn(V, H, generator=g, requires_grad=True)
    b = torch.randn(V, generator=g, requires_grad=True) if bias else None
    labels = torch.randint(0, V, (N,), generator=g)
    return hidden, weight, b, labels


def _naive(hidden, weight, bias, labels, temperature):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits / (temperature.unsqueeze(1) if isinstance(temperature, torch.Tensor) else temperature)
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, labels.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7, "row"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("parts", ["log_prob", "entropy", "both"])
@pytest.mark.parametrize("chunk", [1, 8, 1000])
def test_values_and_gradients_are_those_of_the_formula(temperature, bias, parts, chunk):
    t = torch.linspace(0.5, 1.5, N) if temperature == "row" else temperature
    g = torch.Generator().manual_seed(5)
    w1, w2 = torch.randn(N, generator=g), torch.randn(N, generator=g)
    grads = []
    for run in ("ours", "naive"):
        hidden, weight, b, labels = _inputs(bias=bias)
        if run == "ours":
            lp, ent = linear_log_probs(hidden, weight, labels, bias=b, temperature=t, with_entropy=True, chunk=chunk)
            assert lp.dtype == ent.dtype == torch.float32
        else:
            lp, ent = _naive(hidden, weight, b, labels, t)
        terms = {"log_prob": (lp * w1).sum(), "entropy": (ent * w2).sum()}
        (sum(terms.values()) if parts == "both" else terms[parts]).backward()
        grads.append([lp, ent, hidden.grad, weight.grad] + ([b.grad] if bias else []))
    for ours, naive in zip(*grads, strict=True):
        torch.testing.assert_close(ours, naive, rtol=1e-5, atol=1e-5)


def test_entropy_is_skipped_unless_asked_for():
    hidden, weight, _, labels = _inputs()
    assert linear_log_probs(hidden, weight, labels)[1] is None


def test_bf16_products_keep_fp32_statistics():
    hidden, weight, _, labels = _inputs()
    lp, ent = linear_log_probs(hidden.bfloat16(), weight.bfloat16(), labels, with_entropy=True, chunk=8)
    expected, entropy = _naive(hidden.bfloat16().float(), weight.bfloat16().float(), None, labels, 1.0)
    assert lp.dtype == torch.float32
    torch.testing.assert_close(lp, expected, rtol=0.02, atol=0.1)
    torch.testing.assert_close(ent, entropy, rtol=0.02, atol=0.1)


def test_no_prediction_gives_a_gradient_of_zeros():
    hidden, weight, _, _ = _inputs()
    lp, _ = linear_log_probs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64))
    lp.sum().backward()
    assert weight.grad.abs().sum() == 0
