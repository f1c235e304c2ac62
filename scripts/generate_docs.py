#!/usr/bin/env python3
"""Write the parts of docs/ that the code knows better: tables of stages, configuration keys, registered names,
metrics.

    python scripts/generate_docs.py            write them
    python scripts/generate_docs.py --check    change nothing; exit code 1 when a page is out of date

A page holds a generated part between `<!-- generated:NAME -->` and `<!-- /generated:NAME -->`; everything else is
written by hand and left alone. tests/docs/test_generated.py compares the committed pages with what comes out here.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT))  # the package beside this script, installed or not
_PART = re.compile(r"(<!-- generated:([a-z-]+) -->\n).*?(<!-- /generated:\2 -->)", re.DOTALL)
# Nodes of the configuration in the order of the reference page; other top-level nodes follow.
NODES = (
    "data",
    "actor_rollout_ref.model",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.actor",
    "actor_rollout_ref.ref",
    "actor_rollout_ref",
    "critic",
    "algorithm",
    "reward",
    "trainer",
    "transfer_queue",
    "ray_kwargs",
)


# --- stages -----------------------------------------------------------------------------------------------------------


def stages() -> str:
    """Fields by stages, of a step that has every stage."""
    from rlflow.trainer.ppo import field_table
    from rlflow.workers.engine_workers import ActorRolloutRefWorker

    classes: dict[str, type] = {"actor": ActorRolloutRefWorker, "ref": ActorRolloutRefWorker}
    try:
        from rlflow.workers.critic_worker import CriticWorker
    except ImportError:
        pass
    else:
        classes["critic"] = CriticWorker
    from rlflow.trainer.ppo.off_policy import MASKS, WEIGHTS

    everything = {"kl_in_reward": True, "sum_pi_squared": True, "corrected": (WEIGHTS, *MASKS)}
    return field_table.markdown_table(field_table.stage_table(classes, **everything))


# --- names ------------------------------------------------------------------------------------------------------------


def names() -> str:
    """What can be chosen by name in algorithm and loss."""
    from rlflow.config.checks import KL_ESTIMATORS
    from rlflow.config.worker import LOSS_AGG_MODES
    from rlflow.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    rows = {
        "algorithm.adv_estimator": sorted(ADV_ESTIMATOR_REGISTRY),
        "actor_rollout_ref.actor.policy_loss.loss_mode": sorted(POLICY_LOSS_REGISTRY),
        "actor_rollout_ref.actor.loss_agg_mode": list(LOSS_AGG_MODES),
        "algorithm.kl_penalty": list(KL_ESTIMATORS),
        "actor_rollout_ref.actor.kl_loss_type": list(KL_ESTIMATORS),
    }
    return table(
        ("key", "built-in values"), [[code(key), ", ".join(map(code, values))] for key, values in rows.items()]
    )


def live_table() -> str:
    """Columns of the terminal's table."""
    from rlflow.observe.live import COLUMNS

    return table(("column", "metric"), [[title, code(metric)] for title, metric, _, _ in COLUMNS])


def engines() -> str:
    """What each rollout engine can do."""
    from rlflow.workers.rollout.capabilities import markdown_rows

    header, rows = markdown_rows()
    return table(header, [[escape(cell) for cell in row] for row in rows])


# --- metrics ----------------------------------------------------------------------------------------------------------


def metrics(section: str) -> str:
    """One section of the glossary of metrics."""
    from rlflow.observe.glossary import SECTIONS

    rows = [
        [code(entry.name), escape(entry.meaning), entry.unit, entry.combine, escape(entry.alarming)]
        for entry in SECTIONS[section]
    ]
    return table(("metric", "meaning", "unit", "combined", "alarming when"), rows)


def metric_parts() -> dict[str, Callable[[], str]]:
    """Part name -> its table, for every section of the glossary."""
    from rlflow.observe.glossary import SECTIONS

    return {f"metrics-{section}": partial(metrics, section) for section in SECTIONS}


# --- configuration ----------------------------------------------------------------------------------------------------


def config_reference() -> str:
    """Every key with its default and the comment that stands above it in the YAML files."""
    from omegaconf import OmegaConf

    from rlflow.config.overrides import compose_config
    from rlflow.config.yaml_text import documented

    config: Any = compose_config()
    tree: Any = OmegaConf.to_container(config, resolve=False)
    places = documented("ppo_trainer.yaml")
    top = [name for name in tree if name != "model_engine" and not any(n.split(".")[0] == name for n in NODES)]
    parts = []
    for node in (*NODES, *top):
        value = select(tree, node)
        if value is None:
            continue
        nested = {n.removeprefix(f"{node}.") for n in NODES if n.startswith(f"{node}.")}
        rows = [
            [
                code(path),
                default_cell(leaf, node, path),
                escape(places[f"{node}.{path}"].comment if f"{node}.{path}" in places else ""),
            ]
            for path, leaf in walk(value)
            if not any(path == name or path.startswith(f"{name}.") for name in nested)
        ]
        parts.append(f"## {node}\n\n{table(('key', 'default', 'what it is'), rows)}")
    return "\n\n".join(parts)


def walk(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of all keys: single ones first, then each group before its own keys."""
    for name, value in sorted(node.items(), key=lambda item: isinstance(item[1], dict) and bool(item[1])):
        yield f"{prefix}{name}", value
        if isinstance(value, dict) and value:
            yield from walk(value, f"{prefix}{name}.")


def select(tree: Any, path: str) -> Any:
    """The node at a dotted path, None when there is none."""
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def default_cell(value: Any, node: str, path: str) -> str:
    """A default as a reader understands it: a value, or the key it follows."""
    if isinstance(value, dict) and value:
        return ""
    if value == "???":
        return "must be set"
    if isinstance(value, str):
        followed = re.fullmatch(r"\$\{(?:oc\.select:)?([\w.]+?)(?:,[^}]*)?\}", value)
        if followed:
            target = followed[1]
            if target.startswith("."):
                target = ".".join([node, *path.split(".")[:-1]]) + target
            return f"that of {code(target)}"
    if value is None or isinstance(value, bool):
        return code({None: "null", True: "true", False: "false"}[value])
    if isinstance(value, list):
        return code("[" + ", ".join(map(str, value)) + "]")
    return code(str(value))


def key_rules(state: str) -> str:
    """Patterns of the keys of one state, with the reason and what to set in their place."""
    from rlflow.config.key_rules import RULES

    rows: dict[tuple[str, str], list[str]] = {}
    for rule in RULES:
        if rule.state == state:
            engines = f" (honoured by {', '.join(rule.honoured_by)})" if rule.honoured_by else ""
            rows.setdefault((f"{rule.why}{engines}", rule.instead), []).append(code(rule.pattern))
    if state == "inert":
        return table(("keys", "why"), [[", ".join(keys), why] for (why, _), keys in rows.items()])
    return table(("keys", "feature", "instead"), [[", ".join(keys), *texts] for texts, keys in rows.items()])


# --- markdown ---------------------------------------------------------------------------------------------------------


def table(header: tuple[str, ...], rows: list[list[str]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def code(text: str) -> str:
    return f"`{escape(text)}`"


def escape(text: str) -> str:
    return text.replace("|", "\\|")


PARTS: dict[str, Callable[[], str]] = {
    "stages": stages,
    "names": names,
    "live-table": live_table,
    "engines": engines,
    "config": config_reference,
    "keys-inert": partial(key_rules, "inert"),
    "keys-unbuilt": partial(key_rules, "unbuilt"),
    **metric_parts(),
}


def generate(page: str) -> str:
    """The page with its generated parts as they should be; ValueError for a part that nobody generates."""

    def fill(match: re.Match[str]) -> str:
        if match[2] not in PARTS:
            raise ValueError(f"no part {match[2]!r} is generated; there is {', '.join(PARTS)}")
        return f"{match[1]}\n{PARTS[match[2]]()}\n\n{match[3]}"

    return _PART.sub(fill, page)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the generated parts of docs/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 when a page is out of date")
    check = parser.parse_args(argv).check
    stale = []
    for path in sorted(DOCS.glob("*.md")):
        old = path.read_text(encoding="utf-8")
        new = generate(old)
        if new != old:
            stale.append(path.relative_to(ROOT))
            if not check:
                path.write_text(new, encoding="utf-8")
    for name in stale:
        print(f"{'out of date' if check else 'written'}: {name}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
