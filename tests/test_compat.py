"""Old module paths, the reference's package name, and a light import."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlflow.compat import our_name
from rlflow.compat_paths import ALIASES, FACADES, UNBUILT
from rlflow.utils.errors import ConfigError
from rlflow.utils.import_utils import load_class_from_fqn, load_module
from rlflow.utils.source_names import find_source

PUBLIC = [
    line
    for line in (Path(__file__).parent / "golden" / "public_modules.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_path_can_be_imported(name: str) -> None:
    assert isinstance(importlib.import_module(name), ModuleType)


@pytest.mark.parametrize(("alias", "target"), ALIASES.items())
def test_an_old_path_is_the_module_it_stands_for(alias: str, target: str) -> None:
    module = importlib.import_module(target)
    spec = module.__spec__
    assert importlib.import_module(alias) is module
    assert module.__spec__ is spec and module.__name__ == target


@pytest.mark.parametrize(("name", "sources"), FACADES.items())
def test_a_path_of_several_modules_offers_what_they_have(name: str, sources: tuple[str, ...]) -> None:
    module = importlib.import_module(name)
    for source in sources:
        importlib.import_module(source)
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018 - the look-up is the test
    assert hasattr(importlib.import_module("rlflow.utils.config"), "validate_config")
    assert importlib.import_module("rlflow.workers.config.engine").QATConfig is not None


@pytest.mark.parametrize("name", UNBUILT)
def test_a_name_of_a_path_that_is_not_built_says_what_is_missing(name: str) -> None:
    module = importlib.import_module(name)
    with pytest.raises(ImportError, match=f"{name}.Anything: not in this version: "):
        module.Anything  # noqa: B018 - the look-up is the test


@pytest.mark.parametrize("module", ["rlflow", "rlflow.protocol", "verl", "verl.protocol"])
def test_the_batch_of_the_older_surface_has_its_old_places(module: str) -> None:
    from rlflow.data_proto import DataProto

    namespace: dict[str, Any] = {}
    exec(f"from {module} import DataProto", namespace)  # noqa: S102 - an import statement as users write it
    assert namespace["DataProto"] is DataProto
    with pytest.raises(AttributeError, match="nothing"):
        importlib.import_module(module).nothing  # noqa: B018 - the look-up is the test


USER_FILE = """
    import verl
    import verl.utils.torch_functional as verl_F
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
    from verl.experimental.reward_loop.reward_manager import register as register_manager
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register as register_method
    from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss
    from verl.utils.reward_score import default_compute_score

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        from verl.utils.reward_score import gsm8k  # an import at call time
        return gsm8k.compute_score(solution_str, ground_truth)

    @register(__name__)
    class UsersLoop(AgentLoopBase):
        async def run(self, sampling_params, **kwargs):
            return None

    @register_manager(__name__)
    class UsersManager(RewardManagerBase):
        async def run_single(self, data):
            return {"reward_score": 0.0}

    @register_adv_est(__name__)
    def users_estimator(token_level_rewards, response_mask, index, config=None, **kwargs):
        return token_level_rewards, token_level_rewards

    class UsersWorker(Worker):
        @register_method(dispatch_mode=Dispatch.ONE_TO_ALL)
        def ping(self):
            return "pong"
"""


@pytest.fixture
def user_file(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(USER_FILE))
    return str(file)


@pytest.fixture
def installed_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of that name, as if it were installed."""
    package = tmp_path / "site" / "verl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("REAL = True\n")
    (package / "protocol.py").write_text("REAL = True\n")
    monkeypatch.syspath_prepend(str(package.parent))
    for name in [name for name in sys.modules if our_name(name) != name]:
        monkeypatch.delitem(sys.modules, name)
    module = importlib.import_module("verl")
    monkeypatch.setitem(sys.modules, "verl", module)
    return module


def _check_user_module(module: Any) -> None:
    import rlflow
    from rlflow.agent_loop import AgentLoopBase
    from rlflow.single_controller.base import Worker
    from rlflow.trainer.ppo import core_algos
    from rlflow.utils import torch_functional

    assert module.verl is rlflow and module.verl_F is torch_functional
    assert issubclass(module.UsersLoop, AgentLoopBase) and issubclass(module.UsersWorker, Worker)
    assert core_algos.ADV_ESTIMATOR_REGISTRY[module.__name__] is module.users_estimator
    assert module.compute_score("openai/gsm8k", "#### 72", "72") == 1.0


def test_a_users_file_written_for_verl_loads_unchanged(user_file: str) -> None:
    _check_user_module(load_module(user_file))


def test_it_does_so_beside_an_installed_verl_which_stays_as_it_is(user_file: str, installed_verl: ModuleType) -> None:
    before = {name for name in sys.modules if our_name(name) != name}
    _check_user_module(load_module(user_file))
    assert sys.modules["verl"] is installed_verl and installed_verl.REAL
    assert {name for name in sys.modules if our_name(name) != name} == before
    assert importlib.import_module("verl.protocol").REAL  # elsewhere it is the installed one


def test_elsewhere_verl_is_this_package_where_none_is_installed() -> None:
    code = (
        "import rlflow, verl, sys; import verl.utils.errors; from verl.workers.config import FSDPActorConfig; "
        "from rlflow.config import FSDPActorConfig as ours; "
        "assert verl is rlflow and FSDPActorConfig is ours and verl.utils.errors is sys.modules['rlflow.utils.errors']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_dotted_names_of_verl_resolve_to_ours(installed_verl: ModuleType) -> None:
    from rlflow.agent_loop import AgentLoopBase

    assert load_class_from_fqn("verl.experimental.agent_loop.AgentLoopBase") is AgentLoopBase
    assert str(find_source("verl.experimental.agent_loop")).endswith("rlflow/agent_loop/__init__.py")
    with pytest.raises(ConfigError, match=r"verl\.nothing\.X"):
        load_class_from_fqn("verl.nothing.X")


@pytest.mark.parametrize("name", ["verlag", "my.verl", "overl.x", "rlflow.verl"])
def test_only_the_package_itself_is_meant(name: str) -> None:
    assert our_name(name) == name


def test_importing_the_package_loads_neither_torch_nor_ray() -> None:
    code = "import rlflow, sys; assert not {'torch', 'ray', 'transformers', 'hydra'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_maths_needs_neither_ray_nor_a_config_tree() -> None:
    heavy = "{'ray', 'hydra', 'omegaconf', 'transformers'}"
    code = f"import rlflow.trainer.ppo.core_algos, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("rlflow.trainer.ppo.reward", ("get_custom_reward_fn", "resolve_reward_manager_cls")),
        ("rlflow.workers.engine.utils", ("prepare_micro_batches", "enable_full_determinism")),
    ],
)
def test_a_facade_has_the_names_that_users_import_from_it(module: str, names: tuple[str, ...]) -> None:
    served = importlib.import_module(module)
    assert all(callable(getattr(served, name)) for name in names)
