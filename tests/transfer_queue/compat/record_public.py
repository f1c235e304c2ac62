"""Record what the public package `TransferQueue` does, into tests/golden/transfer_queue_public.json.

    python tests/transfer_queue/compat/record_public.py        # in an environment with TransferQueue 0.1.11

The test beside this file replays the same calls on rlflow.transfer_queue.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cases import CASES, CONTROLLERS  # noqa: E402
from recording import Recorder  # noqa: E402

GOLDEN = HERE.parents[1] / "golden" / "transfer_queue_public.json"


def main() -> None:
    """Run the cases on one table of two units, and those that need other settings on tables of their own."""
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    results: dict[str, Any] = {}
    tables: dict[str | None, list[str]] = {None: [name for name in CASES if name not in CONTROLLERS]}
    tables |= {name: [name] for name in CONTROLLERS}
    for own, names in tables.items():
        tq.init({} if own is None else {"controller": CONTROLLERS[own](tq)})
        print(f"recording {own or 'the cases without settings'}", flush=True)
        for name in names:
            recorder = Recorder()
            CASES[name](tq, recorder, name)
            results[name] = recorder.results
        end_table()
    ray.shutdown()
    record = {"package": f"TransferQueue {tq.__version__}", "torch": torch.__version__, "cases": results}
    GOLDEN.write_text(as_text(record))


def end_table() -> None:
    """Close, and wait until the name is free: an `init` that finds a dying controller waits for it for ever."""
    tq.close()
    deadline = time.monotonic() + 60
    while "TransferQueueController" in {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}:
        if time.monotonic() > deadline:
            raise TimeoutError("the public package's controller did not end within 60 s of close()")
        time.sleep(0.2)


def as_text(record: dict[str, Any]) -> str:
    """JSON with one line a step."""
    cases = [
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(f"   {json.dumps(step)}: {json.dumps(value, sort_keys=True)}" for step, value in steps.items())
        + "\n  }"
        for name, steps in record["cases"].items()
    ]
    head = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items() if key != "cases"]
    return "{\n" + ",\n".join([*head, ' "cases": {\n' + ",\n".join(cases) + "\n }"]) + "\n}\n"


if __name__ == "__main__":
    main()
