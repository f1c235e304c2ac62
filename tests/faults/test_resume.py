"""A deterministic run that is killed anywhere and resumed with the same command equals the run that was never killed.

What a SIGKILL leaves is what is on the disk. So an unbroken run is watched: at every stage and before every change of a
file its folder is copied, and each copy must lead back to a whole checkpoint with exactly the records of that moment.
Then one run is really killed, one life after another: at a few of these points, in the slow test at all of a step.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parents[1]))

import deterministic_runs as runs

from rlflow.checkpoint import checkpoint_step
from rlflow.observe.journal import read_lines
from rlflow.observe.recorder import RunRecorder
from rlflow.trainer.ppo import checkpointing
from rlflow.trainer.ppo.best import BEST
from rlflow.utils.errors import CheckpointError, RlflowError

# 8 prompts, 2 a step: step 4 ends an epoch.
STEPS = 6
TRACKER = "rename .latest_checkpointed_iteration.txt.tmp"
STAGES = (
    "gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "save_checkpoint",
    "update_weights", "testing",
)  # fmt: skip
# In a worker's part of a save; between a checkpoint's name and the tracker that makes it count, at an epoch's edge;
# after the validation of a step whose checkpoint is written, but does not count yet.
KILLS = (
    "write .global_step_3.tmp/critic/optimizer/state.json",
    f"{TRACKER} 4",
    "after testing 5",
)
DISK_FULL = "write .global_step_2.tmp/actor/optimizer/index.json"


@dataclass
class Setting:
    """Inputs of the runs, and the run that nobody killed with the points it went through."""

    inputs: Path
    model: Path
    unbroken: Path
    points: list[str]

    def start(self, run: Path, **plan: str) -> None:
        watcher = self.watcher(run)
        (watcher / "plan.json").write_text(json.dumps({"run": str(run), **plan}))
        runs.start(
            [
                *runs.overrides(self.inputs, self.model, run),
                f"actor_rollout_ref.model.external_lib=[{self.inputs}/loops.py,{watcher}/crash_points.py]",
                f"trainer.total_training_steps={STEPS}",
                "trainer.save_freq=1",
                "trainer.test_freq=1",
                "trainer.max_actor_ckpt_to_keep=2",
                "data.train_batch_size=2",
                "actor_rollout_ref.actor.ppo_mini_batch_size=1",
                "actor_rollout_ref.actor.shuffle=true",
                "actor_rollout_ref.actor.use_kl_loss=true",
                "actor_rollout_ref.actor.optim.lr_warmup_steps=4",
                "algorithm.adv_estimator=gae",
                f"critic.model.path={self.model}",
                "critic.model.enable_gradient_checkpointing=false",
                "critic.fsdp.dtype=float32",
                "critic.ppo_mini_batch_size=1",
                "critic.optim.lr=1e-3",
                "critic.optim.lr_scheduler_type=cosine",
                "algorithm.use_kl_in_reward=true",
                "algorithm.kl_ctrl.type=adaptive",
            ]
        )

    def watcher(self, run: Path) -> Path:
        """Folder of the module that watches a run, with its plan and its notes."""
        folder = run.with_name(f"{run.name}-watcher")
        if not folder.exists():
            folder.mkdir()
            shutil.copy(Path(__file__).with_name("crash_points.py"), folder)
        return folder

    def kill_at(self, run: Path, point: str) -> None:
        """Start the run and let it die at a point."""
        killed = self.watcher(run) / "killed.txt"
        killed.unlink(missing_ok=True)
        with pytest.raises(RlflowError):
            self.start(run, kill=point)
        assert killed.exists(), f"{point} was not what ended the run"

    def snapshots(self) -> Iterator[tuple[str, Path]]:
        for number, point in enumerate(self.points):
            yield point, self.inputs / "snapshots" / f"{number:04d}"


@pytest.fixture(scope="module")
def setting(ray_cluster: None, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    inputs = tmp_path_factory.mktemp("resume")
    runs.write_inputs(inputs, prompts=8)
    setting = Setting(inputs, tiny_model_dir, inputs / "unbroken", [])
    setting.start(setting.unbroken, snapshots=str(inputs / "snapshots"))
    setting.points = (setting.watcher(setting.unbroken) / "points.txt").read_text().splitlines()
    return setting


def prompts_by_step(run: Path) -> dict[int, list[str]]:
    """Trained uids of each step, from the journal."""
    trained = [event for event in read_lines(run / "events.jsonl") if event["event"] == "trained"]
    assert len({event["step"] for event in trained}) == len(trained)
    return {event["step"]: event["uids"] for event in trained}


def checkpoint_of(run: Path) -> Path | None:
    """What a resumed run would load."""
    return checkpointing._checkpoint_to_load(
        OmegaConf.create({"trainer": {"resume_mode": "auto", "default_local_dir": str(run)}})
    )


def go_back(run: Path, step: int) -> None:
    """What a resumed run does to its folder."""
    checkpointing.go_back(run, step, OmegaConf.create({"trainer": {"best_mode": "max", "best_metric": None}}))
    recorder = RunRecorder(run)
    recorder.open(step, "", fresh=True)
    recorder.end(step, 1)


def equals_the_unbroken(setting: Setting, run: Path) -> None:
    assert runs.differences(runs.record(run, STEPS), runs.record(setting.unbroken, STEPS)) == []
    assert prompts_by_step(run) == prompts_by_step(setting.unbroken)


@pytest.mark.timeout(200)
def test_every_stage_and_every_file_of_a_save_is_a_point(setting: Setting) -> None:
    files = [path for path in (setting.unbroken / f"global_step_{STEPS}").rglob("*") if path.is_file()]
    assert len(files) > 24
    pruned = {step for step in range(1, STEPS + 1) if not (setting.unbroken / f"global_step_{step}").exists()}
    assert len(pruned) >= 2
    for step in range(1, STEPS + 1):
        wanted = {f"{when} {stage} {step}" for stage in STAGES for when in ("before", "after")}
        wanted |= {
            f"write .global_step_{step}.tmp/{f.relative_to(setting.unbroken / f'global_step_{STEPS}')}" for f in files
        }
        wanted |= {f"rename .global_step_{step}.tmp", f"{TRACKER} {step}"}
        wanted |= {f"rename global_step_{step}", f"remove .global_step_{step}.old"} if step in pruned else set()
        assert wanted - set(setting.points) == set()
    assert {*KILLS, DISK_FULL} <= set(setting.points)


def test_every_moment_leads_back_to_a_whole_checkpoint_and_its_records(setting: Setting) -> None:
    uids = prompts_by_step(setting.unbroken)
    assert [len(step) for step in uids.values()] == [2] * STEPS
    steps = []
    for point, folder in setting.snapshots():
        found = checkpoint_of(folder)
        step = 0 if found is None else checkpoint_step(found)
        for name in ("events.jsonl", "metrics.jsonl"):
            if (folder / name).exists():
                with (folder / name).open("a") as file:
                    file.write('{"step": 1, "half a l')
        go_back(folder, step)
        assert prompts_by_step(folder) == {number: uids[number] for number in range(1, step + 1)}, point
        assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == list(range(1, step + 1)), point
        best = json.loads((folder / BEST).read_text())["history"] if (folder / BEST).exists() else []
        assert [entry["step"] for entry in best] == list(range(1, step + 1)), point
        records = {f"{name}.jsonl" for number in range(1, step + 1) for name in (number, f"val_{number}")}
        assert {path.name for path in (folder / "trajectories").glob("*.jsonl")} == records, point
        assert not [entry for entry in folder.iterdir() if entry.name.startswith(".global")], point
        steps.append(step)
    # A checkpoint counts from the moment the tracker names it, the first one from the moment it has its own name.
    counts = {"rename .global_step_1.tmp"} | {f"{TRACKER} {step}" for step in range(2, STEPS + 1)}
    counted = [0]
    for point in setting.points[:-1]:
        counted.append(counted[-1] + (point in counts))
    assert steps == counted


def test_a_damaged_checkpoint_is_passed_over_with_the_name_of_the_file(
    setting: Setting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    newest = run / f"global_step_{STEPS}"
    shutil.copytree(setting.unbroken, run)
    assert checkpoint_of(run) == newest
    for path in [path for path in sorted(newest.rglob("*")) if path.is_file()]:
        whole = path.read_bytes()
        flipped = bytes([whole[0] ^ 1]) + whole[1:]
        for damaged in (flipped, whole[: len(whole) // 2], None):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                assert checkpoint_of(run) == run / f"global_step_{STEPS - 1}"
            assert str(path) in caplog.text
            path.write_bytes(whole)
    assert checkpoint_of(run) == newest


@pytest.mark.timeout(400)
def test_runs_killed_again_and_again_end_as_the_unbroken_one(setting: Setting, tmp_path: Path) -> None:
    """Two runs at the same time, each with several lives."""

    def first() -> Path:
        run = tmp_path / "first"
        with pytest.raises(CheckpointError, match="global_step_2 was not written; the disk is full: .*rank 0"):
            setting.start(run, full=DISK_FULL)
        assert checkpoint_of(run) == run / "global_step_1"
        setting.kill_at(run, KILLS[0])
        setting.start(run)
        return run

    def second() -> Path:
        run = tmp_path / "second"
        setting.kill_at(run, KILLS[1])
        setting.kill_at(run, KILLS[2])
        newest = checkpoint_of(run)
        assert newest == run / "global_step_4"
        # The last life finds the newest checkpoint damaged and goes back one more.
        weights = newest / "actor" / "model" / "rank_00000.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
        setting.start(run)
        return run

    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(first), pool.submit(second)]
        finished = [run.result() for run in ended]
    for run, steps in zip(finished, ([1, 2], [3, 3]), strict=True):
        equals_the_unbroken(setting, run)
        kept, moved = (read_lines(run / name) for name in ("events.jsonl", "events.rolled_back.jsonl"))
        resumed = [event["from_step"] for event in (*moved, *kept) if event["event"] == "resumed"]
        assert sorted(resumed) == steps


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_runs_killed_at_every_point_of_a_step_end_as_the_unbroken_one(setting: Setting, tmp_path: Path) -> None:
    """Two runs at the same time share the points of step 4; what comes after its tracker is done once a run only."""
    first, last = setting.points.index("before gen 4"), setting.points.index(f"{TRACKER} 4")
    after = setting.points[last + 1 : setting.points.index("before gen 5")]
    assert last - first > 40 and len(after) >= 2

    def live(run: Path, points: list[str]) -> Path:
        for point in points:
            setting.kill_at(run, point)
        setting.start(run)
        return run

    with ThreadPoolExecutor(2) as pool:
        ended = [
            pool.submit(live, tmp_path / f"run_{half}", [*setting.points[first + half : last + 1 : 2], after[half]])
            for half in (0, 1)
        ]
        for run in ended:
            equals_the_unbroken(setting, run.result())
