"""Chunked log-probs and entropies against the plain formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.workers.engine.fsdp.cross_entropy_kernel import flash_cross_entropy
from rlflow.workers.engine.fsdp.log_prob import _LinearLogProb, chunk_rows, linear_log_probs

N, H, V = 37, 16, 101


def _inputs(seed=0, bias=False):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=g, requires_grad=True)
    weight = torch.randn(V, H, generator=g, requires_grad=True)
    b = torch.randn(V, generator=g, requires_grad=True) if bias else None
    labels = torch.randint(0, V, (N,), generator=g)
    return hidden, weight, b, labels


def _naive(hidden, weight, bias, labels, temperature, softcap=None):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits / (temperature.unsqueeze(1) if isinstance(temperature, torch.Tensor) else temperature)
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    return log_p.gather(1, labels.unsqueeze(1)).squeeze(1), -(p * log_p).sum(-1), p.square().sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7, "row"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("parts", ["log_prob", "entropy", "both"])
@pytest.mark.parametrize(
    ("chunk", "recompute", "softcap"),
    [(1, True, None), (8, True, None), (1000, True, None), (8, False, None), (1000, False, None)]
    + [(8, True, 3.0), (8, False, 3.0)],
)
def test_values_and_gradients_are_those_of_the_formula(temperature, bias, parts, chunk, recompute, softcap):
    t = torch.linspace(0.5, 1.5, N) if temperature == "row" else temperature
    g = torch.Generator().manual_seed(5)
    w1, w2 = torch.randn(N, generator=g), torch.randn(N, generator=g)
    grads = []
    for run in ("ours", "naive"):
        hidden, weight, b, labels = _inputs(bias=bias)
        if run == "ours":
            options = {"temperature": t, "with_entropy": True, "chunk": chunk}
            options |= {"recompute": recompute, "softcap": softcap}
            lp, ent, _ = linear_log_probs(hidden, weight, labels, bias=b, **options)
            assert lp.dtype == ent.dtype == torch.float32
        else:
            lp, ent, _ = _naive(hidden, weight, b, labels, t, softcap)
        terms = {"log_prob": (lp * w1).sum(), "entropy": (ent * w2).sum()}
        (sum(terms.values()) if parts == "both" else terms[parts]).backward()
        grads.append([lp, ent, hidden.grad, weight.grad] + ([b.grad] if bias else []))
    for ours, naive in zip(*grads, strict=True):
        torch.testing.assert_close(ours, naive, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7, "row"])
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("chunk", [1, 8, 1000])
def test_squared_probabilities_are_values_without_a_gradient(temperature, with_entropy, chunk):
    t = torch.linspace(0.5, 1.5, N) if temperature == "row" else temperature
    hidden, weight, b, labels = _inputs(bias=True)
    options = {"bias": b, "temperature": t, "with_entropy": with_entropy, "chunk": chunk}
    stats = linear_log_probs(hidden, weight, labels, with_sum_pi_squared=True, **options)
    _, _, expected = _naive(hidden, weight, b, labels, t)
    assert stats.sum_pi_squared.dtype == torch.float32 and not stats.sum_pi_squared.requires_grad
    torch.testing.assert_close(stats.sum_pi_squared, expected.detach(), rtol=1e-5, atol=1e-6)
    stats.log_probs.sum().backward()
    asked, hidden.grad = hidden.grad.clone(), None
    linear_log_probs(hidden, weight, labels, **options).log_probs.sum().backward()
    assert torch.equal(asked, hidden.grad)


def test_the_measured_row_of_three_logits():
    """logits [1, 2, 3]: entropy 0.832396, log-probs -2.407606, -1.407606, -0.407606, sum of squares 0.510543."""
    hidden, weight = torch.ones(3, 1), torch.tensor([[1.0], [2.0], [3.0]])
    stats = linear_log_probs(hidden, weight, torch.arange(3), with_entropy=True, with_sum_pi_squared=True, chunk=2)
    torch.testing.assert_close(stats.log_probs, torch.tensor([-2.407606, -1.407606, -0.407606]))
    torch.testing.assert_close(stats.entropy, torch.full((3,), 0.832396))
    torch.testing.assert_close(stats.sum_pi_squared, torch.full((3,), 0.510543))


def test_a_graph_of_which_the_log_softmax_was_kept_can_be_run_twice():
    hidden, weight, _, labels = _inputs()
    lp = linear_log_probs(hidden, weight, labels, recompute=False, chunk=8).log_probs.sum()
    first = torch.autograd.grad(lp, hidden, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(lp, hidden)[0], first)


@pytest.mark.slow  # a minute of C++ compilation
def test_compiled_arithmetic_gives_the_same_numbers():
    results = []
    for compiled in (False, True):
        hidden, weight, _, labels = _inputs()
        options = {"with_entropy": True, "with_sum_pi_squared": True, "chunk": 8, "compiled": compiled}
        stats = linear_log_probs(hidden, weight, labels, temperature=0.7, **options)
        (stats.log_probs.sum() + stats.entropy.sum()).backward()
        results.append([*stats, hidden.grad, weight.grad])
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(0, 30), st.integers(1, 40), st.floats(0.05, 30.0), st.floats(0.2, 3.0))
def test_any_chunk_gives_the_same_finite_numbers(seed, rows, chunk, scale, temperature):
    """Also logits of some hundreds, where all probability is one token's."""
    g = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(rows, 8, generator=g) * scale).requires_grad_()
    weight, labels = torch.randn(23, 8, generator=g), torch.randint(0, 23, (rows,), generator=g)
    options = {"temperature": temperature, "with_entropy": True, "with_sum_pi_squared": True}
    whole = linear_log_probs(hidden, weight, labels, chunk=1000, **options)
    cut = linear_log_probs(hidden, weight, labels, chunk=chunk, **options)
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert bool(a.isfinite().all())
    assert bool((whole.sum_pi_squared >= 1 / 23 - 1e-4).all() and (whole.sum_pi_squared <= 1 + 1e-5).all())
    (cut.log_probs.sum() + cut.entropy.sum()).backward()
    assert bool(hidden.grad.isfinite().all())


def test_never_more_logits_than_a_chunk():
    """The largest tensor that the forward and the backward make has chunk x V elements, or the size of the weight."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 4, generator=g, requires_grad=True)
    weight = torch.randn(101, 4, generator=g, requires_grad=True)
    with Watch():
        stats = linear_log_probs(
            hidden, weight, torch.zeros(200, dtype=torch.int64), with_entropy=True, with_sum_pi_squared=True, chunk=10
        )
        (stats.log_probs.sum() + stats.entropy.sum()).backward()
    assert largest == 10 * 101


def test_rows_of_a_chunk_follow_memory_and_the_limit():
    cpu = torch.device("cpu")
    assert chunk_rows(49152, cpu) == 149
    assert chunk_rows(49152, cpu, limit=64) == 64 and chunk_rows(49152, cpu, limit=2048) == 149
    assert chunk_rows(10**7, cpu) == 32, "a few rows at least: smaller products would only be slow"
    assert chunk_rows(100, cpu, limit=2048) == 2048


def test_entropy_is_skipped_unless_asked_for():
    hidden, weight, _, labels = _inputs()
    stats = linear_log_probs(hidden, weight, labels)
    assert stats.entropy is None and stats.sum_pi_squared is None


def test_bf16_products_keep_fp32_statistics():
    hidden, weight, _, labels = _inputs()
    lp, ent, squares = linear_log_probs(
        hidden.bfloat16(), weight.bfloat16(), labels, with_entropy=True, with_sum_pi_squared=True, chunk=8
    )
    expected, entropy, sum_pi_squared = _naive(hidden.bfloat16().float(), weight.bfloat16().float(), None, labels, 1.0)
    assert lp.dtype == torch.float32
    torch.testing.assert_close(lp, expected, rtol=0.02, atol=0.1)
    torch.testing.assert_close(ent, entropy, rtol=0.02, atol=0.1)
    torch.testing.assert_close(squares, sum_pi_squared, rtol=0.02, atol=0.05)


def test_no_prediction_gives_a_gradient_of_zeros():
    hidden, weight, _, _ = _inputs()
    stats = linear_log_probs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64), with_sum_pi_squared=True)
    assert stats.sum_pi_squared.shape == (0,)
    stats.log_probs.sum().backward()
    assert weight.grad.abs().sum() == 0


def test_without_the_kernel_torch_computes():
    """Asking for the kernel is no error where it cannot be used; here there is no GPU."""
    hidden, weight, _, labels = _inputs()
    asked = linear_log_probs(hidden, weight, labels, fused=True).log_probs
    assert torch.equal(asked, linear_log_probs(hidden, weight, labels).log_probs)


class TorchKernel:
    """The interface of flash-attn's cross-entropy, in torch: what the dispatch makes of the kernel can be tested."""

    def __init__(self):
        self.calls = 0

    def __call__(self, logits, labels, inplace_backward=False):
        self.calls += 1
        losses = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
        return losses, losses


@pytest.mark.parametrize("temperature", [1.0, "row"])
def test_a_kernel_gets_chunks_and_its_gradient_is_passed_on(temperature):
    t = torch.linspace(0.5, 1.5, N) if temperature == "row" else temperature
    kernel, results = TorchKernel(), []
    inv_t = None if temperature == 1.0 else t.reciprocal()
    for used in (kernel, None):
        hidden, weight, bias, labels = _inputs(bias=True)
        lp, _, _ = _LinearLogProb.apply(hidden, weight, bias, labels, inv_t, False, False, 8, used, None, False, False)
        (lp * torch.linspace(-1, 1, N)).sum().backward()
        results.append([lp, hidden.grad, weight.grad, bias.grad])
    assert kernel.calls == 2 * -(-N // 8)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_kernel_agrees_with_torch_on_a_gpu(dtype, temperature):
    if flash_cross_entropy() is None:
        pytest.skip("flash-attn is not installed")
    results = []
    for fused in (True, False):
        hidden, weight, _, labels = (x if x is None else x.detach().cuda() for x in _inputs())
        hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        options = {"temperature": temperature, "chunk": 8, "fused": fused}
        lp = linear_log_probs(hidden, weight, labels, **options).log_probs
        lp.sum().backward()
        results.append([lp, hidden.grad, weight.grad])
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.05}
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
