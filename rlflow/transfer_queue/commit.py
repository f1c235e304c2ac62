"""What a put sends to the controller once its block is written, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.transfer_queue.column import FieldHead
from rlflow.transfer_queue.rows import Extent
from rlflow.transfer_queue.tags import Tag, unpack_batch


@dataclass(slots=True)
class BlockHead:
    """What a put wrote: the commit that makes it visible.

    Attributes:
        unit: the storage unit that holds the block.
        block_id: "{writer}:{number}", unique in the table.
        fields: what each column is.
        extent: where the backend keeps it; None when the id is enough to find it.
        nbytes: bytes of its columns.
        writer: who wrote it, for the lineage.
    """

    unit: int
    block_id: str
    fields: dict[str, FieldHead]
    extent: Extent | None = None
    nbytes: int = 0
    writer: str = ""


@dataclass(slots=True)
class PutReply:
    """The put's rows after the commit.

    Attributes:
        differing: numbers of the rows whose tag is another than the one that was put.
        packed: the tags of these rows.
        fields: the fields that all rows have, sorted.
    """

    differing: list[int]
    packed: bytes
    fields: list[str]

    def merged(self, sent: list[Tag]) -> list[Tag]:
        """The tags of all rows: `sent`, which is the caller's to give away, with the differing ones replaced."""
        if not self.differing:
            return sent
        for number, tag in zip(self.differing, unpack_batch(self.packed).dicts(), strict=True):
            sent[number] = tag
        return sent
