"""Old module paths, and a light import."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from rlflow.compat import ALIASES


@pytest.mark.parametrize(("alias", "target"), ALIASES.items())
def test_an_old_path_is_the_module_it_stands_for(alias: str, target: str) -> None:
    module = importlib.import_module(target)
    spec = module.__spec__
    assert importlib.import_module(alias) is module
    assert module.__spec__ is spec and module.__name__ == target


def test_importing_the_package_loads_neither_torch_nor_ray() -> None:
    code = "import rlflow, sys; assert not {'torch', 'ray', 'transformers', 'hydra'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_maths_needs_neither_ray_nor_a_config_tree() -> None:
    heavy = "{'ray', 'hydra', 'omegaconf', 'transformers'}"
    code = f"import rlflow.trainer.ppo.core_algos, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
