"""The order in which rows are visited.

Invariant: the order of epoch e is a pure function of (seed, e, number of rows). No state is carried from one epoch to
the next, so a run that starts at any place of any epoch sees what an unbroken run sees from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized
from functools import lru_cache
from typing import Any

import numpy as np

from rlflow.utils.errors import DataError

DEFAULT_SEED = 1


class EpochSampler:
    """Endless stream of (epoch, row), and the place in it.

    The cursor is `epoch` and `position`: the next row is `order(epoch)[position]`. Iterating yields the rows of the
    current epoch from the cursor on and ends with the epoch, as samplers of torch do.

    Args:
        size: number of rows; at least 1.
        seed: any int; ignored without shuffling.
        shuffle: False visits rows in file order.
        drop_last_to: rows of an epoch that are visited; the rest of its order is left out (a last partial batch).
    """

    def __init__(
        self, size: int, seed: int = DEFAULT_SEED, shuffle: bool = True, drop_last_to: int | None = None
    ) -> None:
        if size < 1:
            raise DataError("a sampler needs at least one row")
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.length = size if drop_last_to is None else drop_last_to
        if not 1 <= self.length <= size:
            raise DataError(f"cannot visit {self.length} rows an epoch of {size}")
        self.epoch = 0
        self.position = 0

    def order(self, epoch: int) -> np.ndarray:
        """Rows of an epoch in visiting order, int64 [length]."""
        return _order(self.size, self.seed if self.shuffle else None, epoch)[: self.length]

    def next(self) -> tuple[int, int]:
        """(epoch, row) at the cursor, which moves on by one."""
        epoch, row = self.epoch, int(self.order(self.epoch)[self.position])
        self.position += 1
        if self.position == self.length:
            self.epoch, self.position = epoch + 1, 0
        return epoch, row

    def __iter__(self) -> Iterator[int]:
        epoch = self.epoch
        while self.epoch == epoch:
            yield self.next()[1]

    def __len__(self) -> int:
        return self.length

    def state_dict(self) -> dict[str, Any]:
        """The cursor and what it refers to; JSON-safe."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "size": self.size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the cursor of `state`.

        Raises:
            DataError: the state belongs to another order (seed, shuffle or number of rows differ).
        """
        mine = self.state_dict()
        differs = [k for k in ("size", "shuffle", "seed") if state[k] != mine[k] and (k != "seed" or self.shuffle)]
        if differs:
            told = ", ".join(f"{k} {state[k]} -> {mine[k]}" for k in differs)
            raise DataError(
                f"the data cursor cannot be restored: {told} (saved -> now). The place in the data is lost when the "
                "rows or their order change. Restore data.train_files, data.train_max_samples, data.shuffle and "
                "data.seed, or start from epoch 0 with trainer.resume_mode=disable."
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        if self.position >= self.length:  # saved under a smaller batch size, in the part of the epoch now left out
            self.epoch, self.position = self.epoch + 1, 0


@lru_cache(maxsize=4)
def _order(size: int, seed: int | None, epoch: int) -> np.ndarray:
    if seed is None:
        order = np.arange(size)
    else:
        # Ranks by hash, not `Generator.permutation`: NumPy may change the stream of its methods between releases, and
        # then a run resumed after an upgrade would see other rows.
        key = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=32).digest()
        words = np.frombuffer(hashlib.shake_256(key).digest(8 * size), dtype="<u8")
        order = np.argsort(words, kind="stable")
    order.setflags(write=False)
    return order


def create_rl_sampler(data_config: Any, dataset: Sized) -> EpochSampler:
    """The sampler that `data.shuffle` and `data.seed` ask for (seed null: 1, so that a run can be repeated)."""
    seed = data_config.get("seed")
    return EpochSampler(
        len(dataset), DEFAULT_SEED if seed is None else int(seed), bool(data_config.get("shuffle", True))
    )
