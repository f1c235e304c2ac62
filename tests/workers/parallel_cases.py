"""Combinations of the engine's features that must not change a number, chosen so that every pair of settings meets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from model_families import FAMILIES
from tensordict import TensorDict
from tiny import make_batch, save_adapter, save_tiny_model, with_values

# Settings of one run by factor. `layout` and `batches` are options of the batch, the others of the engine.
LAYOUTS = {
    "shared": {"share_prompts": True},
    "packed": {"share_prompts": False},
    "padded": {"use_remove_padding": False},
}
BATCHES = {
    "whole": {},
    # A budget that the ranks of a sequence share; with it some ranks run an empty micro-batch.
    "dynamic": {"max_token_len_per_gpu": 24},
    "static": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2},
}
# Folder of a model -> its family: the usual one; windows and soft caps; experts.
MODELS = {"llama": "SmolLM2", "gemma": "Gemma 2", "moe": "Qwen3-MoE"}
FACTORS: dict[str, tuple] = {
    "ulysses_sequence_parallel_size": (1, 2, 4),
    "fsdp_size": (-1, 2, 1),
    "layout": tuple(LAYOUTS),
    "batches": tuple(BATCHES),
    "critic": (False, True),
    "model": tuple(MODELS),
    "lora": (False, True),
    "recompute": (False, True),
    "reshard_after_forward": (True, False),
    "defer_fsdp_grad_sync": (True, False),
    "forward_prefetch": (False, True),
    "entropy_checkpointing": (True, False),
    "offload": (False, True),
    "wrap": ("layers", "whole"),
}
# The run that all others are compared with: one process, one micro-batch, nothing computed twice.
PLAIN = {name: values[0] for name, values in FACTORS.items()} | {"layout": "packed"}


def plain_cases() -> list[dict]:
    """The plain run of each kind."""
    return [
        PLAIN | {"model": m, "lora": lora, "critic": c} for m in MODELS for lora in (False, True) for c in (False, True)
    ]


def allowed(case: dict, world: int) -> bool:
    """Whether `world` ranks can run a (partial) case, and whether its settings are distinct there."""
    sp, shards = case.get("ulysses_sequence_parallel_size", 1), case.get("fsdp_size", -1)
    if sp > world or shards >= world:
        return False
    return not (sp > 1 and case.get("layout") == "padded")


def pairs_of(case: dict) -> Iterator[tuple]:
    return itertools.combinations(sorted(case.items(), key=lambda item: item[0]), 2)


def pairwise(world: int, tries: int = 40) -> list[dict]:
    """Few cases in which every allowed pair of settings occurs."""
    rng = random.Random(world)
    open_pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(sorted(FACTORS), 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
        if allowed({a: x, b: y}, world)
    }
    cases = []
    while open_pairs:
        seed = min(open_pairs, key=repr)
        best = max((_complete(dict(seed), world, open_pairs, rng) for _ in range(tries)), key=lambda found: found[0])
        cases.append(best[1])
        open_pairs -= set(pairs_of(best[1]))
    return cases


def _complete(case: dict, world: int, open_pairs: set, rng: random.Random) -> tuple[int, dict]:
    """The other factors one by one, each with the value that closes most open pairs; (pairs closed, case)."""
    for name in rng.sample([name for name in FACTORS if name not in case], len(FACTORS) - len(case)):
        choices = [value for value in FACTORS[name] if allowed(case | {name: value}, world)]
        rng.shuffle(choices)
        case[name] = max(choices, key=lambda value: len(set(pairs_of(case | {name: value})) & open_pairs))
    case = {name: case[name] for name in FACTORS}
    return len(set(pairs_of(case)) & open_pairs), case


def savers(cases: list[dict]) -> list[int]:
    """Places of cases with one model on different meshes, which save checkpoints."""
    groups: dict[tuple, dict[tuple, int]] = {}
    for i, case in enumerate(cases):
        mesh = case["ulysses_sequence_parallel_size"] > 1, case["fsdp_size"]
        groups.setdefault(kind(case), {}).setdefault(mesh, i)
    return sorted(max(groups.values(), key=len).values())[:3]


def kind(case: dict) -> tuple[str, bool, bool]:
    """What is trained; cases of one kind have the same numbers."""
    return case["model"], case["lora"], case["critic"]


def save_models(folder: Path) -> str:
    """The models of the cases, each with an adapter beside it."""
    for name, family in MODELS.items():
        transformers_name, options = FAMILIES[family]
        path = save_tiny_model(folder / name, family=transformers_name, **options)
        save_adapter(path, folder / f"{name}_lora", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    return str(folder)


def engine_options(case: dict, models: str) -> dict:
    """Arguments of `rank_jobs.build`."""
    elsewhere = ("layout", "batches", "offload", "wrap", "model", "lora")
    options = {name: value for name, value in case.items() if name not in elsewhere}
    options["path"] = f"{models}/{case['model']}"
    options["wrap_policy"] = {"disable": case["wrap"] == "whole"}
    if case["offload"]:  # on a CPU there is nothing to move; the modes must not mind
        options |= {"param_offload": True, "optimizer_offload": True}
    if case["lora"]:
        options["model"] = {"lora_adapter_path": f"{models}/{case['model']}_lora"}
    return options


def batch_options(case: dict) -> dict:
    options = {"calculate_entropy": True} | LAYOUTS[case["layout"]] | BATCHES[case["batches"]]
    if "max_token_len_per_gpu" in options:
        options["max_token_len_per_gpu"] //= case["ulysses_sequence_parallel_size"]
    return options


def rollouts(seed: int) -> TensorDict:
    """The recorded rollouts of a step: two prompts, four responses each."""
    return with_values(make_batch(8, seed, group=4), seed)
