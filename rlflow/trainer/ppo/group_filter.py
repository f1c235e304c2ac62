"""Dynamic sampling: prompt groups without a signal are dropped, other prompts take their place.

    Yu et al. 2025 (DAPO), section 3.2: a group all of whose sessions score the same has advantage 0 and only thins the
    batch out.

A finished group is dropped when it has more than one trajectory and `algorithm.filter_groups.metric`, a number its
reward function returned, has standard deviation exactly 0 over them. Sessions with an invalid reward do not count; a
group that has no valid one is dropped too.

Invariants
    - A dropped group is replaced by `per_dropped` prompts, unless enough are in flight. With 1 a step is the shortest
      stretch of the data that holds enough groups, whatever ended first. At most `per_dropped` batches are in flight.
    - Every prompt that was asked for ends as kept or dropped within the step: nothing stays in flight.
    - A step asks for at most `max_prompts` prompts; then it ends with an error that says what the groups scored.
    - With `in_waves` a refill waits until nothing is in flight, so that what is generated together does not depend on
      which group ended first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import rlflow.transfer_queue as tq
from rlflow.trainer.ppo.dumps import reward_extras
from rlflow.trainer.ppo.replay_buffer import final_outputs, session_of, uid_of
from rlflow.trainer.ppo.reward_values import reward_number
from rlflow.utils.errors import RewardError

if TYPE_CHECKING:
    from rlflow.trainer.ppo.replay_buffer import PartitionView

# What max_num_gen_batches=0 stands for.
DEFAULT_GEN_BATCHES = 10


class GroupFilter:
    """Judges the groups of one step after the other.

    Args:
        metric: name in `reward_extra_info`.
        max_prompts: prompts that one step may ask for.
        per_dropped: prompts asked for in place of a dropped group.
        in_waves: refill only when nothing is in flight.
        refill: submits so many more prompts of the same step.
        on_dropped: called with (uid, reason).
    """

    def __init__(
        self,
        metric: str,
        *,
        max_prompts: int,
        per_dropped: int = 1,
        in_waves: bool = False,
        refill: Callable[[int], None],
        on_dropped: Callable[[str, str], None],
    ) -> None:
        self.metric = metric
        self._max_prompts = max_prompts
        self._per_dropped = per_dropped
        self._in_waves = in_waves
        self._refill = refill
        self._on_dropped = on_dropped
        self.begin(0)

    def begin(self, batch_size: int) -> None:
        """A step begins: `batch_size` prompts were submitted and as many groups are wanted."""
        self._wanted = batch_size
        self._issued = batch_size
        self._kept: set[str] = set()
        self._reasons: Counter[str] = Counter()
        self.dropped_markers: list[dict[str, Any]] = []
        self._evicted_rows = 0
        self._surplus_rows = 0

    def sift(self, view: PartitionView, ended: list[str]) -> list[str] | None:
        """Drop what has no signal and refill.

        Args:
            view: tags of the partition; what is dropped is taken out of it.
            ended: all prompts that ended and are not cleared yet, in the order of their submission.

        Returns:
            The groups of the step, or None while there is something to wait for.

        Raises:
            RewardError: a trajectory lacks the metric, or the step may ask for no more prompts.
        """
        new = [uid for uid in ended if uid not in self._kept]
        for uid, keys in _keys_of(view, new).items():
            reason = self._no_signal(uid, keys, view)
            if reason is None:
                self._kept.add(uid)
            else:
                self._reasons[reason] += 1
                self._evicted_rows += len(keys)
                self._drop(view, uid, keys, f"algorithm.filter_groups: {reason}")
        in_flight = self._issued - len(self._kept) - self._reasons.total()
        missing = self._wanted - len(self._kept)
        if missing <= 0:
            return self._without_surplus(view, ended) if in_flight == 0 else None
        uncovered = missing - in_flight
        if uncovered > 0 and not (self._in_waves and in_flight):
            more = min(self._per_dropped * uncovered, self._max_prompts - self._issued)
            if more > 0:
                self._issued += more
                self._refill(more)
            elif in_flight == 0:
                raise RewardError(self._too_few())
        return None

    def reissued(self, uids: Sequence[str]) -> None:
        """These prompts lost their trajectories and are in flight again."""
        self._kept.difference_update(uids)

    @property
    def kept(self) -> int:
        """Groups with a signal so far."""
        return len(self._kept)

    def metrics(self) -> dict[str, int]:
        """Counts of the step; a count that is 0 is left out. Samples are trajectories, prompts are groups."""
        prefix = "training/filter_groups"
        counts = {
            f"{prefix}/evicted_samples": self._evicted_rows,
            f"{prefix}/evicted_groups": self._reasons.total(),
            f"{prefix}/discarded_surplus_samples": self._surplus_rows,
            f"{prefix}/refilled_prompts": self._issued - self._wanted,
        }
        return {name: count for name, count in counts.items() if count}

    def _no_signal(self, uid: str, keys: list[str], view: PartitionView) -> str | None:
        """Why a group is dropped; None when it stays."""
        if not keys:
            return str(view.tags[uid].get("failed") or "its sessions left no trajectory")
        values = self._values(keys, [view.tags[key] for key in keys])
        if not values:
            return "no session has a valid reward"
        if len(values) == 1 or any(value != values[0] for value in values):
            return None
        return f"{self.metric} is {values[0]:g} in all sessions"

    def _values(self, keys: list[str], tags: list[dict[str, Any]]) -> list[float]:
        """The metric of each session with a valid reward, from its last output."""
        data = tq.kv_batch_get(keys, "train", ["extra_fields"])
        infos = reward_extras(data, tags)
        option = "algorithm.filter_groups.metric"
        return [
            reward_number(infos[row], self.metric, keys[row], option)
            for row in final_outputs(keys)
            if not tags[row].get("invalid")
        ]

    def _drop(self, view: PartitionView, uid: str, keys: list[str], reason: str) -> None:
        self.dropped_markers.append(view.tags[uid])
        tq.kv_clear([uid, *keys], "train")
        for key in (uid, *keys):
            view.tags.pop(key, None)
        self._on_dropped(uid, reason)

    def _without_surplus(self, view: PartitionView, ended: list[str]) -> list[str]:
        """The first kept groups; those beyond the batch would be old by the next step."""
        kept = [uid for uid in ended if uid in self._kept]
        chosen, surplus = kept[: self._wanted], kept[self._wanted :]
        for uid, keys in _keys_of(view, surplus).items():
            self._surplus_rows += len(keys)
            self._drop(view, uid, keys, "algorithm.filter_groups: the batch was full")
        return chosen

    def _too_few(self) -> str:
        seen = "; ".join(f"{count} x {reason}" for reason, count in self._reasons.most_common(3))
        return (
            f"Only {len(self._kept)} of {self._wanted} groups vary in {self.metric} after {self._issued} prompts "
            f"(algorithm.filter_groups). Dropped: {seen}. The task is too hard or too easy for this model: use easier "
            "or harder prompts, more sessions (rollout.n), a finer metric, or raise "
            "algorithm.filter_groups.max_num_gen_batches."
        )


def max_prompts(max_num_gen_batches: int, batch_size: int, prompts_an_epoch: int) -> int:
    """Prompts that a step may ask for; 0: `DEFAULT_GEN_BATCHES` batches, and at least one pass over the data."""
    if max_num_gen_batches > 0:
        return max_num_gen_batches * batch_size
    return max(DEFAULT_GEN_BATCHES * batch_size, prompts_an_epoch)


def _keys_of(view: PartitionView, uids: list[str]) -> dict[str, list[str]]:
    """uid -> its trajectory keys, in order, for each of `uids`."""
    found: dict[str, list[str]] = {uid: [] for uid in uids}
    if uids:
        for key in view.trajectories(set(uids)):
            found[uid_of(key)].append(key)
    return {uid: sorted(keys, key=session_of) for uid, keys in found.items()}
