"""The default limit lets the rounding of 16-bit weights pass and no matrix that is not the one that was sent."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlflow.checkpoint_engine.canary import canary_error, canary_tokens, default_tolerance

VOCAB = 997


@pytest.fixture(scope="module")
def actor() -> LlamaForCausalLM:
    """Weights so large that log-probs spread by about three nats, as those of a trained model do."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def log_probs(model: LlamaForCausalLM) -> list[float]:
    tokens = torch.tensor([canary_tokens(VOCAB)])
    with torch.no_grad():
        table = model(tokens).logits[0, :-1].float().log_softmax(-1)
    return table.gather(1, tokens[0, 1:, None])[:, 0].tolist()


def served(actor: LlamaForCausalLM, dtype: torch.dtype) -> LlamaForCausalLM:
    return copy.deepcopy(actor).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_passes_with_a_margin(actor, dtype):
    error = canary_error(log_probs(actor), log_probs(served(actor, dtype)))
    assert error < default_tolerance(str(dtype).removeprefix("torch.")) / 2


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"])
def test_a_matrix_of_another_layer_fails(actor, name):
    server = served(actor, torch.bfloat16)
    first, second = (server.model.layers[i].get_submodule(name).weight.data for i in (1, 2))
    first.copy_(second)
    assert canary_error(log_probs(actor), log_probs(server)) > 2 * default_tolerance("bfloat16")


def test_the_old_weights_of_a_tied_head_fail(actor):
    """The embedding is new and the head, which an engine may keep a packed copy of, is not."""
    server = served(actor, torch.bfloat16)
    old = server.lm_head.weight.data + 0.3 * torch.randn(server.lm_head.weight.shape, dtype=torch.bfloat16)
    server.lm_head.weight = torch.nn.Parameter(old)
    assert canary_error(log_probs(actor), log_probs(server)) > 2 * default_tolerance("bfloat16")


@pytest.mark.parametrize("got", [[], [-1.0], [-1.0, math.nan]])
def test_what_cannot_be_compared_never_passes(got):
    assert canary_error([-1.0, -2.0], got) == math.inf
