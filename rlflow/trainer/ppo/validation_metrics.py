"""Validation numbers per data source, variable and prompt.

For a prompt with N samples: mean@N; with N > 1 also std@N, and for n = 2, 4, 8, ... < N and n = N the expected best and
worst of n (`best@n`, `worst@n`) and, when the scorer returns `pred`, the value of the majority answer (`maj@n`), each
by bootstrap. The bootstrap has a random generator of its own: it never touches the global one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

N_BOOTSTRAP = 1000


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: list[Callable[[Any], float]],
    n_bootstrap: int = N_BOOTSTRAP,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """(mean, population std) of each reduction over `n_bootstrap` draws of `subset_size` items with replacement."""
    draws = np.random.RandomState(seed).choice(len(data), size=(n_bootstrap, subset_size), replace=True)
    results = []
    for reduce_fn in reduce_fns:
        values = [reduce_fn([data[i] for i in draw]) for draw in draws]
        results.append((float(np.mean(values)), float(np.std(values))))
    return results


def calc_maj_val(data: Sequence[dict[str, Any]], vote_key: str, val_key: str) -> float:
    """The value of the first sample with the most common vote (ties: the vote seen first)."""
    winner = Counter(item[vote_key] for item in data).most_common(1)[0][0]
    return next(item[val_key] for item in data if item[vote_key] == winner)


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[str], infos_dict: Mapping[str, Sequence[Any]], seed: int = 42
) -> dict[str, dict[str, dict[str, float]]]:
    """{source: {variable: {metric: value}}}, averaged over prompts.

    Args:
        data_sources, sample_uids: source and prompt of each sample.
        infos_dict: variable -> one value a sample; None values are left out, text variables are skipped.
        seed: of the bootstrap.
    """
    grouped: dict[str, dict[str, dict[str, list[Any]]]] = defaultdict(lambda: defaultdict(dict))
    for row, (source, uid) in enumerate(zip(data_sources, sample_uids, strict=True)):
        for name, values in infos_dict.items():
            grouped[source][uid].setdefault(name, []).append(values[row])
    result: dict[str, dict[str, dict[str, float]]] = {}
    for source, prompts in grouped.items():
        collected: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for variables in prompts.values():
            for name in variables:
                for metric, value in _prompt_metrics(variables, name, seed).items():
                    collected[name][metric].append(value)
        result[source] = {
            name: {metric: float(np.mean(values)) for metric, values in metrics.items()}
            for name, metrics in collected.items()
        }
    return result


def _prompt_metrics(variables: dict[str, list[Any]], name: str, seed: int) -> dict[str, float]:
    predictions = variables.get("pred")
    rows = [row for row, value in enumerate(variables[name]) if value is not None]
    values = [variables[name][row] for row in rows]
    if not values or isinstance(values[0], str):
        return {}
    count = len(values)
    metrics = {f"mean@{count}": float(np.mean(values))}
    if count == 1:
        return metrics
    metrics[f"std@{count}"] = float(np.std(values))
    sizes = [2**power for power in range(1, count.bit_length()) if 2**power < count] + [count]
    for n in sizes:
        (best, best_std), (worst, worst_std) = bootstrap_metric(values, n, [np.max, np.min], seed=seed)
        metrics.update({f"best@{n}/mean": best, f"best@{n}/std": best_std})
        metrics.update({f"worst@{n}/mean": worst, f"worst@{n}/std": worst_std})
        if predictions is not None:
            votes = [{"pred": predictions[row], "val": value} for row, value in zip(rows, values, strict=True)]
            [(majority, majority_std)] = bootstrap_metric(
                votes, n, [lambda draw: calc_maj_val(draw, "pred", "val")], seed=seed
            )
            metrics.update({f"maj@{n}/mean": majority, f"maj@{n}/std": majority_std})
    return metrics


def name_validation_metrics(processed: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """Flat keys: `val-core/{source}/{variable}/{metric}` for the headline numbers, `val-aux/...` for the rest.

    The core variable is `acc` when there is one, else `reward`; its headline metrics are mean, maj and best at the
    largest N.
    """
    flat: dict[str, float] = {}
    for source, variables in processed.items():
        core = "acc" if "acc" in variables else "reward"
        for name, metrics in variables.items():
            sizes = [int(metric.split("@")[1].split("/")[0]) for metric in metrics]
            largest = max(sizes, default=0)
            for metric, value in metrics.items():
                headline = name == core and metric.startswith(("mean", "maj", "best")) and f"@{largest}" in metric
                # "@1" is also a prefix of "@16": compare the whole number.
                headline = headline and int(metric.split("@")[1].split("/")[0]) == largest
                flat[f"{'val-core' if headline else 'val-aux'}/{source}/{name}/{metric}"] = value
    return flat
