"""Wait for finished prompt groups and hand out their trajectories.

Invariants
    - `sample` wakes on changes of the TransferQueue partition; it never polls, and metadata cost is per change.
    - Groups come back whole, oldest submission first; rows of a group in (session, index) order. The result depends
      only on what was submitted, not on the order in which sessions happened to end.
    - After `sample` the prompt markers of the returned groups are gone; their trajectories stay until the
      trainer clears them.
    - A group that lost a row with a storage unit is not returned: its prompt is issued again.

Lifecycle of a prompt marker:  pending -> running -> finished | failure -> (sampled: deleted)
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import rlflow.transfer_queue as tq
from rlflow.transfer_queue import KVBatchMeta, StorageUnitLostError, WatchGapError
from rlflow.utils.errors import ContractError, DeadlineError

if TYPE_CHECKING:
    from rlflow.trainer.ppo.group_filter import GroupFilter
    from rlflow.trainer.ppo.issued_prompts import LostGroups

logger = logging.getLogger(__name__)

ENDED = ("finished", "failure")
STATUSES = ("pending", "running", *ENDED)
WAKE_EVERY_S = 5.0


def uid_of(key: str) -> str:
    """The prompt of a trajectory key `{uid}_{session}_{index}`."""
    return key.rsplit("_", 2)[0]


def session_of(key: str) -> tuple[str, int, int]:
    """(uid, session, index) of a trajectory key."""
    uid, session, index = key.rsplit("_", 2)
    return uid, int(session), int(index)


def final_outputs(keys: list[str]) -> list[int]:
    """Positions of the last output (largest index) of each session, ascending."""
    last: dict[tuple[str, int], tuple[int, int]] = {}
    for position, key in enumerate(keys):
        uid, session, index = session_of(key)
        last[uid, session] = max(last.get((uid, session), (-1, -1)), (index, position))
    return sorted(position for _, position in last.values())


def natural_order(uid: str) -> list[tuple[int, str]]:
    """Sort key in which `e0r10a0` comes after `e0r9a0`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", uid) if part]


class PartitionView:
    """A local copy of one partition's tags, kept current by its changes."""

    def __init__(self, partition_id: str) -> None:
        self.partition_id = partition_id
        self.version = 0
        self.tags: dict[str, dict[str, Any]] = {}

    def wait(self, timeout_s: float) -> dict[str, dict[str, Any] | None]:
        """Wait until the partition changes, at most `timeout_s`; what changed (None: deleted), empty when nothing."""
        try:
            self.version, changes = tq.kv_watch(self.partition_id, self.version, timeout_s=timeout_s)
        except WatchGapError:
            # This view is so far behind that deletions are forgotten: look at everything there is now.
            self.version, changes = tq.kv_watch(self.partition_id, 0, timeout_s=0.0)
            changes = {**dict.fromkeys(self.tags), **changes}
        for key, tag in changes.items():
            if tag is None:
                self.tags.pop(key, None)
            else:
                self.tags[key] = tag
        return changes

    def markers(self) -> dict[str, dict[str, Any]]:
        """Uid -> tag of every prompt in the partition."""
        return {key: tag for key, tag in self.tags.items() if tag.get("is_prompt")}

    def trajectories(self, uids: set[str]) -> list[str]:
        """Trajectory keys of these prompts."""
        return [key for key, tag in self.tags.items() if not tag.get("is_prompt") and uid_of(key) in uids]


class ReplayBuffer:
    """The sync trainer's view of running and finished prompts.

    Args:
        trainer_mode: name of the trainer mode.
        trainer_config: the mode's own block of `trainer.v1`.
        max_off_policy_threshold, max_off_policy_strategy: bounds of the async modes, unused here.
        sampler_kwargs: keyword arguments for custom classes.
        refill_fn: submits so many more train prompts of the current step; for custom classes, the filter has its own.
        stall_timeout_s: seconds without any change before `sample` gives up.
        describe_stall: returns lines about what is running, for the stall report.
        on_progress: called with (finished, wanted) prompt groups while waiting.
        on_ended: called with (partition, uid, marker tag) when a prompt was seen to end, maybe more than once.
        group_filter: drops train groups without a signal and asks for others.
        lost_groups: has prompts issued again whose rows were lost.
    """

    def __init__(
        self,
        trainer_mode: str = "sync",
        trainer_config: Any = None,
        max_off_policy_threshold: int = 8,
        max_off_policy_strategy: str = "drop",
        sampler_kwargs: dict[str, Any] | None = None,
        refill_fn: Callable[[int], None] | None = None,
        *,
        stall_timeout_s: float = 600.0,
        describe_stall: Callable[[], list[str]] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        on_ended: Callable[[str, str, dict[str, Any]], None] | None = None,
        group_filter: GroupFilter | None = None,
        lost_groups: LostGroups | None = None,
    ) -> None:
        self.trainer_mode = trainer_mode
        self.stall_timeout_s = stall_timeout_s
        self._describe_stall = describe_stall
        self._on_progress = on_progress
        self._on_ended = on_ended
        self._group_filter = group_filter
        self._lost_groups = lost_groups
        self._views: dict[str, PartitionView] = {}

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Wait for `batch_size` ended prompt groups and return all their trajectories.

        Returns:
            (meta of the trajectories with their tags and `fields=None`, sampling metrics).

        Raises:
            DeadlineError: nothing changed for `stall_timeout_s`.
            ContractError: no group left any trajectory, or a marker has an unknown status.
            RewardError: the group filter cannot judge a group, or found too few with a signal.
        """
        view = self._views.setdefault(partition_id, PartitionView(partition_id))
        sieve = self._group_filter if partition_id == "train" else None
        if sieve is not None:
            sieve.begin(batch_size)
        selected = self._wait_for_groups(view, global_steps, partition_id, batch_size, sieve)
        chosen = set(selected)
        order = {uid: position for position, uid in enumerate(selected)}
        keys = sorted(view.trajectories(chosen), key=lambda key: (order[uid_of(key)], session_of(key)[1:]))
        markers = view.markers()
        prefix = "training" if partition_id == "train" else "validation"
        seen = [markers[uid] for uid in selected]
        metrics = self._failure_metrics(prefix, seen if sieve is None else [*seen, *sieve.dropped_markers])
        if sieve is not None:
            metrics |= sieve.metrics()
        if not keys:
            reasons = sorted({str(markers[uid].get("failed", "unknown reason")) for uid in selected})
            raise ContractError(
                f"None of the {len(selected)} sampled prompts of step {global_steps} has a trajectory: every session "
                f"failed. First reasons: {'; '.join(reasons[:3])}. Look at the agent-loop workers' log."
            )
        tags = [view.tags[key] for key in keys]
        tq.kv_clear(selected, partition_id)
        for uid in selected:
            view.tags.pop(uid, None)
        return KVBatchMeta(keys=keys, tags=tags, partition_id=partition_id, fields=None), metrics

    def _wait_for_groups(
        self, view: PartitionView, global_steps: int, partition_id: str, batch_size: int, sieve: GroupFilter | None
    ) -> list[str]:
        last_change = time.monotonic()
        while True:
            ended = self._without_lost(view, self._ended(view), sieve)
            if sieve is None:
                groups = ended[:batch_size] if len(ended) >= batch_size else None
            else:
                groups = self._sifted(sieve, view, ended)
            if self._on_progress is not None:
                self._on_progress(min(len(ended) if sieve is None else sieve.kept, batch_size), batch_size)
            if groups is not None:
                return groups
            changes = view.wait(timeout_s=min(WAKE_EVERY_S, self.stall_timeout_s))
            if changes:
                last_change = time.monotonic()
                if self._lost_groups is not None:
                    self._lost_groups.observe(changes)
                self._report_ended(partition_id, changes)
                continue
            # The report also asks the agent workers for a sign of life, so that their death ends the run here.
            running = self._describe_stall() if self._describe_stall is not None else []
            quiet = time.monotonic() - last_change
            if quiet >= self.stall_timeout_s:
                raise DeadlineError(self._stall_report(view, global_steps, partition_id, batch_size, quiet, running))

    def _ended(self, view: PartitionView) -> list[str]:
        """Ended prompts, oldest submission first; equal steps in the order of their names."""
        ended: list[tuple[int, list[tuple[int, str]], str]] = []
        for uid, tag in view.markers().items():
            if tag.get("status") not in STATUSES:
                raise ContractError(
                    f"prompt {uid} has status {tag.get('status')!r}; known: {', '.join(STATUSES)}. A custom agent-loop "
                    "manager must write one of these."
                )
            if tag["status"] in ENDED:
                ended.append((tag.get("global_steps", 0), natural_order(uid), uid))
        return [uid for _, _, uid in sorted(ended)]

    def _without_lost(self, view: PartitionView, ended: list[str], sieve: GroupFilter | None) -> list[str]:
        if self._lost_groups is None:
            return ended
        again = self._lost_groups.restart(view, ended)
        if again and sieve is not None:
            sieve.reissued(again)
        return [uid for uid in ended if uid not in again]

    def _sifted(self, sieve: GroupFilter, view: PartitionView, ended: list[str]) -> list[str] | None:
        try:
            return sieve.sift(view, ended)
        except StorageUnitLostError:
            if self._lost_groups is None:
                raise
            return None  # lost since the view was taken: the next change tells which prompts start again

    def _report_ended(self, partition_id: str, changes: dict[str, dict[str, Any] | None]) -> None:
        if self._on_ended is None:
            return
        for uid, tag in changes.items():
            if tag is not None and tag.get("is_prompt") and tag.get("status") in ENDED:
                self._on_ended(partition_id, uid, tag)

    @staticmethod
    def _failure_metrics(prefix: str, markers: list[dict[str, Any]]) -> dict[str, Any]:
        failed = [tag for tag in markers if tag["status"] == "failure"]
        if not failed:
            return {}
        sessions = sum(int(tag.get("failed_sessions", 1)) for tag in failed)
        return {f"{prefix}/rollout_failure/groups": len(failed), f"{prefix}/rollout_failure/sessions": sessions}

    def _stall_report(
        self, view: PartitionView, step: int, partition_id: str, wanted: int, quiet: float, running: list[str]
    ) -> str:
        ended = len(self._ended(view))
        lines = [
            f"Stalled {quiet:.0f} s in `sample` (step {step}, partition {partition_id}): "
            f"{ended} of {wanted} prompt groups finished.",
            *(f"    {line}" for line in running),
            "    next:  the run ends (trainer.stall_timeout_s); look at the rollout server's and agent workers' logs",
        ]
        return "\n".join(lines)
