"""The critic's engine: values and gradients for any way to compute them, its head, and its state on disk."""

from __future__ import annotations

import shutil

import pytest
import tiny
import torch
import transformers
from rank_jobs import build, full_grads, full_params, loss_of
from test_gradients import WAYS, _relative

from rlflow.config import FSDPCriticConfig, HFModelConfig
from rlflow.trainer.ppo import core_algos
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import CheckpointError, ConfigError
from rlflow.workers.engine import EngineRegistry, FSDPEngineWithValueHead
from rlflow.workers.engine.fsdp.value_model import find_head, load_value_config, load_value_model

COLUMNS = ("values", "returns", "response_mask", "vpreds")


@pytest.fixture(autouse=True)
def _one_process(single_process_group):
    """All engines here run in this process."""


def batch(rows=10, seed=0):
    return tiny.with_values(tiny.make_batch(rows, seed), seed)


@pytest.fixture(scope="module")
def classifier(tiny_model, single_process_group, tmp_path_factory):
    """A token classifier on disk, written by transformers from an export of the engine."""
    folder = tmp_path_factory.mktemp("critic")
    build(tiny_model, critic=True, contents=("model", "hf_model")).save_checkpoint(str(folder))
    return str(folder / "huggingface")


def _naive(model, data, loss_config):
    """Row by row with the plain transformers model; the loss from its definition."""
    rows = [{k: data[k][i] for k in data.keys()} for i in range(data.batch_size[0])]
    width = max(len(r["responses"]) for r in rows)
    columns = {name: [] for name in COLUMNS}
    for r in rows:
        n = len(r["responses"])
        r["vpreds"] = model(r["input_ids"][None]).logits[0, -n - 1 : -1, 0]
        for name in COLUMNS:
            columns[name].append(torch.nn.functional.pad(r[name].float(), (0, width - n)))
    c = {name: torch.stack(v) for name, v in columns.items()}
    loss, _ = core_algos.compute_value_loss(
        **c, cliprange_value=loss_config.cliprange_value, loss_agg_mode=loss_config.loss_agg_mode
    )
    loss.backward()
    grads = {f"hf_model.{n}": p.grad for n, p in model.named_parameters()}
    return float(loss.detach()), [r["vpreds"].detach() for r in rows], grads


def _ours(engine, data, loss, options=None):
    with engine.train_mode():
        data = tu.assign_non_tensor_whole(data.copy(), options or {})
        out = engine.forward_backward_batch(data, loss_of(True, loss))
        return out, full_grads(engine)


def _plain(engine):
    """The engine's model as a plain transformers one."""
    model = type(engine.module.hf_model)(load_value_config(engine.model_config))
    model.load_state_dict(full_params(engine))
    return model


@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradient_do_not_depend_on_the_way(tiny_model, way):
    engine = build(tiny_model, critic=True)
    loss, values, grads = _naive(_plain(engine), batch(), FSDPCriticConfig())
    out, ours = _ours(engine, batch(), {}, WAYS[way])
    assert sum(out["loss"]) == pytest.approx(loss, rel=1e-5)
    assert ours.keys() == grads.keys()
    assert _relative(ours, grads) < 1e-5
    assert out["model_output"]["values"].dtype == torch.float32
    for mine, expected in zip(out["model_output"]["values"].unbind(), values, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean"])
def test_every_aggregation_is_exact_over_micro_batches_and_so_are_the_metrics(tiny_model, mode):
    loss, _, grads = _naive(
        _plain(build(tiny_model, critic=True)), batch(), FSDPCriticConfig(loss_agg_mode=mode, cliprange_value=0.2)
    )
    seen = []
    for size in (2, 10):
        options = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": size}
        out, ours = _ours(
            build(tiny_model, critic=True), batch(), {"loss_agg_mode": mode, "cliprange_value": 0.2}, options
        )
        assert sum(out["loss"]) == pytest.approx(loss, rel=1e-5)
        assert _relative(ours, grads) < 1e-5
        seen.append({name: metric.aggregate() for name, metric in out["metrics"].items()})
    assert set(seen[0]) == {"critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean"}
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)
    assert 0 < seen[0]["critic/vf_clipfrac"] < 1


@pytest.mark.parametrize("family", ["Qwen2", "Olmo2"])
def test_families_with_and_without_a_classifier_in_transformers(family, tmp_path):
    path = tiny.save_tiny_model(tmp_path, family=family, tied=False)
    engine = build(path, critic=True, contents=("model", "hf_model"))
    assert type(engine.module.hf_model).__name__ == f"{family}ForTokenClassification"
    loss, _, grads = _naive(_plain(engine), batch(6), FSDPCriticConfig())
    out, ours = _ours(engine, batch(6), {})
    assert sum(out["loss"]) == pytest.approx(loss, rel=1e-4)
    assert _relative(ours, grads) < 1e-4
    engine.save_checkpoint(str(tmp_path / "saved"))
    again = full_params(build(str(tmp_path / "saved" / "huggingface"), critic=True))
    for name, value in full_params(engine).items():
        assert torch.equal(again[name], value.bfloat16().float()), name


def test_half_precision_reaches_the_body_but_not_the_head(tiny_model):
    exact, half = build(tiny_model, critic=True), build(tiny_model, critic=True, dtype="bfloat16", model_dtype="bf16")
    assert {n for n, p in half.module.named_parameters() if p.dtype == torch.float32} == {
        "hf_model.score.weight",
        "hf_model.score.bias",
    }
    data = batch()
    a, b = (e.infer_batch(data)["model_output"]["values"].values() for e in (exact, half))
    assert b.dtype == torch.float32
    assert not torch.equal(b, b.bfloat16().float())
    assert (a - b).abs().max() < 0.05 * a.abs().max()
    with half.train_mode():
        out = half.train_batch(data, loss_of(True))
    assert 0 < out["metrics"]["grad_norm"] < float("inf")


# ---- head ------------------------------------------------------------------------------------------------------------


def test_a_fresh_head_depends_on_the_seed_only(tiny_model):
    def head(seed, noise):
        torch.manual_seed(noise)
        config = HFModelConfig(path=tiny_model)
        model = load_value_model(config, load_value_config(config), torch.float32, with_weights=True, seed=seed)
        assert not model.score.bias.any()
        return model.score.weight.detach().clone()

    first = head(1, noise=1)
    assert first.shape == (1, 64) and first.std() == pytest.approx(0.02, rel=0.4)
    assert torch.equal(head(1, noise=2), first)
    assert not torch.equal(head(2, noise=1), first)


def test_a_classifier_keeps_its_head_and_says_when_it_does_not_fit(tiny_model, classifier, tmp_path):
    from transformers import AutoModelForTokenClassification

    ours, again = full_params(build(tiny_model, critic=True)), full_params(build(classifier, critic=True))
    assert ours.keys() == again.keys()
    for name, value in ours.items():
        assert torch.equal(again[name], value.bfloat16().float()), name
    two = AutoModelForTokenClassification.from_pretrained(tiny_model, num_labels=2)
    two.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"critic\.model\.path"):
        build(str(tmp_path), critic=True)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_a_reward_models_head_is_where_a_critic_starts(family, tmp_path):
    """GPT-2 calls the head of a sequence classifier otherwise than that of a token classifier."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_labels": 1, "pad_token_id": 0, "initializer_range": 0.3}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    reward = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    reward.save_pretrained(tmp_path)
    row = torch.randint(1, 64, (1, 9), generator=torch.Generator().manual_seed(0))
    critic_config = HFModelConfig(path=str(tmp_path))
    critic = load_value_model(critic_config, load_value_config(critic_config), torch.float32, True, seed=0)
    assert torch.equal(find_head(critic)[1].weight, reward.score.weight)
    critic.set_attn_implementation("eager")
    values = critic.eval()(row).logits[0, :, 0]
    # The reward of a text is the value of its last token.
    for length in (1, 4, 9):
        torch.testing.assert_close(values[length - 1], reward(row[:, :length]).logits[0, 0], rtol=1e-5, atol=1e-5)


def test_a_value_head_beside_a_causal_lm_goes_on(tiny_model, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_model, tmp_path / "trl")
    weights = load_file(folder / "model.safetensors")
    head = {"v_head.summary.weight": torch.randn(1, 64), "v_head.summary.bias": torch.ones(1)}
    save_file(weights | head, folder / "model.safetensors", metadata={"format": "pt"})
    config = HFModelConfig(path=str(folder))
    model = load_value_model(config, load_value_config(config), torch.float32, True, seed=0)
    assert torch.equal(model.score.weight, head["v_head.summary.weight"]) and model.score.bias.item() == 1.0


def test_no_dropout_reaches_the_critic(tmp_path):
    path = tiny.save_tiny_model(tmp_path, attention_dropout=0.5)
    engine = build(path, critic=True)
    data = batch(4)
    with engine.train_mode():
        first = engine.forward_backward_batch(data, loss_of(True))["model_output"]["values"].values()
    torch.testing.assert_close(first, engine.infer_batch(data)["model_output"]["values"].values())


# ---- disk ------------------------------------------------------------------------------------------------------------


def test_the_exported_folder_gives_the_same_values(classifier):
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    model = AutoModelForTokenClassification.from_pretrained(classifier, dtype=torch.float32)
    assert (model.config.num_labels, model.config.architectures) == (1, ["LlamaForTokenClassification"])
    data = batch(4)
    values = build(classifier, critic=True).infer_batch(data)["model_output"]["values"].unbind()
    for i, row in enumerate(values):
        expected = model(data["input_ids"][i][None]).logits[0, -len(row) - 1 : -1, 0]
        torch.testing.assert_close(row, expected.detach(), rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(classifier).encode("w7 w8") == [7, 8]


def test_a_critic_goes_on_exactly_and_on_any_number_of_ranks(tiny_model, run_ranks, tmp_path):
    folder = str(tmp_path / "critic")
    options = {"path": tiny_model, "critic": True}
    whole = run_ranks(1, "train", seeds=[0, 1, 2], **options)
    run_ranks(1, "train", seeds=[0, 1], save_to=folder, **options)
    rest = run_ranks(1, "train", seeds=[2], load=folder, **options)
    two = run_ranks(2, "train", seeds=[2], load=folder, save_to=f"{folder}_2", **options)
    back = run_ranks(1, "train", seeds=[], load=f"{folder}_2", **options)
    for name, value in whole["params"].items():
        assert torch.equal(rest["params"][name], value), name
        torch.testing.assert_close(two["params"][name], value, rtol=1e-4, atol=1e-4)
        assert torch.equal(back["params"][name], two["params"][name]), name


def test_the_checkpoint_of_a_policy_is_no_critic(tiny_model, tmp_path):
    build(tiny_model).save_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        build(tiny_model, critic=True).load_checkpoint(str(tmp_path))


def test_the_engine_is_found_by_model_type():
    for backend in ("fsdp", "fsdp2"):
        assert EngineRegistry.get_engine_cls("value_model", backend) is FSDPEngineWithValueHead
