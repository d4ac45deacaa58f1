"""Exceptions of Horovod's interface, under the names that programs catch."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """An operation failed: ranks disagree about it, one of them is lost, or none came in time.

    `elastic.run` restores the last commit and begins anew.
    """


class InvalidArgument(HorovodInternalError, ValueError):
    """An argument of some rank is wrong, whatever the others do.

    Horovod raises `ValueError` for some of these and `HorovodInternalError` for others; programs
    may catch either. `elastic.run` passes it on, because another attempt would end alike.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """The set of ranks is to change; raised by `State.commit` and `State.check_host_updates`.

    Args:
        skip_sync: The state is the same on all ranks that stay, so that none has to be sent.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the ranks of this job are about to change")
        self.skip_sync = skip_sync


class RankRemoved(SystemExit):
    """The elastic job goes on without this process, which ends with status 0."""

    def __init__(self) -> None:
        super().__init__(0)
