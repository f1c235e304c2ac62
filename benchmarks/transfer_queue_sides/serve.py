"""One side of `transfer_queue.py`: a process that owns a Ray instance and a table, and measures what it is told to.

    PYTHON serve.py rlflow|public [--quick]

Reads one JSON order a line from stdin, `{"do": "prepare"|"sample"|"finish", "work": name, "times": n}` or
`{"do": "about"}`, and answers each with one line of JSON. Everything else that is written to stdout goes to stderr.

These files lie in a folder of their own because beside `transfer_queue.py` the public package could not be imported.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import IO, Any

os.environ.setdefault("RAY_DEDUP_LOGS", "0")
PACKAGES = {"rlflow": "rlflow.transfer_queue", "public": "transfer_queue"}
_OBJECT_STORE_BYTES = 2 << 30


def private_stdout() -> IO[str]:
    """The real stdout; `print` and subprocesses write to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def start(side: str, quick: bool) -> dict[str, Any]:
    """The works of this side, by name."""
    import ray

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=_OBJECT_STORE_BYTES,
    )
    tq = importlib.import_module(PACKAGES[side])
    tq.init()
    from cases import works

    found: dict[str, Any] = dict(works(tq, quick))
    if side == "rlflow":
        from ours import own_works

        found.update(own_works(tq, quick, found))
    return found


def about(side: str) -> dict[str, Any]:
    """Versions of this side's environment."""
    found = {}
    for name in ("TransferQueue" if side == "public" else "rlflow", "ray", "torch", "tensordict", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "source tree"
    return found


def main() -> None:
    """Answer orders until stdin ends."""
    side, quick = sys.argv[1], "--quick" in sys.argv[2:]
    answers = private_stdout()
    logging.basicConfig(stream=sys.stderr)
    works = start(side, quick)
    for line in sys.stdin:
        order = json.loads(line)
        reply: Any = None
        if order["do"] == "about":
            reply = about(side)
        elif order["do"] == "sample":
            reply = [works[order["work"]].sample() for _ in range(order["times"])]
        else:
            getattr(works[order["work"]], order["do"])()
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
    importlib.import_module(PACKAGES[side]).close()


if __name__ == "__main__":
    main()
