"""Whether a machine can run, found out without trusting anything on it.

packages.py    Python, versions, pairs that are known not to work, extras
machine.py     cores, memory, devices, shared memory, limits, ports, folders
cluster.py     the Ray cluster that a run would join
probe.py       code that may hang or crash, in a process of its own with a deadline

examine(".")   -> [Finding(area="versions", state="ok", what="torch 2.13.0", fix=""), ...]
"""

from __future__ import annotations

from pathlib import Path

from rlflow.observe.doctor.findings import Finding

__all__ = ["Finding", "examine"]


def examine(folder: str | Path = ".", engines: tuple[str, ...] = (), timeout_s: float = 60.0) -> list[Finding]:
    """All findings, by area.

    Args:
        folder: where runs will be written.
        engines: rollout engines that must work; one that is broken is otherwise only noted.
        timeout_s: seconds for each thing that is tried in a process of its own; they run beside each other.
    """
    from concurrent.futures import ThreadPoolExecutor

    from rlflow.observe.doctor.cluster import examine_cluster
    from rlflow.observe.doctor.machine import examine_devices, examine_machine
    from rlflow.observe.doctor.packages import examine_extras, examine_versions

    with ThreadPoolExecutor() as pool:
        slow = [
            pool.submit(examine_extras, engines, timeout_s),
            pool.submit(examine_devices, timeout_s),
            pool.submit(examine_cluster, timeout_s),
        ]
        quick = [*examine_versions(), *examine_machine(Path(folder))]
        extras, devices, cluster = (part.result() for part in slow)
    return [*quick, *devices, *extras, *cluster]
