"""The tree has every key of the public one, with its default or a documented other one; and its types agree with it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlflow.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from rlflow.config.describe import keys_of
from rlflow.config.job import RayKwargsConfig
from rlflow.config.key_states import matches
from rlflow.config.other_jobs import EvaluationDataConfig, EvaluationFunctionConfig, SFTDataConfig, SFTTrainerConfig
from rlflow.config.overrides import compose_config
from rlflow.config.tree import MEGATRON_NODES, TYPED_NODES

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("dp", "megatron")


def public_tree(engine: str) -> dict[str, Any]:
    """Key -> default of the public tree."""
    lines = (ROOT / "tests" / "golden" / "config_public.tsv").read_text().splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    return {key: json.loads(value) for key, value, engines in rows if engines in ("all", engine)}


def leaves(engine: str) -> dict[str, Any]:
    """Key -> default of ours, without the nodes that hold keys."""
    return {key: value for key, value in keys_of("ppo_trainer", engine).items() if not (value and type(value) is dict)}


def documented(heading: str) -> dict[str, list[str]]:
    """Key pattern -> the other cells of its row, of one table of the page of differences."""
    page = (ROOT / "docs" / "config" / "differences.md").read_text()
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [re.split(r" \| ", line.strip("| ")) for line in section.splitlines() if line.startswith("| `")]
    return {key.strip("`"): cells for row in rows for key, cells in [(row[0], row[1:])]}


def said(value: Any) -> str:
    return "`" + json.dumps(value).strip('"') + "`"


@pytest.mark.parametrize("engine", ENGINES)
def test_no_public_key_is_missing(engine: str) -> None:
    ours = keys_of("ppo_trainer", engine)
    assert [key for key in public_tree(engine) if key not in ours] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_a_default_that_differs_is_documented_with_both_values(engine: str) -> None:
    ours, rows = leaves(engine), documented("Other defaults")
    wrong = []
    for key, public in public_tree(engine).items():
        if key not in ours or ours[key] == public:  # a node here may be an empty one there
            continue
        cells = rows.get(key)
        if cells is None or cells[:2] != [said(public), said(ours[key])] or not cells[2].strip():
            wrong.append(f"| `{key}` | {said(public)} | {said(ours[key])} | why |")
    assert not wrong, "docs/config/differences.md lacks\n" + "\n".join(wrong)


def test_nothing_is_documented_that_is_not_different() -> None:
    same = []
    for key, (public, own, *_) in documented("Other defaults").items():
        pairs = [(public_tree(e).get(key), leaves(e).get(key)) for e in ENGINES if key in leaves(e)]
        if not any((said(theirs), said(ours)) == (public, own) and theirs != ours for theirs, ours in pairs):
            same.append(key)
    assert not same


@pytest.mark.parametrize("engine", ENGINES)
def test_a_key_of_our_own_is_documented(engine: str) -> None:
    patterns, public = documented("Keys of our own"), public_tree(engine)
    nodes = {".".join(key.split(".")[:n]) for key in public for n in range(1, key.count(".") + 1)}
    own = [key for key in leaves(engine) if key not in public and key not in nodes]
    assert [key for key in own if not any(matches(pattern, key) for pattern in patterns)] == []
    if engine == "dp":
        assert [pattern for pattern in patterns if not any(matches(pattern, key) for key in own)] == []


@pytest.mark.parametrize(
    ("node", "kind", "engine"),
    [(node, kind, "dp") for node, kind in TYPED_NODES.items()]
    + [(node, kind, "megatron") for node, kind in MEGATRON_NODES.items()],
)
def test_yaml_and_dataclass_have_the_same_keys_and_defaults(node: str, kind: type, engine: str) -> None:
    config = compose_config([f"model_engine={engine}"])
    # What follows the engine's name follows nothing when none is chosen; the dataclass leaves it empty too.
    config.distillation.teacher_models.teacher_model.inference.name = None
    tree: Any = OmegaConf.to_container(OmegaConf.select(config, node), resolve=True, throw_on_missing=False)
    typed: Any = OmegaConf.to_container(OmegaConf.structured(kind), resolve=False, throw_on_missing=False)
    if node == "trainer":
        typed["default_local_dir"] = tree["default_local_dir"]  # made of two other keys
    assert tree == typed


@pytest.mark.parametrize(
    ("tree", "node", "kind"),
    [
        ("sft_trainer", "data", SFTDataConfig),
        ("sft_trainer", "trainer", SFTTrainerConfig),
        ("sft_trainer", "model", HFModelConfig),
        ("sft_trainer", "engine", FSDPEngineConfig),
        ("sft_trainer", "optim", FSDPOptimizerConfig),
        ("sft_trainer_engine", "data", SFTDataConfig),
        ("evaluation", "data", EvaluationDataConfig),
        ("evaluation", "custom_reward_function", EvaluationFunctionConfig),
        ("evaluation", "ray_kwargs", RayKwargsConfig),
    ],
)
def test_trees_of_other_jobs_have_types_too(tree: str, node: str, kind: type) -> None:
    config = compose_config([], tree)
    found: Any = OmegaConf.to_container(OmegaConf.select(config, node), resolve=True)
    assert found == OmegaConf.to_container(OmegaConf.structured(kind))


def test_generation_is_the_tree_of_the_main_job_with_a_place_for_the_answers() -> None:
    extra = set(keys_of("generation")) ^ set(keys_of("ppo_trainer"))
    assert extra == {"data.output_path"}
