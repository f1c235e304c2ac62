"""An adapter in the hf engine: the numbers of PEFT, and its own errors."""

from __future__ import annotations

import pytest
import rollout_tiny as tiny
import torch

from rlflow.checkpoint_engine.checksum import combine, tensor_digest
from rlflow.utils.errors import WeightSyncError
from rlflow.workers.rollout.hf.model import load_model

PATH = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def served(model_path):
    node = tiny.config(model_path).actor_rollout_ref
    return load_model(node.model, node.rollout, torch.device("cpu"))


def parts(rank=4):
    generator = torch.Generator().manual_seed(0)
    return {
        f"{PATH}.lora_A.weight": torch.randn(rank, 64, generator=generator),
        f"{PATH}.lora_B.weight": torch.randn(64, rank, generator=generator) * 0.1,
    }


def load(served, tensors, **config):
    served.begin({"r": 4, "lora_alpha": 8, **config})
    for name, tensor in tensors.items():
        served.load(name, tensor, tensor_digest(name, tensor))
    return served.finish()


@pytest.mark.parametrize(
    ("config", "scaling"),
    [({}, 2.0), ({"use_rslora": True}, 4.0), ({"scaling": {"model.layers.0.self_attn.q_proj": 0.5}}, 0.5)],
)
def test_log_probs_are_those_of_the_merged_weights(served, model_path, config, scaling):
    prompt = tiny.prompts(1, low=20)[0]
    tensors = parts()
    before = served.log_probs(prompt)
    count, checksum = load(served, tensors, **config)
    assert count == 2 and checksum == combine([tensor_digest(n, t) for n, t in tensors.items()])
    assert served.lora_modules == ("model.layers.0.self_attn.q_proj",) and served.loaded == tuple(sorted(tensors))
    plain = tiny.plain_model(model_path)
    a, b = tensors.values()
    plain.model.layers[0].self_attn.q_proj.weight.data.add_(scaling * b @ a)
    merged = tiny.log_probs_of(plain, prompt[:1], prompt[1:])
    torch.testing.assert_close(torch.tensor(served.log_probs(prompt)), merged, atol=1e-4, rtol=0)
    assert before != served.log_probs(prompt)
    # Base weights end it.
    served.begin()
    assert served.log_probs(prompt) == before


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("half", "adapter of model.layers.0.self_attn.q_proj is incomplete"),
        ("rank", "adapter of model.layers.0.self_attn.q_proj is incomplete"),
        ("module", "no linear layer 'model.layers.9.self_attn.q_proj'"),
        ("norm", "no linear layer 'model.norm'"),
        ("shape", "for a layer of 64 to 64 features"),
        ("weight", "no part of a LoRA adapter"),
    ],
)
def test_what_fits_no_layer_is_named(served, change, match):
    a, b = f"{PATH}.lora_A.weight", f"{PATH}.lora_B.weight"
    tensors = parts()
    if change == "half":
        del tensors[b]
    elif change == "rank":
        tensors[a] = torch.zeros(3, 64)
    elif change == "shape":
        tensors[a] = torch.zeros(4, 65)
    else:
        name = {
            "module": a.replace("layers.0", "layers.9"),
            "norm": "model.norm.lora_A.weight",
            "weight": "model.norm.weight",
        }
        tensors = {name[change]: tensors[a]}
    with pytest.raises(WeightSyncError, match=match):
        load(served, tensors)


def test_an_adapter_of_nothing_is_bound_to_nothing(served):
    load(served, {})
    assert served.lora_modules == ()
