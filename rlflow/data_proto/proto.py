"""The classes `DataProto` and `DataProtoItem`; the package's docstring says what a batch is."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from rlflow.data_proto import columns, convert, report, rules, settings, union, wire
from rlflow.data_proto.rules import DataProtoError
from rlflow.utils import tensordict_utils as tu

Index = Tensor | np.ndarray | Sequence[int] | Sequence[bool]


@dataclass(eq=False)
class DataProtoItem:
    """One row of a `DataProto`.

    Attributes:
        batch: its tensors without the row dimension; None where the batch has no tensors.
        non_tensor_batch: its objects.
        meta_info: that of the batch, the same dict.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DataProto:
    """A batch of N rows. `DataProto()` has none.

    Slices, chunks and repeats share the `meta_info` dict of the batch that they are made of.

    Attributes:
        batch: tensors [N, ...]; None without tensors.
        non_tensor_batch: arrays [N, ...], mostly of dtype object.
        meta_info: one value each for the whole batch.

    Raises:
        DataProtoError: the parts differ in their number of rows, or are of another type.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    def check_consistency(self) -> None:
        """`DataProtoError` naming keys and sizes unless all parts have one number of rows."""
        rules.check_rows(self.batch, self.non_tensor_batch)

    # ---- building ----------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Of tensors [N, ...], and arrays or lists with one value per row. The arguments are left as they are.

        Args:
            tensors: dense or jagged tensors.
            non_tensors: arrays; lists become one-dimensional arrays of objects.
            meta_info: values for the whole batch.
            num_batch_dims: 1; for rows in groups see `fold_batch_dim`.
            auto_padding: whether calls may pad the batch to divide over their workers.

        Raises:
            DataProtoError: lengths that differ, or a value of another type.
        """
        if num_batch_dims != 1:
            raise DataProtoError(f"num_batch_dims={num_batch_dims}: a batch has one row dimension; see fold_batch_dim")
        arrays = {name: rules.as_column(name, value) for name, value in (non_tensors or {}).items()}
        info = dict(meta_info or {})
        if auto_padding:
            info[settings.DataProtoConfig.auto_padding_key] = True
        return cls(rules.make_batch(tensors or {}), arrays, info)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """`from_dict` of tensors and arrays in one dict. `ValueError` for a value of another type."""
        for name, value in data.items():
            if not isinstance(value, (Tensor, np.ndarray)):
                raise ValueError(f"{name} is a {type(value).__name__}; only tensors and numpy arrays can stand here")
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
        arrays = {name: value for name, value in data.items() if name not in tensors}
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """Tensors to `batch`, one object per row to `non_tensor_batch`, one object for all to `meta_info`.

        Raises:
            DataProtoError: a name is in `meta_info` and for the whole batch in `tensor_dict`, with different values.
        """
        return cls(*convert.parts_of(tensor_dict, meta_info or {}))

    def to_tensordict(self) -> TensorDict:
        """The inverse of `from_tensordict`; arrays of numbers become Python numbers per row.

        Raises:
            DataProtoError: a name stands in two of the three parts.
        """
        return convert.joined(self.batch, self.non_tensor_batch, self.meta_info)

    # ---- files and processes -----------------------------------------------------------------------------------

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write to a file, whole or not at all. `DataProtoError` when it holds objects without a plain form."""
        wire.save(self, Path(filepath))

    @classmethod
    def load_from_disk(cls, filepath: str | Path) -> DataProto:
        """Read what `save_to_disk` wrote. `DataProtoError` for any other file."""
        return cls(*wire.load(Path(filepath)))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return wire.reduce(self, int(protocol))

    # Without these two, copies would go over the bytes too.
    def __copy__(self) -> DataProto:
        return type(self)(self.batch, self.non_tensor_batch, self.meta_info)

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        batch = None if self.batch is None else self.batch.clone()
        return type(self)(batch, copy.deepcopy(self.non_tensor_batch, memo), copy.deepcopy(self.meta_info, memo))

    def to(self, device: Any) -> DataProto:
        """Move the tensors, in place; returns `self`."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # ---- rows --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return len(next(iter(self.non_tensor_batch.values()), ()))

    def __getitem__(self, item: Any) -> Any:
        """An int: `DataProtoItem`; a slice, or a list, array or tensor of rows or of a mask: `DataProto`.

        Raises:
            TypeError: an index of another type.
            IndexError: an int outside the batch.
        """
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
            return self._item(int(item))
        if isinstance(item, (list, tuple, np.ndarray, Tensor)):
            return self.select_idxs(item)
        raise TypeError(
            f"a DataProto has no index of type {type(item).__name__}; use an int, a slice or a list of ints"
        )

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self._item(i) for i in range(len(self)))

    def _item(self, index: int) -> DataProtoItem:
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"row {index} is outside a batch of {size} rows")
        index %= size
        row = None
        if self.batch is not None:
            row = TensorDict({}, batch_size=[], device=self.batch.device)
            for key, value in self.batch.items():
                row.set(key, _row(value, index))
        return DataProtoItem(row, {key: array[index] for key, array in self.non_tensor_batch.items()}, self.meta_info)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows as `list[start:end:step]` has them; without a step, tensors share memory with this batch."""
        rows = range(*slice(start, end, step).indices(len(self)))
        if rows.step != 1:
            return self.select_idxs(list(rows))
        low, high = rows.start, max(rows.start, rows.stop)
        batch = None if self.batch is None else tu.slice_tensordict(self.batch, low, high)
        return self._like(batch, {key: array[low:high] for key, array in self.non_tensor_batch.items()})

    def select_idxs(self, idxs: Index) -> DataProto:
        """Rows by number (repeats and negatives allowed), or by a mask. `ContractError` for one outside the batch."""
        rows = tu.row_index(idxs, len(self)).cpu()
        batch = None if self.batch is None else tu.index_select_tensor_dict(self.batch, rows)
        order = rows.numpy()
        return self._like(batch, {key: array[order] for key, array in self.non_tensor_batch.items()})

    def reorder(self, indices: Index) -> None:
        """Put the rows into the order of `indices`, in place. `DataProtoError` unless each row is in it once."""
        rows = tu.row_index(indices, len(self))
        if rows.sort().values.tolist() != list(range(len(self))):
            raise DataProtoError(f"{len(rows)} indices are no order of {len(self)} rows; select_idxs takes any rows")
        self._take(self.select_idxs(rows))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row `repeat_times` times: row by row (a a b b), or the batch as a whole (a b a b)."""
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | Tensor | np.ndarray) -> DataProto:
        """Row i `repeat_times[i]` times. `DataProtoError` unless there is one count of 0 or more for each row."""
        counts = torch.as_tensor(repeat_times, dtype=torch.int64).cpu()
        if counts.shape != (len(self),) or bool((counts < 0).any()):
            raise DataProtoError(
                f"repeat_times must hold one count of 0 or more for each of {len(self)} rows, got {counts.tolist()}"
            )
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(counts))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Rows [N, n * k] become n rows [N * n, k] under `split_keys`; the other values are repeated n times.

        Raises:
            DataProtoError: no such name, or its second dimension does not divide by n or is jagged.
        """
        return self._like(*columns.unfold(self.batch, self.non_tensor_batch, n_split, split_keys or ()))

    def is_padding_enabled(self) -> bool:
        """Whether calls may pad this batch to divide over their workers."""
        return settings.may_be_padded(self.meta_info)

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append rows, in place: copies of row 0 when `padding_candidate` is "first", else of the last one.

        Raises:
            DataProtoError: the batch has no row.
        """
        size = len(self)
        if not size:
            raise DataProtoError(f"a batch without rows has none to make {padding_size} rows of padding of")
        row = 0 if padding_candidate == "first" else size - 1
        self._take(self.select_idxs([*range(size), *[row] * padding_size]))

    def chunk(self, chunks: int) -> list[DataProto]:
        """`chunks` parts of equal size, in order, sharing memory.

        Where padding is enabled the rows need not divide: as with `torch.chunk` the last part is smaller, or missing.

        Raises:
            DataProtoError: the rows do not divide and padding is not enabled.
        """
        size = len(self)
        if chunks < 1 or (size % chunks and not self.is_padding_enabled()):
            raise DataProtoError(
                f"{size} rows cannot be split into {chunks} equal parts; pad them (pad_dataproto_to_divisor), or let "
                f"calls do it (meta_info[{settings.DataProtoConfig.auto_padding_key!r}]=True)"
            )
        if size % chunks:
            return self.split(-(-size // chunks))
        part = size // chunks
        return [self.slice(i * part, (i + 1) * part) for i in range(chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Parts of `split_size` rows, in order, sharing memory; the last one may be smaller."""
        if split_size < 1:
            raise DataProtoError(f"split_size={split_size} must be at least 1")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Join batches row after row. A value in `meta_info` must be equal in all that have it; see below for metrics.

        `meta_info["metrics"]`, a dict or a list of dicts, becomes one dict of lists.

        Raises:
            DataProtoError: no batches, or a name or value in which they differ.
        """
        if not data:
            raise DataProtoError("no batches to concatenate")
        meta_info = union.concat_meta([part.meta_info for part in data])
        return type(data[0])(*union.concat_columns(data), meta_info)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches as `tensordict_utils.make_iterator` gives them, each row once an epoch; errors as there."""
        orders = tu.mini_batch_rows(len(self), mini_batch_size, epochs, seed, dataloader_kwargs)
        return (self.select_idxs(rows) for rows in orders)

    # ---- names -------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """A batch of the given names (None: all), sharing their values unless `deepcopy`.

        `KeyError` for a tensor that is not there; names of arrays and of `meta_info` that are not there are left out.
        """
        tensors = self._tensors()
        if missing := [key for key in batch_keys or () if key not in tensors]:
            raise KeyError(f"{', '.join(missing)} not in the batch; it has {', '.join(map(str, tensors)) or 'no keys'}")
        batch = None if self.batch is None else tu.get_keys(self.batch, tensors if batch_keys is None else batch_keys)
        arrays = columns.only(self.non_tensor_batch, non_tensor_batch_keys)
        info = columns.only(self.meta_info, meta_info_keys)
        return (
            type(self)(batch, copy.deepcopy(arrays), copy.deepcopy(info))
            if deepcopy
            else self._like(batch, arrays, info)
        )

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Take the given names out of this batch; returns a batch of them.

        Raises:
            DataProtoError: a name that is not there; nothing is taken then.
        """
        wanted = {"batch": batch_keys, "non_tensor_batch": non_tensor_batch_keys, "meta_info": meta_info_keys}
        parts = {"batch": self._tensors(), "non_tensor_batch": self.non_tensor_batch, "meta_info": self.meta_info}
        for where, keys in wanted.items():
            if missing := [key for key in keys or () if key not in parts[where]]:
                has = ", ".join(map(str, parts[where])) or "no keys"
                raise DataProtoError(f"cannot pop {', '.join(missing)}: {where} has {has}")
        batch = tu.pop_keys(self.batch, batch_keys) if self.batch is not None and batch_keys else None
        arrays = {key: self.non_tensor_batch.pop(key) for key in non_tensor_batch_keys or ()}
        return type(self)(batch, arrays, {key: self.meta_info.pop(key) for key in meta_info_keys or ()})

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Give tensors other names, in place; returns `self`.

        Raises:
            TypeError: names that are neither a string nor a list.
            ValueError: more names of one kind than of the other, or a name twice.
            DataProtoError: an old name that is not there, or a new one that is.
        """
        self.batch = columns.rename(self.batch, old_keys, new_keys)
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add what `other` has for the same rows, in place; returns `self`.

        Raises:
            DataProtoError: other row numbers, or a name in both with different values. Nothing is changed then.
        """
        union.unite(self, other)
        return self

    # ---- report ------------------------------------------------------------------------------------------------

    def get_data_info(self) -> str:
        """Names, shapes, dtypes and devices, a line each."""
        return report.describe(self.batch, self.non_tensor_batch, self.meta_info)

    def print_size(self, prefix: str = "") -> None:
        """Log the size of tensors and arrays in GiB."""
        report.log_size(self.batch, self.non_tensor_batch, prefix)

    # ---- inner -------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[Any, Any]:
        return {} if self.batch is None else dict(self.batch.items())

    def _like(
        self, batch: TensorDict | None, arrays: dict[str, np.ndarray], meta_info: dict[str, Any] | None = None
    ) -> DataProto:
        return type(self)(batch, arrays, self.meta_info if meta_info is None else meta_info)

    def _take(self, other: DataProto) -> None:
        self.batch, self.non_tensor_batch = other.batch, other.non_tensor_batch


def _row(value: Any, index: int) -> Any:
    if isinstance(value, NonTensorStack):
        return NonTensorData(tu.unwrap_non_tensor_data(value)[index])
    if isinstance(value, NonTensorData):
        return NonTensorData(value.data)
    return tu.nested_values(tu.nested_narrow(value, index, 1)) if value.is_nested else value[index]
