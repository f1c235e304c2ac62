"""Waiting for changes: `kv_watch`, `kv_wait`, and their short forms `watch` and `wait`. `api` says what all share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlflow.transfer_queue.calls import run, run_sync
from rlflow.transfer_queue.predicate import Predicate
from rlflow.transfer_queue.tags import Tag


async def async_kv_watch(
    partition_id: str, since_version: int = 0, timeout_s: float = 60.0
) -> tuple[int, dict[str, Tag | None]]:
    """What changed in a partition since a version; sleeps until something has.

    New keys, tag puts and deletions are changes; a put of data into existing rows is none.

    Args:
        partition_id: the partition; need not exist yet.
        since_version: the version returned by the previous call; 0: everything there is.
        timeout_s: seconds to sleep at most.

    Returns:
        (version, {key: tag, or None if the key was deleted}); the dict is empty when `timeout_s` ran out.

    Raises:
        WatchGapError: the watcher is too far behind (or the table is another one): start again from 0.
    """
    return await run(lambda client: client.async_watch(partition_id, since_version, timeout_s))


async def async_kv_wait(
    partition_id: str,
    *,
    keys: Sequence[str] | None = None,
    predicate: Predicate,
    since_version: int = 0,
    timeout_s: float,
) -> tuple[int, dict[str, Tag]]:
    """Sleep until enough keys match.

    Args:
        partition_id: the partition; need not exist yet.
        keys: the keys that count; None: all of the partition.
        predicate: which tags match, and how many keys must.
        since_version: only keys changed after this version count; 0: all.
        timeout_s: seconds to sleep at most.

    Returns:
        (version, {matching key: tag}).

    Raises:
        DeadlineError: too few keys matched in time; names the partition and the keys that were missing.
    """
    return await run(lambda client: client.async_wait(partition_id, keys, predicate, since_version, timeout_s))


def kv_watch(partition_id: str, since_version: int = 0, timeout_s: float = 60.0) -> tuple[int, dict[str, Tag | None]]:
    """Sync form of `async_kv_watch`."""
    return run_sync(lambda client: client.async_watch(partition_id, since_version, timeout_s))


def kv_wait(
    partition_id: str,
    *,
    keys: Sequence[str] | None = None,
    predicate: Predicate,
    since_version: int = 0,
    timeout_s: float,
) -> tuple[int, dict[str, Tag]]:
    """Sync form of `async_kv_wait`."""
    return run_sync(lambda client: client.async_wait(partition_id, keys, predicate, since_version, timeout_s))


async def async_watch(
    partition_id: str, since_version: int = 0, timeout: float = 60.0
) -> tuple[int, dict[str, Tag | None]]:
    """Short form of `async_kv_watch`."""
    return await async_kv_watch(partition_id, since_version, timeout)


async def async_wait(
    partition_id: str, predicate: Predicate | Any, count: int | None = None, timeout: float = 60.0
) -> dict[str, Tag]:
    """Sleep until `count` keys of a partition match: the short form of `async_kv_wait`.

    Args:
        partition_id: the partition; need not exist yet.
        predicate: a `Predicate`, or the value or values of the tag entry "status" that count.
        count: how many keys must match; None: as the predicate says, else 1.
        timeout: seconds to sleep at most.

    Returns:
        {matching key: tag}.

    Raises:
        DeadlineError: see `async_kv_wait`.
    """
    _, matching = await async_kv_wait(partition_id, predicate=_counted(predicate, count), timeout_s=timeout)
    return matching


def watch(partition_id: str, since_version: int = 0, timeout: float = 60.0) -> tuple[int, dict[str, Tag | None]]:
    """Sync form of `async_watch`."""
    return kv_watch(partition_id, since_version, timeout)


def wait(
    partition_id: str, predicate: Predicate | Any, count: int | None = None, timeout: float = 60.0
) -> dict[str, Tag]:
    """Sync form of `async_wait`."""
    return kv_wait(partition_id, predicate=_counted(predicate, count), timeout_s=timeout)[1]


def _counted(predicate: Predicate | Any, count: int | None) -> Predicate:
    if not isinstance(predicate, Predicate):
        return Predicate(predicate, 1 if count is None else count)
    if count is None:
        return predicate if predicate.count is not None else replace(predicate, count=1)
    return replace(predicate, count=count)
