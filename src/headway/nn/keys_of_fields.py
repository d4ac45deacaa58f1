"""Ids of several fields as keys of one table."""

from __future__ import annotations

from torch import Tensor

from headway.errors import DataError, UsageError
from headway.nn.dynamic_table import checked_keys


def field_keys(ids: Tensor, field: int, *, bits: int = 8) -> Tensor:
    """Keys for the ids of a field, other ones than those of any other field.

    The number of the field takes the upper bits of the key, and the id the others; it may be
    negative. Tables that fields share need no further care.

    Args:
        ids: Of any shape, int64 or int32.
        field: From 0 to 2^bits - 1.
        bits: For the number of the field, from 1 to 62; the same for all fields of a table.

    Returns:
        int64, as `ids`.

    Raises:
        UsageError: `field` or `bits` is outside of its range.
        DataError: Ids are no integers, or one of them has more than 64 - bits bits, so that its key
            would be that of another field.
    """
    if not 1 <= bits <= 62 or not 0 <= field < 1 << bits:
        raise UsageError(
            f"headway.nn.field_keys: field {field} with {bits} bits",
            why="There may be 1 to 62 bits, and fields are numbered from 0 to 2^bits - 1.",
        )
    values, room = checked_keys(ids), 64 - bits
    half = 1 << (room - 1)
    wrong = (values < -half) | (values >= half)
    if bool(wrong.any()):
        raise DataError(
            f"id {int(values[wrong][0])} of field {field} has more than {room} bits",
            why=f"With {bits} bits for the field its key would be one of another field's.",
            fix="Take fewer bits for fields, hash the ids into what is left, or give the field a "
            "table of its own.",
        )
    prefix = field << room
    return (values & ((1 << room) - 1)) | (prefix - (1 << 64) if prefix >> 63 else prefix)
