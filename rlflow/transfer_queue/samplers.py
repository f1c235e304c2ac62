"""Which of the ready rows a `fetch` of the low-level client gets.

A sampler lives in the controller. It is offered the row numbers that have all requested fields and that the task has
not consumed, and answers with those to return and those to mark as consumed; choosing and marking is one step there, so
that two consumers of a task never share a row.

```python
class Newest(BaseSampler):
    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        rows = sorted(ready_indexes)[-batch_size:]
        return rows, rows

tq.init({"controller": {"sampler": Newest()}})     # or the class, or "my_package.samplers.Newest"
```

`sample` gets by keyword `task_name`, `partition_id`, whatever the caller gave as `sampling_config` (`dp_rank` and
`batch_index` for the samplers below), and `partition`, a `fetch.PartitionRows`: keys, tags and groups of the rows.

`([], [])` means: not yet. The caller waits for more rows then, or gets an empty batch in polling mode.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from rlflow.transfer_queue.errors import QueueArgumentError, QueueRequestError
from rlflow.utils.import_utils import load_class_from_fqn
from rlflow.utils.partition import karmarkar_karp

Choice = tuple[list[int], list[int]]


class BaseSampler(ABC):
    """Base of all samplers.

    `_states[partition_id][task_name][dp_rank][batch_index]` remembers choices, so that a rank that asks again gets the
    same rows. Subclasses with other state extend `save_checkpoint` and `load_checkpoint`; the state is made of dicts,
    lists, tuples and plain values.
    """

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    @abstractmethod
    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Choice:
        """(rows to return, rows to mark as consumed); ([], []) when the ready rows do not make up a batch."""

    def __call__(self, *args: Any, **kwargs: Any) -> Choice:
        """See `sample`."""
        return self.sample(*args, **kwargs)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Whether the rank `dp_rank` has been given its rows of `batch_index` already."""
        config = sampling_config or {}
        ranks = self._states.get(partition_id, {}).get(task_name, {})
        return config.get("batch_index") in ranks.get(config.get("dp_rank"), {})

    def clear_cache(self, partition_id: str) -> None:
        """Forget all choices of a partition."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """The state as plain values."""
        return {"_states": copy.deepcopy(self._states)}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Take over what `save_checkpoint` returned."""
        self._states = copy.deepcopy(state["_states"])

    def _choices(self, partition_id: str, task_name: str, dp_rank: int) -> dict[int, Any]:
        return self._states.setdefault(partition_id, {}).setdefault(task_name, {}).setdefault(dp_rank, {})


class SequentialSampler(BaseSampler):
    """The first `batch_size` ready rows."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Choice:
        rows = list(ready_indexes[:batch_size])
        return rows, list(rows)


class RankAwareSampler(BaseSampler):
    """All callers with one `dp_rank` get the same rows for a `batch_index`; the first of them decides."""

    # The keywords are required, as in the public package.
    def sample(  # type: ignore[override]
        self,
        ready_indexes: list[int],
        batch_size: int,
        dp_rank: int,
        batch_index: int,
        task_name: str,
        partition_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> Choice:
        choices = self._choices(partition_id, task_name, dp_rank)
        if batch_index not in choices:
            if len(ready_indexes) < batch_size:
                return [], []
            choices[batch_index] = list(ready_indexes[:batch_size])
        rows = choices[batch_index]
        return list(rows), list(rows)


class GRPOGroupNSampler(BaseSampler):
    """Whole groups of `n_samples_per_prompt` rows.

    Rows of one prompt share the tag entry `uid`, or else the prompt part of a key `{uid}_{session}_{index}`; rows with
    neither form a group when their numbers are consecutive.

    Args:
        n_samples_per_prompt: rows of a group.
    """

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        if n_samples_per_prompt < 1:
            raise QueueArgumentError(f"n_samples_per_prompt={n_samples_per_prompt} makes no group; try 1 or more")
        super().__init__()
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Choice:
        rank: Any = kwargs.get("dp_rank")
        number: Any = kwargs.get("batch_index")
        ranked = rank is not None and number is not None
        choices = self._choices(partition_id, task_name, rank) if ranked else {}
        if number in choices:
            return _copied(choices[number])
        groups = self._groups(ready_indexes, batch_size, kwargs.get("partition"))
        rows = [row for group in groups for row in group]
        if rows and ranked:
            choices[number] = (rows, list(rows))
        return list(rows), list(rows)

    def _groups(self, ready_indexes: Sequence[int], count: int, partition: Any) -> list[list[int]]:
        """The first complete groups that make up `count` rows; none when there are too few."""
        if count % self.n_samples_per_prompt:
            raise QueueRequestError(
                f"a batch of {count} rows does not consist of whole groups of {self.n_samples_per_prompt} rows "
                f"(n_samples_per_prompt); try {max(1, count // self.n_samples_per_prompt) * self.n_samples_per_prompt}"
            )
        # A status object of user code may know tags only.
        group_of = partition.group_of(ready_indexes) if hasattr(partition, "group_of") else {}
        groups = complete_groups(ready_indexes, self.n_samples_per_prompt, group_of)
        wanted = count // self.n_samples_per_prompt
        return groups[:wanted] if len(groups) >= wanted else []


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Whole groups, dealt to the ranks so that each has as many rows and nearly as many tokens.

    The first rank that asks for a `batch_index` decides for all. A row weighs its tag entry `total_lengths` (1 without
    one); a group, which stays on one rank, weighs the sum of its rows. A fetch without `dp_rank` gets the first groups.

    Args:
        n_samples_per_prompt: rows of a group.
        dp_size: number of ranks; `batch_size` of a fetch is per rank.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        if dp_size < 1:
            raise QueueArgumentError(f"dp_size={dp_size} leaves no rank to fetch; try 1 or more")
        super().__init__(n_samples_per_prompt)
        self.dp_size = dp_size

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Choice:
        rank, number = kwargs.get("dp_rank"), kwargs.get("batch_index")
        if rank is None or number is None:  # nobody to balance against
            return super().sample(ready_indexes, batch_size, task_name, partition_id, *args, **kwargs)
        if not 0 <= rank < self.dp_size:
            raise QueueRequestError(f"dp_rank={rank} is not among the dp_size={self.dp_size} ranks of the sampler")
        if not self.has_cached_result(partition_id, task_name, {"dp_rank": rank, "batch_index": number}):
            if batch_size % self.n_samples_per_prompt:
                self._groups([], batch_size, None)  # raises, and names the numbers of one rank
            partition = kwargs.get("partition")
            groups = self._groups(ready_indexes, batch_size * self.dp_size, partition)
            if not groups:
                return [], []
            for other, rows in enumerate(self._deal(groups, partition)):
                self._choices(partition_id, task_name, other)[number] = (rows, list(rows))
        return _copied(self._choices(partition_id, task_name, rank)[number])

    def _deal(self, groups: Sequence[list[int]], partition: Any) -> list[list[int]]:
        if partition is None:
            share = len(groups) // self.dp_size
            parts = [list(range(rank * share, (rank + 1) * share)) for rank in range(self.dp_size)]
        else:
            tags = partition.get_custom_meta([row for group in groups for row in group])
            weights = [sum(int(tags[row].get("total_lengths", 1)) for row in group) for group in groups]
            parts = karmarkar_karp(weights, self.dp_size, equal_size=True)
        return [[row for place in sorted(part) for row in groups[place]] for part in parts]


def complete_groups(rows: Sequence[int], size: int, group_of: Mapping[int, Hashable]) -> list[list[int]]:
    """Groups of `size` rows, in the order of their first row.

    Args:
        rows: row numbers.
        size: rows of a group.
        group_of: group of a row; rows without one are grouped by consecutive numbers.
    """
    named: dict[Hashable, list[int]] = {}
    loose = []
    for row in sorted(rows):
        group = group_of.get(row)
        if group is None:
            loose.append(row)
        else:
            named.setdefault(group, []).append(row)
    groups = [
        members[start : start + size]
        for members in named.values()
        for start in range(0, len(members) - size + 1, size)
    ]  # fmt: skip
    start = 0
    while start + size <= len(loose):
        whole = loose[start + size - 1] - loose[start] == size - 1
        if whole:
            groups.append(loose[start : start + size])
        start += size if whole else 1
    return sorted(groups)


def _copied(choice: Sequence[Sequence[int]]) -> Choice:
    # A restored choice is a list of lists.
    rows, consumed = choice
    return list(rows), list(consumed)


# -- from the config -------------------------------------------------------------------------------

SAMPLERS: dict[str, type[BaseSampler]] = {
    kind.__name__: kind for kind in (SequentialSampler, GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler)
}


def make_sampler(value: Any) -> BaseSampler:
    """The sampler of `transfer_queue.controller.sampler`: an instance, a class, one of our names, or a dotted name.

    Raises:
        QueueArgumentError: (a ValueError) nothing that can sample.
    """
    if isinstance(value, str):
        value = _class_of(value)
    if isinstance(value, type) and issubclass(value, BaseSampler):
        try:
            return value()
        except TypeError as error:
            raise QueueArgumentError(
                f"transfer_queue.controller.sampler={value.__name__} cannot be made without arguments ({error}); give "
                "an instance"
            ) from error
    if isinstance(value, BaseSampler):
        return value
    raise QueueArgumentError(
        f"transfer_queue.controller.sampler={value!r} is no sampler; give an instance or subclass of BaseSampler, or "
        f"one of the names {', '.join(SAMPLERS)}"
    )


def _class_of(name: str) -> type:
    if name in SAMPLERS:
        return SAMPLERS[name]
    if "." not in name:
        raise QueueArgumentError(
            f"transfer_queue.controller.sampler={name!r} is unknown; try one of {', '.join(SAMPLERS)}, or the dotted "
            "name of a class (my_package.my_module.MySampler)"
        )
    return load_class_from_fqn(name, "sampler")


def sampler_name(value: Any) -> str:
    """How a sampler stands in a config that is shown: a plain string."""
    if isinstance(value, str):
        return value
    return value.__name__ if isinstance(value, type) else type(value).__name__
