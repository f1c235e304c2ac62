"""Record what the public package `TransferQueue` does, into tests/golden/transfer_queue_public.json.

    python tests/transfer_queue/compat/record_public.py            # in an environment with TransferQueue 0.1.11
    python tests/transfer_queue/compat/record_public.py common     # only the cases without settings of their own

The test beside this file replays the same calls on rlflow.transfer_queue.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cases import CASES, CONTROLLERS  # noqa: E402
from recording import Recorder  # noqa: E402

GOLDEN = HERE.parents[1] / "golden" / "transfer_queue_public.json"
COMMON = "common"  # the table of all cases without settings of their own


def main(tables: Sequence[str]) -> None:
    """Record each table in a process of its own: closing one and making the next in one process takes a minute."""
    for table in tables:
        call = [sys.executable, __file__, "--table", table]
        output = subprocess.run(call, check=True, timeout=300, stdout=subprocess.PIPE)
        part = json.loads(output.stdout.splitlines()[-1])
        known = json.loads(GOLDEN.read_text())["cases"] if GOLDEN.exists() else {}
        cases = {name: {**known, **part["cases"]}[name] for name in CASES if name in known or name in part["cases"]}
        GOLDEN.write_text(as_text({**part, "cases": cases}))


def record_table(table: str) -> dict[str, Any]:
    """Results of the cases of one table; Ray, and with it the table, ends with this process."""
    import ray
    import torch
    import transfer_queue as tq

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init({} if table == COMMON else {"controller": CONTROLLERS[table](tq)})
    results = {}
    for name in [name for name in CASES if name not in CONTROLLERS] if table == COMMON else [table]:
        recorder = Recorder()
        CASES[name](tq, recorder, name)
        results[name] = recorder.results
    return {"package": f"TransferQueue {tq.__version__}", "torch": torch.__version__, "cases": results}


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
    if sys.argv[1:2] == ["--table"]:
        print(json.dumps(record_table(sys.argv[2])))
    else:
        main(sys.argv[1:] or [COMMON, *CONTROLLERS])
