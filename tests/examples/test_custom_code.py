"""The user code of examples/: reward functions, the estimator, the tiny model and its data."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from rlflow.utils.import_utils import load_module

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
REWARDS = str(EXAMPLES / "custom_reward" / "sums.py")


def run(script: str, *args: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(EXAMPLES / script), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# --- custom_reward ---


@pytest.mark.parametrize(
    ("text", "score"), [("3 + 4 = 7", 1.0), ("007", 1.0), ("70", 0.2), ("8a", 0.1), ("seven", 0.0), ("", 0.0)]
)
def test_the_three_forms_of_the_reward_agree(text, score):
    rewards = load_module(REWARDS)
    call = {"data_source": "sums", "solution_str": text, "ground_truth": "7", "extra_info": {}}
    assert rewards.compute_score(**call) == pytest.approx(score)
    assert asyncio.run(rewards.compute_score_async(**call)) == pytest.approx(score)
    extras = rewards.compute_score_with_extras(**call)
    assert extras["score"] == pytest.approx(score) and extras["acc"] == float(score == 1.0)


@pytest.mark.parametrize("name", ["compute_score", "compute_score_async", "compute_score_with_extras"])
def test_the_reward_loop_takes_each_form(name):
    from rlflow.reward_loop.result import normalise_result
    from rlflow.reward_loop.scorer import ScorerSpec, is_async, load_scorer

    function = load_scorer(ScorerSpec(REWARDS, name, {"digit_bonus": 0.5}))
    result = function(data_source="sums", solution_str="12", ground_truth="7", extra_info={"num_turns": 2})
    assert is_async(function) == (name == "compute_score_async")
    normal = normalise_result(asyncio.run(result) if is_async(function) else result)
    assert (normal["score"] if isinstance(normal, dict) else normal) == 0.5


# --- custom_estimator ---


def test_the_median_is_not_moved_by_one_odd_score():
    from rlflow.trainer.ppo.core_algos import get_adv_estimator_fn

    load_module(str(EXAMPLES / "custom_estimator" / "group_median.py"))
    rewards = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 90.0], [0.0, 5.0], [0.0, 7.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [0, 1]])
    advantages, returns = get_adv_estimator_fn("group_median")(
        token_level_rewards=rewards, response_mask=mask, index=["b", "b", "b", "a", "a"], config=None, uid="ignored"
    )
    assert advantages.tolist() == [[-1, -1], [0, 0], [88, 88], [-1, -1], [0, 1]]
    assert torch.equal(advantages, returns)


# --- models/make_tiny.py ---


def test_the_tiny_model_talks_and_is_made_once(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "tiny"
    assert run("models/make_tiny.py", "--out", out).stdout == f"made: {out}\n"
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert run("models/make_tiny.py", "--out", out).stdout == f"already there: {out}\n"
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    refused = run("models/make_tiny.py", "--out", out, "--untied")
    assert refused.returncode == 1 and "is not the model of these options" in refused.stderr
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    text = "3 + 4 = 7, naïve 日本 \n\t"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3 + 4 ="}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert tokenizer.decode(ids["input_ids"][0]).endswith("<|im_end|>\n<|im_start|>assistant\n")
    answer = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] <= ids["input_ids"].shape[1] + 4
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_the_same_options_give_the_same_weights(tmp_path, monkeypatch):
    from safetensors.torch import load_file

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the script sets them for its process, which is this one here
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    make_tiny = load_module(str(EXAMPLES / "models" / "make_tiny.py"))
    for name in ("a", "b"):
        assert make_tiny.main(["--out", str(tmp_path / name), "--family", "qwen2", "--untied"]) == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert first.keys() == second.keys() and "lm_head.weight" in first
    assert all(torch.equal(first[key], second[key]) for key in first)


# --- data_preprocess/sums.py ---


def test_sums_are_all_there_once_and_in_the_same_order(tmp_path):
    for name in ("a", "b"):
        done = run("data_preprocess/sums.py", "--local_save_dir", tmp_path / name)
        assert done.stdout == f"80 train and 20 test rows in {tmp_path / name}\n"
    rows = {split: pq.read_table(tmp_path / "a" / f"{split}.parquet").to_pylist() for split in ("train", "test")}
    assert rows["train"] == pq.read_table(tmp_path / "b" / "train.parquet").to_pylist()
    all_rows = rows["train"] + rows["test"]
    asked = {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in all_rows}
    assert asked == {f"{a} + {b} =": str(a + b) for a in range(10) for b in range(10)}
    assert {row["data_source"] for row in all_rows} == {"sums"}
    refused = run("data_preprocess/sums.py", "--test-size", 100, "--local_save_dir", tmp_path / "c")
    assert refused.returncode == 1 and len(refused.stderr.splitlines()) == 1
