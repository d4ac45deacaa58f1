"""Process sets under the name of Horovod's module."""

from headway.horovod.basics import (
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    process_set_by_id,
    remove_process_set,
)
from headway.horovod.engine.process_set import ProcessSet

__all__ = [
    "ProcessSet",
    "add_process_set",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "process_set_by_id",
    "remove_process_set",
]
