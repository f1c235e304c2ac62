"""One replica of each engine for the whole session, behind the fixture `served`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import contract_engines as engines
from contract_replica import Served


@pytest.fixture(scope="session")
def contract_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return engines.save_model(tmp_path_factory.mktemp("contract-model"))


@pytest.fixture(
    scope="session",
    params=["hf", pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)],
)
def case(request: pytest.FixtureRequest) -> engines.EngineCase:
    """The engine under test; skipped where its package is not installed."""
    case = engines.CASES[request.param]
    if not case.installed:
        pytest.skip(f"the package {case.package} is not installed; tests/run_engines.sh builds its environment")
    return case


@pytest.fixture(scope="session")
def served(case: engines.EngineCase, contract_model: str, ray_cluster: None) -> Iterator[Served]:
    """A replica that serves the folder's weights as version 0; tests may sync others into it."""
    served = Served(case, contract_model, load_format="auto").launch()
    yield served
    served.close()


@pytest.fixture(scope="module")
def launch(case: engines.EngineCase, contract_model: str, ray_cluster: None) -> Iterator[Callable[..., Served]]:
    """launch(**rollout overrides) -> another replica, ended with the module."""
    replicas = []

    def start(**rollout: Any) -> Served:
        replicas.append(Served(case, contract_model, **rollout).launch())
        return replicas[-1]

    yield start
    for replica in replicas:
        replica.close()
