"""`Partition`: the rows of one partition, their tags, and which block holds which of their fields."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, repeat

from rlflow.transfer_queue.changes import ChangeLog
from rlflow.transfer_queue.fields import FieldState
from rlflow.transfer_queue.rows import Block, Layout, Row, drop_pairs, extended, fields_of, without
from rlflow.transfer_queue.tags import LOST, TagBatch, merge

Freed = list[Block]


@dataclass(slots=True)
class Partition:
    """See the module's docstring.

    Attributes:
        name: its name.
        rows: by key, in the order of their creation.
        fields: what each field is that some row has.
        consumed: for each task the indexes of the rows it has consumed.
        log: what changed when.
        lost: {key: {field: storage unit that lost it}}, for rows that have not got the field again.
        nbytes: bytes of its blocks.
        listed: False after it was dropped, until the next put.
    """

    name: str
    rows: dict[str, Row] = field(default_factory=dict)
    fields: dict[str, FieldState] = field(default_factory=dict)
    consumed: dict[str, set[int]] = field(default_factory=dict)
    log: ChangeLog = field(default_factory=ChangeLog)
    lost: dict[str, dict[str, int]] = field(default_factory=dict)
    nbytes: int = 0
    listed: bool = True

    def find_or_make(self, keys: Sequence[str], first_index: int) -> tuple[list[Row], list[Row]]:
        """The rows of the keys, and those among them that had to be made; these get indexes from `first_index` on."""
        known = self.rows
        found = list(map(known.get, keys))
        if None not in found:
            return found, []  # type: ignore[return-value]
        missing = [key for key, row in dict(zip(keys, found, strict=True)).items() if row is None]
        made = list(map(Row, missing, repeat(self.name), count(first_index)))
        known.update(zip(missing, made, strict=True))
        return made if len(made) == len(keys) else [known[key] for key in keys], made

    @staticmethod
    def merge_tags(rows: Sequence[Row], batch: TagBatch) -> list[int]:
        """Merge tags into those of the rows; returns the numbers of the rows whose tag is another than the given one.

        A row's names and values are replaced, never changed, so a reply or snapshot may hold them.
        """
        differing = []
        for number, (row, names, values) in enumerate(zip(rows, batch.names, batch.values, strict=True)):
            if row.names is names or not row.names:
                row.names, row.values = names, values
                continue
            row.names, row.values = merge(row.names, row.values, names, values)
            if len(row.names) != len(names):
                differing.append(number)
        return differing

    def replace_tags(self, rows: Sequence[Row], batch: TagBatch) -> None:
        """Give the rows these tags instead of theirs; what the table itself says of lost fields stays."""
        for row, names, values in zip(rows, batch.names, batch.values, strict=True):
            row.names, row.values = names, values
            if row.key in self.lost:
                self._mark_lost(row)
        self.log.add(rows)

    def place(self, rows: Sequence[Row], block: Block) -> tuple[Freed, list[Row]]:
        """Let a block provide its fields of these rows: place i of it belongs to row i.

        Returns:
            (blocks that provide nothing any more, rows that got lost fields back).
        """
        names = block.schema.names
        freed: Freed = []
        plans: dict[int, _Plan] = {}
        for place, row in enumerate(rows):
            plan = plans.get(id(row.layout))
            if plan is None:
                plan = plans[id(row.layout)] = _Plan(row.layout, *extended(row.layout, names))
            plan.rows += 1
            parts = row.parts
            if plan.dropped:
                freed += self._release(parts[2 * slot] for slot in plan.dropped)
                parts = drop_pairs(parts, plan.dropped)
            row.layout, row.parts = plan.after, (*parts, block, place)
        block.live = len(rows)
        self.nbytes += block.nbytes
        for name, dtype in zip(names, block.schema.dtypes, strict=True):
            self.fields.setdefault(name, FieldState(dtype)).cells += len(rows)
        for plan in plans.values():
            self._uncount(fields_of(plan.before).intersection(names), plan.rows)
        return freed, self._recover(rows, names) if self.lost else []

    def _release(self, blocks: Iterable[Block | int]) -> Freed:
        freed = []
        for block in blocks:
            assert isinstance(block, Block), "parts alternate block and place"
            block.live -= 1
            if block.live == 0:
                self.nbytes -= block.nbytes
                freed.append(block)
        return freed

    def _uncount(self, names: Iterable[str], rows: int) -> None:
        for name in names:
            state = self.fields[name]
            state.cells -= rows
            if state.cells == 0:
                del self.fields[name]

    def remove(self, keys: Iterable[str]) -> tuple[list[Row], Freed]:
        """Delete rows, whatever they have; unknown keys are ignored. Returns the rows, and the blocks to free."""
        gone: list[Row] = []
        freed: Freed = []
        plans: dict[int, _Plan] = {}
        for key in keys:
            row = self.rows.pop(key, None)
            if row is None:
                continue
            gone.append(row)
            plan = plans.get(id(row.layout))
            if plan is None:
                plan = plans[id(row.layout)] = _Plan(row.layout, (), ())
            plan.rows += 1
            freed += self._release(row.parts[::2])
            # The log remembers the row for a while: only its key.
            row.alive, row.names, row.values, row.layout, row.parts = False, (), (), (), ()
        for plan in plans.values():
            self._uncount(fields_of(plan.before), plan.rows)
        indexes = [row.index for row in gone]
        for consumed in self.consumed.values():
            consumed.difference_update(indexes)
        for row in gone if self.lost else ():
            self.lost.pop(row.key, None)
        self.log.add_deleted(gone)
        return gone, freed

    # -- lost storage ------------------------------------------------------------------------------

    def lose(self, blocks: Collection[Block], unit: int) -> None:
        """Drop the cells of these blocks, of one storage unit; the rows concerned say so in their tag."""
        changed: list[Row] = []
        met: set[Block] = set()
        for row in self.rows.values():
            mine = row.parts[::2]
            slots = [slot for slot, block in enumerate(mine) if block in blocks]
            if not slots:
                continue
            met.update(mine[slot] for slot in slots)  # type: ignore[misc]
            gone = frozenset(name for slot in slots for name in row.layout[slot])
            self._uncount(gone, 1)
            row.layout, dropped = without(row.layout, gone)
            row.parts = drop_pairs(row.parts, dropped)
            self.lost.setdefault(row.key, {}).update(dict.fromkeys(gone, unit))
            self._mark_lost(row)
            changed.append(row)
        self.nbytes -= sum(block.nbytes for block in met)
        self.log.add(changed)

    def _recover(self, rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
        recovered = []
        for row in rows:
            lost = self.lost.get(row.key)
            if lost is None or lost.keys().isdisjoint(names):
                continue
            for name in names:
                lost.pop(name, None)
            if not lost:
                del self.lost[row.key]
            self._mark_lost(row)
            recovered.append(row)
        return recovered

    def _mark_lost(self, row: Row) -> None:
        tag, lost = row.tag, self.lost.get(row.key)
        tag.pop(LOST, None)
        if lost:
            tag[LOST] = sorted(lost)
        batch = TagBatch.of([tag])
        row.names, row.values = batch.names[0], batch.values[0]


@dataclass(slots=True)
class _Plan:
    """What a call does to all rows of one layout."""

    before: Layout
    after: Layout
    dropped: tuple[int, ...]
    rows: int = 0


def layouts_of(rows: Iterable[Row]) -> list[Layout]:
    """The different layouts of some rows."""
    layouts = [row.layout for row in rows]
    if layouts and layouts.count(layouts[0]) == len(layouts):
        return layouts[:1]
    return list({id(layout): layout for layout in layouts}.values())


def common_fields(rows: Iterable[Row]) -> frozenset[str]:
    """The fields that all rows have."""
    return frozenset.intersection(*map(fields_of, layouts_of(rows))) if rows else frozenset()
