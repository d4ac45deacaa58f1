"""pure: the bytes that compressors hand to the network, against figures worked out by hand."""

from __future__ import annotations

import pytest

from headway.collective.compression import (
    COMPRESSORS,
    Payload,
    TopKCompression,
    blocks_per_rank,
    is_dense,
    kept_elements,
    low_rank_pays,
    matrix_shape,
    parse_compression,
    sign_bytes_per_rank,
)

MIB25 = [(512, 512)] * 25
"""25 MiB of float32."""


def num_bytes(text: str, shapes, itemsize: int, ranks: int, **options) -> int:
    payloads = parse_compression(text).payloads(shapes, itemsize, ranks, **options)
    return sum(payload.num_bytes for payload in payloads)


def test_what_is_sent_whole():
    assert is_dense((10_000,))
    assert is_dense((31, 33))
    assert not is_dense((32, 32))
    assert is_dense(())
    assert matrix_shape((8, 4, 3, 3)) == (8, 36)
    # (40 + 40) * 2 * 10 = 1600: not half of 1600, but all of it.
    assert low_rank_pays((40, 40), 9)
    assert not low_rank_pays((40, 40), 10)
    assert not low_rank_pays((10_000,), 1)


def test_a_density_keeps_at_least_one_and_rounds_up():
    assert kept_elements(1000, 0.01) == 10
    assert kept_elements(1001, 0.01) == 11
    assert kept_elements(5, 0.0001) == 1
    assert kept_elements(700, 1.0) == 700


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_model_of_the_specification(ranks):
    """d = 6,553,600 float32: 1 % is d * 8 bytes * 0.01, fp16 halves, sign divides by 32."""
    d = 25 * 512 * 512
    assert num_bytes("none", MIB25, 4, ranks, flags=False) == 4 * d
    assert num_bytes("fp16", MIB25, 4, ranks, flags=False) == 2 * d
    sparse = num_bytes("topk:0.01", MIB25, 4, ranks, flags=False)
    assert sparse == pytest.approx(0.08 * d, rel=0.001)
    assert num_bytes("adaptive:0.01", MIB25, 4, ranks) == num_bytes("mstopk:0.01", MIB25, 4, ranks)
    low_rank = num_bytes("powersgd:2", MIB25, 4, ranks, flags=False)
    assert low_rank == 25 * 2 * (512 + 512) * 4


def test_two_ranks_gather_and_more_scatter():
    d = 25 * 512 * 512
    assert parse_compression("int8").payloads(MIB25, 4, 2) == (
        Payload("all_reduce", 25 * 4),
        Payload("all_gather", d // 256 * 260),
    )
    part = -(-d // 256 // 4) * 260
    assert parse_compression("int8").payloads(MIB25, 4, 4, flags=False) == (
        Payload("all_to_all", 4 * part),
        Payload("all_gather", part),
    )
    assert parse_compression("sign").payloads(MIB25, 4, 2, flags=False) == (
        Payload("all_gather", d // 8 + 25 * 4),
    )
    assert parse_compression("sign").payloads(MIB25, 4, 4, flags=False) == (
        Payload("all_to_all", 4 * (d // 32 + 100)),
        Payload("all_gather", d // 32 + 100),
    )
    assert blocks_per_rank(257, 2) == 2
    assert blocks_per_rank(257, 4) == 1
    assert sign_bytes_per_rank([9, 8], 2) == 4  # 2 bytes and 1, in words of 4


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_a_bucket_without_matrices_is_one_sum(compressor):
    """Of 16-bit gradients, too, which PowerSGD widens where it computes."""
    amount = "" if COMPRESSORS[compressor].amount_kind == "none" else ":1"
    found = parse_compression(compressor + amount).payloads([(100,), (10, 10)], 2, 3)
    if compressor == "int8":
        assert [part.operation for part in found] == ["all_reduce", "all_to_all", "all_gather"]
    else:
        assert found == (Payload("all_reduce", 202 * 2),)


def test_rows_of_payloads_are_aligned():
    for itemsize in (2, 4, 8):
        for density in (0.001, 0.0137, 0.5):
            (row,) = TopKCompression(amount=density).payloads([(37, 41)], itemsize, 2, flags=False)
            count = kept_elements(37 * 41, density)
            assert row.num_bytes % 8 == 0
            assert 0 <= row.num_bytes - count * (itemsize + 4) < 8
