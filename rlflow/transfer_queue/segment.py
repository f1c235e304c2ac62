"""Segments: the shared memory that blocks are written to and read from without passing through a message.

A segment is an anonymous file in memory (`memfd`) of a storage unit. It has no name in any directory: processes of the
same machine open it through `/proc/<unit's pid>/fd/<number>`. So it needs no folder, is not bound by the size of
/dev/shm, and is gone when the last process that has it open is gone, however that ends.

    header (4096 bytes): magic, nonce of the unit, number of the segment, serial | blocks

    serial   a number that the unit gives to a segment each time it is used anew; 0: not in use

Invariants
    - Whoever reads holds a shared `flock` on its open file, and so does the memory it has mapped: the lock ends with
      the last view. The unit uses a segment anew only under an exclusive lock, and changes the serial before that.
      So a reader that finds the serial it looks for, under its lock, keeps what it sees for as long as it looks.
    - Pages are reserved when a segment is made, so touching them cannot fail later.
    - Readers map a segment copy-on-write. They may change what they got; nobody else sees it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from typing import NamedTuple

import numpy as np

HEADER_BYTES = 4096
_HEADER = struct.Struct("<8s16sQQ")
_MAGIC = b"TQSEG\0\0\1"
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK  # a reused number may be a pipe, whose opening would wait


class UnitAddress(NamedTuple):
    """Where the segments of a storage unit are: valid on its node, for processes that see its /proc entry."""

    node: str
    pid: int
    nonce: bytes


class SegmentGoneError(Exception):
    """What was looked for is no longer there; the controller knows what has become of the cells."""


class Segment:
    """A segment in the process of the unit that owns it.

    Args:
        nonce: 16 random bytes of the unit.
        number: the segment's number, never used twice by a unit.
        nbytes: room for blocks.

    Raises:
        OSError: the memory is not to be had.
    """

    def __init__(self, nonce: bytes, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.serial = 0
        self._nonce = nonce
        self.fd = os.memfd_create(f"transfer-queue-{number}", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, HEADER_BYTES + nbytes)
            self._map = mmap.mmap(self.fd, HEADER_BYTES + nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        self._write_header()

    def _write_header(self) -> None:
        _HEADER.pack_into(self._map, 0, _MAGIC, self._nonce, self.number, self.serial)

    def start(self, serial: int) -> None:
        """Begin a new use."""
        self.serial = serial
        self._write_header()

    def retire(self) -> bool:
        """End the use; False while somebody still holds views."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self.start(0)
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return True

    def bytes_at(self, offset: int, nbytes: int) -> np.ndarray:
        """uint8 view of the segment's memory; writing there writes the segment."""
        return np.frombuffer(self._map, np.uint8, nbytes, offset)

    def close(self) -> None:
        """Give the memory back, also where other processes still have the segment mapped for later writing."""
        with contextlib.suppress(BufferError):  # a view of this process is alive; it keeps the mapping, not the pages
            self._map.close()
        os.ftruncate(self.fd, 0)
        os.close(self.fd)


def _open(address: UnitAddress, fd: int) -> int:
    try:
        return os.open(f"/proc/{address.pid}/fd/{fd}", _OPEN)
    except OSError as error:
        raise SegmentGoneError(str(error)) from error


def _check(opened: int, address: UnitAddress, serial: int, number: int | None = None) -> None:
    try:
        header = os.pread(opened, _HEADER.size, 0)
    except OSError as error:
        raise SegmentGoneError(str(error)) from error
    if len(header) < _HEADER.size:
        raise SegmentGoneError("this file is too short for a segment")
    magic, nonce, found, used = _HEADER.unpack(header)
    if (magic, nonce, used) != (_MAGIC, address.nonce, serial) or number not in (None, found):
        raise SegmentGoneError(f"the segment is used anew ({used}, not {serial}), or is another one")


def map_for_reading(address: UnitAddress, fd: int, serial: int) -> np.ndarray:
    """The whole segment copy-on-write, uint8; the unit cannot use it anew while the array or a view of it lives.

    Raises:
        SegmentGoneError: this use of the segment is over, or the unit's memory is not visible from here.
    """
    opened = _open(address, fd)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            # Only the unit locks exclusively, and only what no cell lies in any more.
            raise SegmentGoneError("the segment is being freed") from error
        _check(opened, address, serial)
        # The mapping keeps a duplicate of the descriptor, and with it the lock.
        return np.frombuffer(mmap.mmap(opened, 0, access=mmap.ACCESS_COPY), np.uint8)
    except (OSError, ValueError) as error:
        raise SegmentGoneError(str(error)) from error
    finally:
        os.close(opened)


def map_for_writing(address: UnitAddress, fd: int, number: int, serial: int) -> mmap.mmap:
    """The whole segment, shared, with all its pages; for the process that the unit has lent it to.

    Args:
        address: the unit.
        fd, number, serial: the segment and its use.

    Raises:
        SegmentGoneError: the segment is not the one that was lent, or the unit's memory is not visible from here.
    """
    opened = _open(address, fd)
    try:
        _check(opened, address, serial, number)
        # All pages at once are cheaper than one by one at the first writing.
        return mmap.mmap(opened, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except (OSError, ValueError) as error:
        raise SegmentGoneError(str(error)) from error
    finally:
        os.close(opened)
