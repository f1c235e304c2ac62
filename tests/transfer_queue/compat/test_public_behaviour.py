"""The table after `init(strict=False)` beside the public package: equal results, or a line in the table of differences.

`tests/golden/transfer_queue_public.json` is our own recording of the public package, made by `record_public.py`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import rlflow.transfer_queue as tq
from rlflow.utils.ray_utils import ray_get

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cases import CASES, CONTROLLERS  # noqa: E402
from recording import Recorder  # noqa: E402

ROOT = HERE.parents[2]
PUBLIC = json.loads((ROOT / "tests" / "golden" / "transfer_queue_public.json").read_text())["cases"]
LOCAL = {"backend": {"storage_backend": "Local"}}


def listed_differences() -> dict[str, list[str]]:
    """{id: recorded steps} of the table in docs/transfer_queue_differences.md."""
    lines = (ROOT / "docs" / "transfer_queue_differences.md").read_text().splitlines()
    rows = [line.split("|") for line in lines if re.match(r"\| `[a-z-]+` \|", line)]
    return {cells[1].strip(" `"): re.findall(r"`([^`]+)`", cells[-2]) for cells in rows}


@pytest.fixture(scope="module")
def shared_table() -> Iterator[None]:
    """One table for all cases without settings of their own."""
    tq.close()
    tq.init({**LOCAL, "controller": {"fetch_timeout_s": 0.05}}, strict=False)
    yield
    tq.close()


def differences(case: str) -> set[str]:
    """Steps of a case whose results are not those of the public package."""
    recorder = Recorder()
    CASES[case](tq, recorder, case)
    public = PUBLIC[case]
    ours = json.loads(json.dumps(recorder.results))
    assert ours.keys() == public.keys(), "record the public package again: the case has other steps now"
    return {f"{case}: {step}" for step in public if not same(ours[step], public[step])}


def same(ours: Any, public: Any) -> bool:
    """Equal values; of errors, ours is at least what a caller of the public package catches."""
    if isinstance(ours, dict) and isinstance(public, dict) and "raises" in ours and "raises" in public:
        return public["raises"][0] in ours["raises"]
    return ours == public


@pytest.mark.parametrize("case", [name for name in CASES if name not in CONTROLLERS])
def test_a_case_without_settings(shared_table: None, case: str) -> None:
    check(case)


@pytest.mark.parametrize("case", list(CONTROLLERS))
def test_a_case_with_settings(case: str) -> None:
    tq.close()
    tq.init({**LOCAL, "controller": CONTROLLERS[case](tq)}, strict=False)
    try:
        check(case)
    finally:
        tq.close()


def check(case: str) -> None:
    listed = {step for steps in listed_differences().values() for step in steps if step.startswith(f"{case}: ")}
    assert differences(case) == listed


def test_the_table_of_differences_names_recorded_steps_only() -> None:
    recorded = {f"{case}: {step}" for case, steps in PUBLIC.items() for step in steps}
    listed = [step for steps in listed_differences().values() for step in steps]
    assert set(listed) <= recorded
    assert len(set(listed)) == len(listed)


def test_every_public_name_can_be_imported() -> None:
    for name in PUBLIC_NAMES:
        assert getattr(tq, name) is not None
    for name in ("StreamingDataset", "StreamingDataLoader"):
        with pytest.raises(ImportError, match="get_meta"):
            getattr(tq, name)


@ray.remote(num_cpus=0)
class OtherProcess:
    """Never calls init."""

    def read(self, keys: list[str]) -> list[int]:
        return tq.kv_batch_get(keys, "train", "n")["n"].tolist()


@pytest.mark.parametrize("strict", [False, None])
def test_a_process_that_attaches_by_itself_reads_as_the_owner_does(ray_cluster: None, strict: bool | None) -> None:
    tq.close()
    tq.init(strict=strict)
    tq.kv_put("a", "train", {"n": torch.tensor(1)})
    other = OtherProcess.remote()
    read = other.read.remote(["a", "gone"])
    if strict is None:
        with pytest.raises(tq.StorageKeyNotFoundError):
            ray_get(read, what="the other process", timeout_s=60)
    else:
        assert ray_get(read, what="the other process", timeout_s=60) == [1]
    ray.kill(other)
    tq.close()


PUBLIC_NAMES = """
BaseSampler BatchMeta GRPOGroupNSampler KVBatchMeta RankAwareSampler SeqlenBalancedSampler SequentialSampler
StorageKeyNotFoundError TransferQueueClient async_kv_batch_get async_kv_batch_get_by_meta async_kv_batch_put
async_kv_clear async_kv_list async_kv_put close get_client get_metrics_endpoint init kv_batch_get kv_batch_get_by_meta
kv_batch_put kv_clear kv_list kv_put load_checkpoint save_checkpoint __version__
""".split()
