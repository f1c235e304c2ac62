"""The train loader: which prompt comes next, and how far training has got.

Two cursors run over the sampler's endless stream of (epoch, row):

    issued    where the next prompt is taken from
    frontier  everything before it is trained, or dropped for good

    trained  trained  trained | running  trained  running | not yet issued
                              ^ frontier                  ^ issued

Invariants
    - `state_dict()` holds the frontier and the prompts that were trained beyond it ("ahead"), never the issued cursor:
      a prompt that was issued but not trained when a run died is issued again, and no prompt is trained twice.
    - uids are `e{epoch}r{row}a{attempt}`: a prompt has one name in every run of the same seed.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflow.data.sampler import DEFAULT_SEED, EpochSampler, create_rl_sampler
from rlflow.utils.errors import ContractError, DataError

if TYPE_CHECKING:
    from rlflow.data.dataset import PromptDataset

_UID = re.compile(r"e(\d+)r(\d+)a(\d+)")
STATE_VERSION = 1


def make_uid(epoch: int, row: int, attempt: int = 0) -> str:
    """Name of a prompt of a run."""
    return f"e{epoch}r{row}a{attempt}"


class PromptLoader:
    """Batches of rows with an exact cursor.

    Each row is a dict of the dataset plus `uid` (str), `epoch` and `row` (its index in the dataset).

    Args:
        dataset: `len` and `[i] -> dict`.
        batch_size: rows of a batch; an epoch has `len(dataset) // batch_size` batches, a last partial one is left out.
        shuffle: whether each epoch has its own order.
        seed: seed of the orders.

    Raises:
        DataError: fewer rows than a batch.
    """

    def __init__(self, dataset: PromptDataset, batch_size: int, shuffle: bool = True, seed: int = DEFAULT_SEED) -> None:
        rows = len(dataset)
        if batch_size < 1:
            raise DataError(f"a batch of {batch_size} prompts; data.train_batch_size must be at least 1")
        if rows < batch_size:
            raise DataError(
                f"data.train_batch_size={batch_size} needs at least {batch_size} prompts, the train data has {rows}; "
                f"set data.train_batch_size to at most {rows}, or give more data"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self._visited = rows - rows % batch_size
        self._issued = EpochSampler(rows, seed, shuffle, drop_last_to=self._visited)
        self._frontier = EpochSampler(rows, seed, shuffle, drop_last_to=self._visited)
        # Issued and not behind the frontier, in order of issue -> whether it is done.
        self._open: OrderedDict[tuple[int, int], bool] = OrderedDict()
        self._ahead: set[tuple[int, int]] = set()  # trained in an earlier life; skipped when the stream reaches them

    def __len__(self) -> int:
        """Batches an epoch."""
        return self._visited // self.batch_size

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt to be issued."""
        return self._issued.epoch

    def next_batch(self, n: int | None = None) -> list[dict[str, Any]]:
        """The next `n` rows (default: the batch size); an epoch's end is crossed without a gap."""
        rows: list[dict[str, Any]] = []
        while len(rows) < (self.batch_size if n is None else n):
            place = self._issued.next()
            self._open[place] = place in self._ahead
            if place in self._ahead:
                self._ahead.discard(place)
                continue
            epoch, row = place
            rows.append({**self.dataset[row], "uid": make_uid(epoch, row), "epoch": epoch, "row": row})
        return rows

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        while True:
            yield self.next_batch()

    def mark_trained(self, uids: Iterable[str]) -> None:
        """Tell that these prompts are trained, or dropped for good; any order, any attempt. Repeats change nothing.

        Raises:
            ContractError: a uid that was never issued.
        """
        for uid in uids:
            place = place_of(uid)
            if place in self._open:
                self._open[place] = True
            elif not self._is_behind(place):
                raise ContractError(
                    f"{uid} is marked as trained but was not issued (epoch {self.epoch} is being issued)"
                )
        for place, done in list(self._open.items()):
            if not done:
                break
            del self._open[place]
            self._frontier.next()

    def _is_behind(self, place: tuple[int, int]) -> bool:
        """Whether a place that is not open lies before the frontier."""
        epoch, row = place
        if epoch != self._frontier.epoch:
            return epoch < self._frontier.epoch
        return row in self._frontier.order(epoch)[: self._frontier.position]

    def state_dict(self) -> dict[str, Any]:
        """The trained frontier; JSON-safe."""
        done = [place for place, done in self._open.items() if done]
        # A place left out since (the batch size changed) is never reached and would stay for ever.
        ahead = [list(place) for place in sorted(done + [p for p in self._ahead if p[0] >= self._frontier.epoch])]
        return {**self._frontier.state_dict(), "version": STATE_VERSION, "batch_size": self.batch_size, "ahead": ahead}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a frontier. The batch size may differ; rows, seed and shuffle may not (`DataError`)."""
        if state.get("version") != STATE_VERSION:
            raise DataError(
                f"data cursor of version {state.get('version')!r}; this rlflow reads version {STATE_VERSION}"
            )
        self._frontier.load_state_dict(dict(state))
        self._issued.load_state_dict(dict(state))
        self._open.clear()
        self._ahead = {(int(epoch), int(row)) for epoch, row in state["ahead"]}


def place_of(uid: str) -> tuple[int, int]:
    """(epoch, row) of a train prompt; `ContractError` for any other name."""
    match = _UID.fullmatch(uid)
    if match is None:
        raise ContractError(f"{uid!r} is no uid of a train prompt; expected e<epoch>r<row>a<attempt>")
    return int(match[1]), int(match[2])


def create_train_loader(data_config: Any, dataset: PromptDataset, batch_size: int | None = None) -> PromptLoader:
    """The loader of `data.{gen_batch_size,train_batch_size,shuffle,seed}`; `batch_size` overrides the first two."""
    size = batch_size or data_config.get("gen_batch_size") or data_config.get("train_batch_size")
    sampler = create_rl_sampler(data_config, dataset)
    return PromptLoader(dataset, int(size), sampler.shuffle, sampler.seed)


def iterate_validation(
    dataset: PromptDataset, batch_size: int | None = None, shuffle: bool = False, seed: int = DEFAULT_SEED
) -> Iterator[list[dict[str, Any]]]:
    """All rows once, in batches (None: one batch); the last may be smaller. The order is the same every time."""
    order = EpochSampler(len(dataset), seed, shuffle).order(0)
    for part in np.split(order, range(batch_size, len(order), batch_size)) if batch_size else [order]:
        yield [{**dataset[int(row)], "row": int(row)} for row in part]
