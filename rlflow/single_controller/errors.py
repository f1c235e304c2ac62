"""The error of a remote call that failed."""

from __future__ import annotations

from rlflow.utils.errors import RlflowError


class WorkerError(RlflowError):
    """A worker raised, or its process died, during a call.

    Attributes:
        rank: rank of the worker in its group.
        role: role whose method was called.
        method: name of that method.
        died: true when the process is gone, false when the method raised (the worker can take further calls).
        remote_traceback: the traceback in the worker, or Ray's account of the death.

    `__cause__` is what Ray raised; for an exception of the method it is also an instance of that exception's class.
    """

    def __init__(
        self,
        message: str,
        rank: int = -1,
        role: str = "",
        method: str = "",
        died: bool = False,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.role = role
        self.method = method
        self.died = died
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle by their args alone; this one crosses processes (a trainer actor raises it to its launcher).
        fields = (str(self), self.rank, self.role, self.method, self.died, self.remote_traceback)
        return (type(self), fields)
