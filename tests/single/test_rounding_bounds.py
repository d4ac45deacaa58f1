"""single: bounds of rounding excuse another order of sums and nothing that is wrong."""

from __future__ import annotations

import numpy as np
import torch

from headway.verification.exchange_recording import RecordedBucket
from headway.verification.reference.exchanges import BucketInputs
from headway.verification.reference.rounding import expected_sums, sent_and_kept, share_bound

SHAPES = ((64, 32), (32,))
SIZE = 64 * 32 + 32


def rows(dtype, ranks=2):
    draw = torch.Generator().manual_seed(4)
    sizes = torch.linspace(0.1, 3.0, ranks)
    return [(torch.randn(SIZE, generator=draw) * size).to(dtype) for size in sizes]


def inputs(given, compress="none", reduce="mean"):
    ranks = tuple(range(len(given)))
    bucket = RecordedBucket(
        step=1, number=0, names=("w", "b"), shapes=SHAPES, compress=compress, ranks=ranks,
        nodes=(ranks,), weight=1.0,
    )  # fmt: skip
    before, after = ([{} for _ in given] for _ in range(2))
    numbers = [row.double().numpy() for row in given]
    return BucketInputs(bucket, numbers, before, after, 0, 0, reduce, hierarchical=False)


def off(found, out):
    """By how many bounds the worst element is off."""
    return float((np.abs(out.double().numpy() - found.out) / found.bound).max())


def test_a_sum_in_any_order_is_within_its_bound_and_one_of_fewer_bits_is_not():
    given = rows(torch.float32, 5)
    found = expected_sums(inputs(given), torch.float32)
    total = sum(given[1:], given[0])
    assert off(found, total) <= 1
    assert off(found, sum(given[::-1][1:], given[-1])) <= 1
    assert off(found, total.bfloat16()) > 100
    assert off(found, sum(row.bfloat16().float() for row in given)) > 100


def test_adasum_of_16_bits():
    one, other = given = rows(torch.bfloat16)
    found = expected_sums(inputs(given, reduce="adasum"), torch.bfloat16)

    def combined(swapped):
        parts = []
        for span in (slice(0, 2048), slice(2048, SIZE)):
            a, b = one[span].double(), other[span].double()
            factors = [float(1 - a @ b / (2 * (x @ x))) for x in (a, b)]
            left, right = factors[::-1] if swapped else factors
            parts.append((one[span].float() * left).add_(other[span].float(), alpha=right))
        return torch.cat(parts).bfloat16()

    assert off(found, combined(swapped=False)) <= 1
    assert off(found, combined(swapped=True)) > 1


def test_what_16_bits_cannot_hold_is_kept():
    """top-k of gradients of 16 bits with a residual of 32."""
    given = rows(torch.bfloat16)
    before = torch.randn(2048, generator=torch.Generator().manual_seed(5)) * 0.1
    u = given[0][:2048].float() + before
    chosen = u.abs().topk(205).indices
    kept = u.clone()
    kept[chosen] = u[chosen] - u[chosen].bfloat16().float()
    one = inputs(given, "topk:0.1")
    one.before[0]["w/residual"], one.after[0]["w/residual"] = before, kept
    found = expected_sums(one, torch.bfloat16)
    np.testing.assert_array_equal(found.kept[0]["w/residual"], kept.double().numpy())


def test_what_is_sent_and_kept_is_the_gradient():
    given = rows(torch.float32)
    one = inputs(given, "sign")
    out = torch.zeros(SIZE)
    for row, after in zip(given, one.after, strict=True):
        scale = row[:2048].abs().mean()
        sent = torch.where(row[:2048] < 0, -scale, scale)
        after["w/residual"] = row[:2048] - sent
        out[:2048] += sent
        out[2048:] += row[2048:]
    total, bound = sent_and_kept(one, out.double().numpy(), torch.float32)
    assert (np.abs(out.double().numpy() - total) <= bound).all()
    one.after[1]["w/residual"] *= 1 - 2**-12
    total, bound = sent_and_kept(one, out.double().numpy(), torch.float32)
    assert (np.abs(out.double().numpy() - total) > bound).any()


def test_a_share_may_be_off_by_a_unit_for_each_micro_batch():
    row = torch.tensor([1.0, -4.0])
    assert share_bound(row, torch.float32, 2).tolist() == [10 * 2**-23 * 4.0] * 2
