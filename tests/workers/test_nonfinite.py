"""NaN in a batch: the step is left out, the mini-batch kept, and the replay names the row it came from."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from rank_jobs import full_params, loss_of
from tiny import configs, make_batch, with_values

from rlflow.cli.main import main
from rlflow.config import CheckpointConfig, FSDPOptimizerConfig, TrainingWorkerConfig
from rlflow.single_controller.base import WorkerContext
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import CheckpointError, NonFiniteGradientError
from rlflow.workers.nonfinite.dump import read_dump
from rlflow.workers.nonfinite.guard import NonFiniteGuard
from rlflow.workers.nonfinite.replay import smallest_sets
from rlflow.workers.training_worker import TrainingWorker

pytestmark = pytest.mark.usefixtures("single_process_group")
POISONED = 3


def poison(data, field, row=POISONED):
    values = [part.clone() for part in data[field].unbind()]
    values[row][0] = float("nan")
    # The poisoned token must count.
    mask = [part.clone() for part in data["response_mask"].unbind()]
    mask[row][0] = 1
    data.set(field, tu.nested_from_list(values))
    data.set("response_mask", tu.nested_from_list(mask))
    return data


def batch(field=None, seed=0):
    data = with_values(make_batch(8, seed), seed)
    return data if field is None else poison(data, field)


@pytest.fixture
def make_worker(tiny_model):
    def make(critic=False, dtype="float32", **optim):
        model, engine, optimizer = configs(tiny_model, dtype=dtype)
        optimizer = FSDPOptimizerConfig(lr=1e-3, total_training_steps=10, **optim)
        worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="value_model" if critic else "language_model",
                model_config=model,
                engine_config=engine,
                optimizer_config=optimizer,
                checkpoint_config=CheckpointConfig(),
            ),
            context=WorkerContext(rank=0, world_size=1),
        )
        worker.reset()
        worker.set_loss_fn(loss_of(critic))
        return worker

    return make


def update(worker, data, folder=None, mini=8, step=1):
    options = {"mini_batch_size": mini, "temperature": 1.0, "global_steps": step}
    if folder is not None:
        options["nonfinite_dump_folder"] = str(folder)
    return tu.get(worker.train_mini_batch(tu.assign_non_tensor_whole(data, options)), "metrics")


@pytest.mark.parametrize(
    ("critic", "field", "dtype"),
    # In bfloat16 the module is wrapped by fully_shard, in float32 on one rank it is not.
    [(False, "advantages", "float32"), (False, "advantages", "bfloat16"), (True, "returns", "float32")],
)
def test_the_step_is_left_out_and_the_replay_finds_the_row(make_worker, tmp_path, capsys, critic, field, dtype):
    worker = make_worker(critic, dtype)
    before = full_params(worker.engine)
    metrics = update(worker, batch(field), tmp_path / "step_1")
    assert metrics["skipped_steps"].aggregate() == 1 and metrics["skipped_in_a_row"].aggregate() == 1
    assert all(torch.equal(value, before[name]) for name, value in full_params(worker.engine).items())

    dump = tmp_path / "step_1_1"
    assert main(["replay", str(dump), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == [[[0, POISONED]]] and found["fields"] == {field: [[0, POISONED]]}
    assert found["module"] is None and not found["loss_finite"] and found["same_weights"]
    assert found["parameter"] is not None and found["parameters"][0] > 0
    assert main(["replay", str(dump)]) == 0
    assert "row 3 of rank 0" in capsys.readouterr().out

    metrics = update(worker, batch(), tmp_path / "step_2")
    assert "skipped_in_a_row" not in metrics and metrics["skipped_steps"].aggregate() == 0
    assert not list(tmp_path.glob("step_2*"))


def test_weights_and_modules_that_are_not_finite_are_named(make_worker, tmp_path, capsys):
    worker = make_worker()
    name = "model.layers.1.mlp.down_proj.weight"
    dict(worker.engine.module.hf_model.named_parameters())[name].data[0, 0] = float("inf")
    worker.save_checkpoint(str(tmp_path / "actor"))
    update(worker, batch(), tmp_path / "step_1")
    assert main(["replay", str(tmp_path / "step_1_1"), "--checkpoint", str(tmp_path / "actor"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nonfinite_weights"] == [name] and found["module"] == "model.layers.1.mlp.down_proj"
    assert read_dump(tmp_path / "step_1_1")[0].nonfinite_weights == [name]
    # The model's own weights are sound: nothing to see there, and the report says that they are others.
    assert main(["replay", str(tmp_path / "step_1_1")]) == 1
    assert "NOT the dump's" in capsys.readouterr().out


def test_the_policy_stop_ends_at_once_and_names_the_dump(make_worker, tmp_path):
    worker = make_worker(nonfinite_grad="stop")
    with pytest.raises(NonFiniteGradientError, match=r"nonfinite_grad=stop.*rlflow replay .*step_1_1"):
        update(worker, batch("advantages"), tmp_path / "step_1")
    assert (tmp_path / "step_1_1" / "dump.json").is_file()


def test_steps_in_a_row_are_counted_over_updates(make_worker, tmp_path):
    worker = make_worker(max_skipped_steps=3, nonfinite_dump_every=2)
    update(worker, batch("advantages"), tmp_path / "a")
    update(worker, batch())
    for number in (1, 2):
        metrics = update(worker, batch("advantages"), tmp_path / "b")
        assert metrics["skipped_in_a_row"].aggregate() == number
    with pytest.raises(NonFiniteGradientError, match="3 optimizer steps in a row"):
        update(worker, batch("advantages"), tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_1", "b_3"]


def test_a_dump_has_a_largest_size_and_keeps_the_suspects(make_worker, tmp_path):
    worker = make_worker(nonfinite_dump_max_mb=2e-3)
    update(worker, batch("advantages"), tmp_path / "step")
    info, data, places = read_dump(tmp_path / "step_1")
    assert 0 < len(places) < 8 and (0, POISONED) in places and data.batch_size[0] == len(places)
    rows = json.loads((tmp_path / "step_1" / "rows_00000.json").read_text())
    assert sorted(rows["rows"] + rows["left_out"]) == list(range(8))
    assert sum(path.stat().st_size for path in (tmp_path / "step_1").glob("*.safetensors")) < 6000
    assert info.options["temperature"] == 1.0 and info.loss_function.endswith("ppo_loss")


def test_a_disk_that_refuses_costs_the_dump_only(make_worker, tmp_path, caplog):
    (tmp_path / "step_1").write_text("a file where the folder should be")
    metrics = update(make_worker(), batch("advantages"), tmp_path / "step_1" / "below")
    assert metrics["skipped_steps"].aggregate() == 1
    assert "was not written" in caplog.text


def test_ranks_write_their_rows_and_the_replay_names_the_rank(tiny_model, run_ranks, tmp_path, capsys):
    """Sequences over two ranks, which may have rows that one rank may not; two copies of the weights; adapters."""
    spread = {"ulysses_sequence_parallel_size": 2, "fsdp_size": 2, "max_token_len_per_gpu": 12}
    adapter = {"model": {"lora_rank": 4}}
    run_ranks(4, "poisoned", path=tiny_model, folder=str(tmp_path / "step"), row=6, **spread, **adapter)
    info, _, places = read_dump(tmp_path / "step_1")
    assert info.ranks == 2 and len(places) == 8
    assert main(["replay", str(tmp_path / "step_1"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == [[[1, 2]]] and found["same_weights"]


def test_no_dump_is_an_error_of_its_own(tmp_path: Path, capsys):
    assert main(["replay", str(tmp_path)]) == 2
    assert "dump.json" in capsys.readouterr().err


def test_a_dump_of_another_loss_is_read_but_not_replayed(make_worker, tmp_path, capsys):
    worker = make_worker()
    worker.set_loss_fn(partial(other_loss, scale=1.0))
    update(worker, batch("advantages"), tmp_path / "step")
    assert main(["replay", str(tmp_path / "step_1")]) == 2
    assert "other_loss" in capsys.readouterr().err


def other_loss(model_output, data, dp_group=None, scale=1.0):
    return (model_output["log_probs"].values() * data["advantages"].values()).sum() * scale, {}


def test_rows_that_are_bad_only_together_stay_together():
    runs = []

    def bad(rows):
        runs.append(rows)
        return 7 in rows or {2, 3} <= set(rows)

    assert smallest_sets(list(range(8)), bad) == [[2, 3], [7]]
    assert len(runs) < 15


def test_an_empty_batch_of_options_never_stops():
    guard = NonFiniteGuard(None)
    for _ in range(100):
        guard.check(float("nan"), lambda _: None)
    assert guard.in_a_row == 100


def test_a_folder_without_its_rows_is_damaged(make_worker, tmp_path):
    update(make_worker(), batch("advantages"), tmp_path / "step")
    (tmp_path / "step_1" / "rows_00000.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="damaged"):
        read_dump(tmp_path / "step_1")
