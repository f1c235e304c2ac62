"""The command lines: which checkpoint is meant, what they print, how they fail; verification and comparison."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlflow.checkpoint import write_manifest, write_tracker
from rlflow.cli.main import main as rlflow
from rlflow.model_merger.__main__ import main as model_merger
from rlflow.model_merger.source import locate
from rlflow.utils.errors import ConfigError


@pytest.fixture(scope="module")
def merged(runs, tmp_path_factory) -> Path:
    """The tied actor of two ranks, merged by the command line."""
    out = tmp_path_factory.mktemp("merged") / "out"
    assert rlflow(["merge", str(runs[2, "tied"]), "--out", str(out), "--dtype", "float32"]) == 0
    return out


def change_a_weight(folder: Path, by: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += by
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# --- rlflow merge ---


@pytest.mark.parametrize(("world", "name", "dtype"), [(2, "tied", "bfloat16"), (1, "untied", "float32")])
def test_merge_with_verification(runs, tmp_path, capsys, world, name, dtype):
    out = tmp_path / "out"
    code = rlflow(["merge", str(runs[world, name]), "--out", str(out), "--dtype", dtype, "--verify"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[0].startswith(f"{out}: ") and f"({dtype})" in lines[0]
    assert lines[1].startswith("logits: max difference 0 to a model built from the shards (within the tolerance")
    assert (dtype == "bfloat16") == (len(lines) == 3)


def test_a_critic_is_merged_and_verified(runs, tmp_path, capsys):
    command = ["merge", str(runs[2, "tied"]), "--role", "critic", "--out", str(tmp_path / "out"), "--verify"]
    assert rlflow(command) == 0
    assert "LlamaForTokenClassification" in capsys.readouterr().out


def test_verification_finds_a_changed_weight(runs, merged, tmp_path):
    from rlflow.model_merger.merge import MergeOptions
    from rlflow.model_merger.verify import verify

    actor = runs[2, "tied"] / "global_step_3" / "actor"
    options = MergeOptions(dtype="float32")
    assert verify(actor, merged, options).difference == 0
    copy = Path(shutil.copytree(merged, tmp_path / "copy"))
    change_a_weight(copy, 0.5)
    wrong = verify(actor, copy, options)
    assert not wrong.passed and "ABOVE the tolerance" in str(wrong)


def test_a_merge_whose_verification_fails_ends_with_1(runs, tmp_path, capsys, monkeypatch):
    from rlflow.model_merger import commands

    merge = commands.merge

    def merge_badly(*args):
        result = merge(*args)
        change_a_weight(result.target, 0.5)
        return result

    monkeypatch.setattr(commands, "merge", merge_badly)
    assert rlflow(["merge", str(runs[1, "tied"]), "--out", str(tmp_path / "out"), "--verify"]) == 1
    assert "ABOVE" in capsys.readouterr().out


def test_damage_ends_with_1_and_one_line(run_copy, tmp_path, capsys):
    (run_copy / "global_step_3" / "actor" / "model" / "rank_00000.safetensors").write_bytes(b"x")
    assert rlflow(["merge", str(run_copy), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "rank_00000.safetensors: has 1 bytes" in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_which_checkpoint_is_meant(runs, tmp_path):
    run = Path(shutil.copytree(runs[1, "tied"], tmp_path / "run"))
    step = run / "global_step_3"
    shutil.copytree(step, run / "global_step_12")
    shutil.copytree(step, run / "global_step_20")  # newer than the tracker says: a save that did not finish
    write_tracker(run, 12)
    (run / "best_checkpoint.json").write_text(json.dumps({"step": 3, "metric": "acc", "value": 1.0, "path": "x"}))
    assert locate(run) == locate(run, "latest") == run / "global_step_12" / "actor"
    assert locate(run, "best") == step / "actor"
    assert locate(run, "20", "critic") == run / "global_step_20" / "critic"
    assert locate(step, role="critic") == locate(step / "critic") == step / "critic"
    for path, options, message in (
        (run, {"step": "7"}, "has no step 7; it has 3, 12, 20"),
        (run, {"step": "newest"}, "neither a number nor best nor latest"),
        (step, {"step": "3"}, "chooses among the checkpoints of a run folder"),
        (run / "nowhere", {}, "is no folder"),
        (step / "actor" / "model", {}, "is no run folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            locate(path, **options)
    shutil.rmtree(step / "critic")
    with pytest.raises(ConfigError, match="has no critic; it has actor"):
        locate(run, "3", "critic")
    (run / "best_checkpoint.json").write_text(json.dumps({"step": 3, "metric": "acc", "value": 1.0, "path": None}))
    with pytest.raises(ConfigError, match="saved none of the steps that it validated"):
        locate(run, "best")
    (run / "best_checkpoint.json").unlink()
    with pytest.raises(ConfigError, match="did not compare its checkpoints"):
        locate(run, "best")


def test_unusable_input_ends_with_2(runs, tmp_path, capsys):
    assert rlflow(["merge", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "is no run folder" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert rlflow(["merge", str(runs[1, "tied"]), "--out", str(tmp_path / "full")]) == 2
    assert "not empty" in capsys.readouterr().err


# --- python -m rlflow.model_merger ---


def test_the_module_has_the_options_of_verls_merger(runs, merged, tmp_path, capsys):
    actor = str(runs[2, "tied"] / "global_step_3" / "actor")
    out = str(tmp_path / "out")
    options = ["--tie-word-embedding", "--trust-remote-code", "--use_cpu_initialization"]
    assert model_merger(["merge", "--backend", "fsdp", "--local_dir", actor, "--target_dir", out, *options]) == 0
    assert model_merger(["test", "--backend", "fsdp", "--local_dir", actor, "--test_hf_dir", out]) == 0
    assert "hold the same weights" in capsys.readouterr().out
    critic = str(runs[2, "tied"] / "global_step_3" / "critic")
    value = ["--target_dir", str(tmp_path / "value"), "--is-value-model", "--verify"]
    assert model_merger(["merge", "--local_dir", critic, *value]) == 0
    assert model_merger(["test", "--local_dir", critic, "--test_hf_dir", str(tmp_path / "value")]) == 0


def test_comparison_names_each_kind_of_difference(runs, merged, tmp_path):
    from rlflow.model_merger.compare import compare

    actor = runs[2, "tied"] / "global_step_3" / "actor"
    copy = Path(shutil.copytree(merged, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["extra"] = torch.zeros(2)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] += 2e-6
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    tensors["model.layers.1.mlp.gate_proj.weight"] = tensors["model.layers.1.mlp.gate_proj.weight"].bfloat16()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # some writers store the tied copy
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    problems = compare(actor, copy)
    assert [problem.split(":")[0] for problem in problems] == [
        "model.norm.weight",
        "extra",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ]
    for problem, word in zip(
        problems, ("missing", "not in the", "shape [3, 3]", "differ by up to 2", "bfloat16", "NaN"), strict=True
    ):
        assert word in problem
    change_a_weight(copy, 1.0)
    command = ["test", "--local_dir", str(actor), "--test_hf_dir", str(copy)]
    assert model_merger(command) == 1


def test_a_tied_copy_of_another_value_is_a_difference(runs, merged, tmp_path):
    from rlflow.model_merger.compare import compare

    actor = runs[2, "tied"] / "global_step_3" / "actor"
    copy = Path(shutil.copytree(merged, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, copy / "model.safetensors")
    [problem] = compare(actor, copy)
    assert problem.startswith("lm_head.weight: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "megatron"], "megatron is not in this version"),
        (["--backend", "automodel"], "is not in this version"),
        (["--local_dir", "/nowhere"], "is no folder"),
        (["--test_hf_dir", "/nowhere"], r"has no config.json"),
    ],
)
def test_the_module_refuses_in_one_line(runs, capsys, options, message):
    actor = str(runs[1, "tied"] / "global_step_3" / "actor")
    assert model_merger(["test", "--local_dir", actor, "--test_hf_dir", actor, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_an_upload_without_a_token_is_refused_before_anything_is_written(runs, tmp_path, capsys, monkeypatch):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    actor = str(runs[1, "tied"] / "global_step_3" / "actor")
    command = ["merge", "--local_dir", actor, "--target_dir", str(tmp_path / "out"), "--hf_upload_path", "me/model"]
    assert model_merger(command) == 2
    assert "needs a token" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as an upload of small files needs."""

    received: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append((self.path, body))
        url = "https://huggingface.co/me/model"
        if self.path == "/api/repos/create":
            answer = {"url": url, "id": "x", "name": "me/model"}
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        else:
            answer = {
                "commitUrl": f"{url}/commit/1",
                "commitOid": "1",
                "commitMessage": "",
                "success": True,
            }
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_TOKEN", "hf_not_a_token")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    Hub.received.clear()
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


def upload_command(run: Path, out: Path) -> list[str]:
    actor = str(run / "global_step_3" / "actor")
    return ["merge", "--local_dir", actor, "--target_dir", str(out), "--hf_upload_path", "me/model", "--private"]


def test_an_upload_sends_the_whole_folder_to_a_private_repository(runs, tmp_path, capsys, hub):
    assert model_merger(upload_command(runs[1, "tied"], tmp_path / "out")) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("uploaded to http") and last.endswith("/me/model")
    bodies = dict(hub.received)
    create = json.loads(bodies["/api/repos/create"])
    assert (create["name"], create["organization"]) == ("model", "me")
    assert create.get("private") is True or create.get("visibility") == "private"
    [commit] = [body for path, body in hub.received if "/commit/" in path]
    sent = {json.loads(line)["value"].get("path") for line in commit.splitlines()}
    assert {path.name for path in (tmp_path / "out").iterdir()} <= sent
    assert "model.safetensors" in sent


def test_a_hub_that_refuses_keeps_the_merged_folder(runs, tmp_path, capsys, hub, monkeypatch):
    monkeypatch.setattr(hub, "do_POST", lambda handler: handler.send_error(403))
    assert model_merger(upload_command(runs[1, "tied"], tmp_path / "out")) == 1
    error = capsys.readouterr().err
    assert "was merged, but not uploaded to me/model: " in error and "403" in error
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_parsing_loads_no_torch():
    code = (
        "import sys, rlflow.model_merger.__main__ as m, rlflow.cli.main as cli\n"
        "m.build_parser(); cli.build_parser('merge')\n"
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules), sorted(sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_manifest_can_be_checked_in_part(run_copy):
    from rlflow.checkpoint import verify_manifest

    step = run_copy / "global_step_3"
    (step / "critic" / "meta.json").unlink()
    assert verify_manifest(step, below=["actor/"]) == []
    assert len(verify_manifest(step)) == 1
    assert "names no file optimizer/..." in verify_manifest(step, below=["optimizer/"])[0]
    write_manifest(step)
    assert verify_manifest(step) == []
