"""Validation numbers per data source, variable and prompt.

For a prompt with N samples: mean@N; with N > 1 also std@N, and for n = 2, 4, 8, ... < N and n = N the expected best and
worst of n (`best@n`, `worst@n`) and, when the scorer returns `pred`, the value of the majority answer (`maj@n`), each
by bootstrap. The bootstrap has a random generator of its own: it never touches the global one.

Invariants
    - Nothing is NaN: a value that is missing or no finite number is left out of its prompt's figures.
    - N is how many samples were asked for, so a prompt that lost one is averaged with the others, not listed apart.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
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
    draws = _draws(len(data), subset_size, n_bootstrap, seed)
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
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = 42,
    *,
    samples_of: Mapping[str, int] | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """{source: {variable: {metric: value}}}, averaged over prompts.

    Args:
        data_sources, sample_uids: source and prompt of each sample.
        infos_dict: variable -> one value a sample. None and non-finite values are left out; a variable with any value
            that is no number (text, lists) is skipped.
        seed: of the bootstrap.
        samples_of: uid -> how many samples were asked for; at least those that are there.
    """
    grouped: dict[str, dict[str, dict[str, list[Any]]]] = defaultdict(lambda: defaultdict(dict))
    for row, (source, uid) in enumerate(zip(data_sources, sample_uids, strict=True)):
        for name, values in infos_dict.items():
            grouped[source][uid].setdefault(name, []).append(values[row])
    skipped = {name for name, values in infos_dict.items() if not _all_numbers(values)}
    result: dict[str, dict[str, dict[str, float]]] = {}
    for source, prompts in grouped.items():
        collected: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for uid, variables in prompts.items():
            wanted = (samples_of or {}).get(uid, 0)
            for name in variables.keys() - skipped:
                for metric, value in _prompt_metrics(variables, name, wanted, seed).items():
                    collected[name][metric].append(value)
        result[source] = {
            name: {metric: float(np.mean(values)) for metric, values in collected[name].items()}
            for name in infos_dict
            if name in collected
        }
    return result


def _all_numbers(values: Sequence[Any]) -> bool:
    return all(value is None or isinstance(value, (int, float, np.number, np.bool_)) for value in values)


def _prompt_metrics(variables: dict[str, list[Any]], name: str, wanted: int, seed: int) -> dict[str, float]:
    rows = [row for row, value in enumerate(variables[name]) if value is not None and math.isfinite(value)]
    values = np.array([float(variables[name][row]) for row in rows])
    if not rows:
        return {}
    count = max(wanted, len(variables[name]))
    metrics = {f"mean@{count}": float(np.mean(values))}
    if count == 1:
        return metrics
    metrics[f"std@{count}"] = float(np.std(values))
    votes = None if "pred" not in variables else _numbered([variables["pred"][row] for row in rows])
    for n in [2**power for power in range(1, count.bit_length()) if 2**power < count] + [count]:
        drawn = values[_draws(len(values), n, N_BOOTSTRAP, seed)]
        best, worst = drawn.max(axis=1), drawn.min(axis=1)
        metrics |= {f"best@{n}/mean": float(best.mean()), f"best@{n}/std": float(best.std())}
        metrics |= {f"worst@{n}/mean": float(worst.mean()), f"worst@{n}/std": float(worst.std())}
        if votes is not None:
            majority = _majority_values(values, votes, _draws(len(values), n, N_BOOTSTRAP, seed))
            metrics |= {f"maj@{n}/mean": float(majority.mean()), f"maj@{n}/std": float(majority.std())}
    return metrics


@lru_cache(maxsize=64)
def _draws(items: int, subset_size: int, n_bootstrap: int, seed: int) -> np.ndarray[Any, Any]:
    """Positions of the drawn items [n_bootstrap, subset_size]; the same for every prompt of equal size."""
    return np.random.RandomState(seed).choice(items, size=(n_bootstrap, subset_size), replace=True)


def _numbered(votes: list[Any]) -> np.ndarray[Any, Any]:
    """Equal votes get equal numbers, from 0; what cannot be hashed is compared by its text."""
    numbers: dict[Any, int] = {}
    keys = [vote if vote.__hash__ else repr(vote) for vote in votes]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def _majority_values(values: Any, votes: Any, draws: Any) -> Any:
    """`calc_maj_val` of every draw at once, float [n_bootstrap]."""
    drawn = votes[draws]
    size = draws.shape[1]
    # first[b, v]: where vote v is seen first in draw b (size: not at all); counts[b, v]: how often.
    cast = [drawn == vote for vote in range(votes.max() + 1)]
    counts = np.stack([here.sum(axis=1) for here in cast], axis=1)
    first = np.stack([np.where(here.any(axis=1), here.argmax(axis=1), size) for here in cast], axis=1)
    winner = (counts * (size + 1) - first).argmax(axis=1)
    chosen = first[np.arange(len(draws)), winner]
    return values[draws[np.arange(len(draws)), chosen]]


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
