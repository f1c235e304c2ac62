"""The Ray cluster that a run would join, and what it has."""

from __future__ import annotations

import json

from rlflow.observe.doctor.findings import Finding
from rlflow.observe.doctor.probe import run_python
from rlflow.utils.errors import RlflowError

_RESOURCES = """
import json, sys, ray
ray.init(address={address!r}, log_to_driver=False, logging_level="error")
nodes = [node for node in ray.nodes() if node["Alive"]]
print(json.dumps({{"nodes": len(nodes), "total": ray.cluster_resources(), "free": ray.available_resources()}}))
"""


def examine_cluster(timeout_s: float) -> list[Finding]:
    """The cluster's resources, asked in a process of its own."""
    from rlflow.utils.ray_utils import cluster_to_join

    try:
        address = cluster_to_join()
    except (RlflowError, ImportError) as error:
        return [Finding("Ray", "bad", str(error).splitlines()[0], "unset RAY_ADDRESS, or start the cluster it names")]
    if address == "local":
        return [Finding("Ray", "ok", "no cluster runs here: a run starts one of its own")]
    answer = run_python(_RESOURCES.format(address=address), timeout_s)
    if answer.error:
        fix = "the same Python and Ray versions as the cluster's, or `ray stop` and `ray start --head`"
        return [Finding("Ray", "bad", f"the cluster at {address} gives no answer: {answer.error}", fix)]
    facts = json.loads(answer.output.splitlines()[-1])
    amounts = ", ".join(
        f"{facts['free'].get(name, 0):g} of {facts['total'].get(name, 0):g} {name}s free" for name in ("CPU", "GPU")
    )
    return [Finding("Ray", "ok", f"a run joins the cluster at {address}: {facts['nodes']} node(s), {amounts}")]
