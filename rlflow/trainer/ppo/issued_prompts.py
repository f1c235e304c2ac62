"""The prompts that are out, kept so that they can start again when their rows are lost.

A storage unit that dies takes the rows it held with it. The TransferQueue marks what is left of such a row with the tag
`tq_lost`; `LostGroups` finds the prompts concerned, and the trainer issues them again from what `IssuedPrompts` kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import rlflow.transfer_queue as tq
from rlflow.trainer.ppo.replay_buffer import PartitionView, uid_of
from rlflow.transfer_queue.tags import LOST as LOST_TAG
from rlflow.utils import tensordict_utils as tu


class IssuedPrompts:
    """Rows of the batches that were handed to the agent loops, by uid."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Any, int]] = {}

    def add(self, batch: Any, uids: Sequence[str]) -> None:
        """Keep the prompts of a batch: row i is `uids[i]`."""
        self._places.update({uid: (batch, row) for row, uid in enumerate(uids)})

    def forget(self, uids: Iterable[str]) -> None:
        """These prompts will not be needed again."""
        for uid in uids:
            self._places.pop(uid, None)

    def batches(self, uids: Iterable[str]) -> list[Any]:
        """The prompts as parts of the batches they came in."""
        rows: dict[int, tuple[Any, list[int]]] = {}
        for uid in uids:
            batch, row = self._places[uid]
            rows.setdefault(id(batch), (batch, []))[1].append(row)
        return [tu.index_select_tensor_dict(batch, places) for batch, places in rows.values()]


class LostGroups:
    """Prompts of one partition with a lost row, issued again once all their sessions have ended.

    A prompt whose sessions still run is left alone until then: its agent loop would write into the new attempt.

    Args:
        reissue: called with (partition, uids); their rows are gone from the table by then.
    """

    def __init__(self, reissue: Callable[[str, list[str]], None]) -> None:
        self._reissue = reissue
        self._uids: set[str] = set()

    def observe(self, changes: Mapping[str, Mapping[str, Any] | None]) -> None:
        """Note the prompts of rows that were lost."""
        self._uids.update(uid_of(key) for key, tag in changes.items() if tag is not None and tag.get(LOST_TAG))

    def restart(self, view: PartitionView, ended: Sequence[str]) -> list[str]:
        """Issue the ended ones of them again.

        Args:
            view: tags of the partition; what is lost is taken out of it.
            ended: prompts whose sessions all ended.

        Returns:
            Their uids: they have not ended after all.
        """
        again = [uid for uid in ended if uid in self._uids]
        if again:
            keys = [*again, *view.trajectories(set(again))]
            tq.kv_clear(keys, view.partition_id)
            for key in keys:
                view.tags.pop(key, None)
            self._uids.difference_update(again)
            self._reissue(view.partition_id, again)
        return again
