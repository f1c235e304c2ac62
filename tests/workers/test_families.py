"""Every family of text models: log-probs and gradients are those of transformers' own attention, however computed."""

from __future__ import annotations

import pytest
import tiny
import torch
from model_families import FAMILIES
from rank_jobs import build, full_params
from test_gradients import KL, WAYS, _naive, _ours, _relative
from torch.testing import assert_close

from rlflow.config import FSDPActorConfig, HFModelConfig
from rlflow.workers.engine.fsdp.value_model import classifier_class, load_value_config


@pytest.fixture(autouse=True)
def _one_process(single_process_group):
    """All engines here run in this process."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(path, loss, log-probs and gradients) of a family by the plain loop."""
    name, options = FAMILIES[request.param]
    path = tiny.save_tiny_model(tmp_path_factory.mktemp("family"), family=name, **{"tied": False} | options)
    return path, *_naive(path, tiny.make_batch(8), FSDPActorConfig(**KL), temperature=0.8)


@pytest.mark.parametrize("way", ["packed", "packed, prompts shared", "padded"])
def test_log_probs_and_gradients_are_those_of_the_plain_loop(family, way):
    path, loss, log_probs, grads = family
    out, ours = _ours(path, tiny.make_batch(8), FSDPActorConfig(**KL), {"temperature": 0.8} | WAYS[way])
    assert sum(out["loss"]) == pytest.approx(loss, rel=1e-4)
    assert _relative(ours, grads) < 1e-5
    for mine, expected in zip(out["model_output"]["log_probs"].unbind(), log_probs, strict=True):
        assert_close(mine, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Gemma 2", "Mistral"])
def test_a_critic_sees_through_the_same_windows(name, tmp_path):
    kind, options = FAMILIES[name]
    path = tiny.save_tiny_model(tmp_path, family=kind, **options)
    engine, data = build(path, critic=True), tiny.make_batch(6)
    config = load_value_config(HFModelConfig(path=path))
    plain = classifier_class(config)._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    missing = plain.load_state_dict(full_params(engine), strict=False).missing_keys
    assert not [name for name in missing if "lm_head" not in name]
    with engine.eval_mode():
        values = engine.infer_batch(data)["model_output"]["values"].unbind()
    for mine, ids in zip(values, data["input_ids"].unbind(), strict=True):
        expected = plain(ids[None]).logits[0, -len(mine) - 1 : -1, 0].detach()
        assert_close(mine, expected, rtol=1e-4, atol=1e-4)
