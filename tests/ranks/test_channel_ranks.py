"""ranks: tensor channels, every provider by the same tests: whole, in order, in place."""

from __future__ import annotations

import gc
import os
import random
import sys
import time

import pytest
import torch
import torch.distributed as dist

import headway
from headway.channel import Channel, wait_any
from headway.errors import PeerLost, RunError, Stalled, UsageError
from support.ranks import ranks

PROVIDERS = ["shared_memory", "socket"] if sys.platform == "linux" else ["socket"]
every_provider = pytest.mark.parametrize("provider", PROVIDERS)
PUTS = 100_000
WORDS = 300


def dawdle(draw):
    """Sometimes the core goes to somebody else, rarely for longer; no wait for anything."""
    chance = draw.random()
    if chance < 0.001:
        time.sleep(draw.random() * 0.002)
    elif chance < 0.01:
        os.sched_yield()


def sizes(seed):
    """The same random numbers of words at both ends."""
    draw = random.Random(seed)
    while True:
        yield draw.choice([2, 3, 17, 128, WORDS])


def swap_many(world, channel, make, count):
    """Both ends put and get `count` tensors; the last 8 bytes are the sum of all before."""
    draw = random.Random(world.rank)
    ways = zip(range(count), sizes(world.rank), sizes(1 - world.rank), strict=False)
    for number, words, coming in ways:
        target = make(words).fill_(number)
        target[-1] = number * (words - 1)
        channel.put(target)
        dawdle(draw)
        with channel.get() as came:
            assert len(came) == coming, "lost or doubled"
            assert came[-1].item() == number * (coming - 1), "lost, doubled or torn"
            assert came.sum().item() == 2 * number * (coming - 1), "torn"


@pytest.mark.slow
@every_provider
@ranks(2, timeout=150)
def test_a_hundred_thousand_puts_of_random_size_with_random_delays(world, provider):
    with Channel(1 - world.rank, provider=provider, timeout=60) as channel:
        assert channel.provider == provider
        swap_many(world, channel, lambda words: channel.empty([words], torch.int64), PUTS // 2)
        dist.barrier()


@every_provider
@ranks(2, timeout=90)
def test_static_slots_carry_every_tensor_whole_and_in_order(world, provider):
    """The sender computes in the region, or puts tensors of all kinds; the receiver reads it."""
    with Channel(1 - world.rank, shape=(4, 6), dtype=torch.int64, provider=provider) as channel:
        base, transposed = torch.arange(24).view(4, 6), torch.arange(24).view(6, 4).T
        kinds = [base, transposed.clone(), transposed, torch.arange(48).view(4, 12)[:, ::2]]
        draw = random.Random(world.rank)
        for number in range(3000):
            kind = kinds[number % len(kinds)]
            if number % 3:
                channel.put(kind + number)
            else:
                torch.add(kind, number, out=channel.buffer)
                channel.put()
            dawdle(draw)
            with channel.get() as came:
                assert torch.equal(came, kind + number)
        dist.barrier()


FORMS = [
    ((), torch.float64), ((0,), torch.float32), ((5,), torch.bfloat16), ((2, 3), torch.bool),
    ((1, 4, 2), torch.complex64), ((2, 1, 3, 2), torch.int16), ((1,) * 8, torch.float16),
    ((3, 0, 2), torch.uint8), ((60_000,), torch.float32), ((1, 90_000), torch.float64),
    ((3, 3), torch.float8_e5m2),
]  # fmt: skip


@every_provider
@ranks(2, timeout=60)
def test_dynamic_tensors_of_all_forms_come_as_they_were(world, provider):
    """Dimensions, types and sizes change with every put; memory grows where it must."""
    draw = torch.Generator().manual_seed(7)
    with Channel(1 - world.rank, provider=provider) as channel:
        for number in range(120):
            shape, dtype = FORMS[number % len(FORMS)]
            shape = tuple(s + number // len(FORMS) if s > 1 else s for s in shape)
            whole = torch.randint(0, 2, shape, generator=draw).to(dtype)
            if number % 2:
                made = channel.empty(shape, dtype)
                made.copy_(whole)
                channel.put(made)
            else:
                channel.put(whole)
            with channel.get() as came:
                assert (came.shape, came.dtype) == (whole.shape, whole.dtype)
                assert torch.equal(came.to(torch.complex128), whole.to(torch.complex128))
        odd = [whole.new_zeros((2, 6)).float().T, torch.randn(3, dtype=torch.complex64).conj()]
        odd += [torch.ones(3, requires_grad=True) * 2, torch._neg_view(torch.ones(2))]
        for tensor in odd:
            channel.put(tensor)
            with channel.get() as came:
                assert not came.requires_grad
                assert came.is_contiguous()
                assert came.shape == tensor.shape
                assert came.is_complex() or torch.equal(came, tensor)
        dist.barrier()


@every_provider
@ranks(2)
def test_a_tensor_is_used_where_it_lies_and_nothing_is_allocated(world, provider):
    shape = (64, 128)
    with Channel(1 - world.rank, shape=shape, provider=provider) as channel:
        region, accumulator = channel._wire.region, torch.zeros(shape)
        slots = {region.slot(number).data_ptr() for number in range(2)}
        peer, seen = torch.full(shape, 2.0 + world.rank), set()
        for step in range(8):
            if step == 2:
                before = allocations()
            channel.put(peer)
            with channel.get() as came:
                seen.add(came.data_ptr())
                accumulator.add_(came)
            del came
        assert allocations() == before
        assert seen == slots, "in the region, two slots in turn"
        channel.put(peer)
        assert channel.add_into(accumulator) is accumulator
        channel.put(peer)
        assert channel.get_into(accumulator.narrow(0, 0, 64)).data_ptr() == accumulator.data_ptr()
        assert accumulator.eq(3.0 - world.rank).all()
        dist.barrier()


def allocations():
    """Live tensors of Python; those of the loop above come and go."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@ranks(2)
def test_a_dynamic_tensor_is_read_out_of_the_memory_of_its_sender(world):
    """Shared memory: `empty` is what the other end reads, and the mapping is kept."""
    if sys.platform != "linux":
        pytest.skip("shared memory needs Linux")
    with Channel(1 - world.rank, provider="shared_memory") as channel:
        places = set()
        for number in range(6):
            made = channel.empty((1000,))
            channel.put(made.fill_(number))
            with channel.get() as came:
                assert came.eq(number).all()
                places.add(came.data_ptr())
        assert len(places) == 2
        dist.barrier()


@every_provider
@ranks(2)
def test_no_put_overtakes_its_reader(world, provider):
    """With credits: the sender stops at the third put until the first was given back."""
    channel = Channel(1 - world.rank, shape=(1000,), provider=provider, timeout=0.3)
    if world.rank == 0:
        for number in range(2):
            channel.put(torch.full((1000,), float(number)))
        with pytest.raises(Stalled, match=r"rank 1 did not give a slot back within 0\.3 s"):
            channel.put(torch.full((1000,), 9.0))
        dist.barrier()
        channel.put(torch.full((1000,), 2.0))
    else:
        held = channel.get()
        dist.barrier()
        assert held.tensor.eq(0).all()
        held.release()
        held.release()
        for number in (1, 2):
            with channel.get() as came:
                assert came.eq(number).all()
    dist.barrier()
    channel.close()


@every_provider
@ranks(2)
def test_without_credits_what_was_overwritten_is_an_error(world, provider):
    channel = Channel(1 - world.rank, shape=(10,), provider=provider, credit=False)
    for _ in range(2):  # in time
        channel.put(torch.ones(10))
        with channel.get() as came:
            assert came.eq(1).all()
        dist.barrier()
    if world.rank == 0:
        channel.put(torch.zeros(10))
        dist.barrier()
        for _ in range(2):
            channel.put(torch.ones(10))
        dist.barrier()
        for _ in range(3):
            channel.put(torch.ones(10))
        dist.barrier()
    else:
        held = channel.get()
        dist.barrier()
        dist.barrier()
        while channel._words[channel._flag_of[1]] < 5:  # its thread may be behind
            os.sched_yield()
        with pytest.raises(RunError, match="tensor 3 from rank 0 was overwritten before"):
            held.release()
        dist.barrier()
        while channel._words[channel._flag_of[0]] < 8:
            os.sched_yield()
        with pytest.raises(RunError, match="tensor 4 from rank 0 was overwritten"):
            channel.get()
    dist.barrier()
    channel.close()


@every_provider
@ranks(2)
def test_a_target_that_sleeps_has_the_tensor_when_it_wakes(world, provider):
    """It makes no call of the library: shared memory needs none, a socket has its thread."""
    with Channel(1 - world.rank, shape=(1 << 16,), provider=provider) as channel:
        flag = channel._words
        dist.barrier()
        if world.rank == 0:
            channel.put(torch.ones(1 << 16))
            dist.barrier()
        else:
            deadline = time.monotonic() + 10
            while flag[channel._flag_of[1]] != 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert channel._wire.arrived(1, ()).view(torch.float32).eq(1).all()
            dist.barrier()
            assert channel.ready()
        dist.barrier()


@every_provider
@ranks(3)
def test_of_many_channels_whoever_waits_longest_is_served(world, provider):
    """Rank 0 polls two; a busy one does not starve the other, an idle one does not block."""
    if world.rank:
        with Channel(0, shape=(4,), provider=provider, slots=4) as channel:
            for number in range(40 if world.rank == 1 else 4):
                channel.put(torch.full((4,), float(number)))
            dist.barrier()
        return
    channels = [Channel(peer, shape=(4,), provider=provider, slots=4) for peer in (1, 2)]
    order, counts = [], {1: 0, 2: 0}
    while sum(counts.values()) < 44:
        channel = wait_any(channels, timeout=20)
        with channel.get() as came:
            assert came[0] == counts[channel.peer]
        counts[channel.peer] += 1
        order.append(channel.peer)
        if len(order) == 1:
            while not all(c.ready() for c in channels):
                os.sched_yield()
    assert counts == {1: 40, 2: 4}
    assert order[1:3] in ([1, 2], [2, 1])
    with pytest.raises(Stalled, match=r"no tensor came from any of the ranks 1, 2 within 0\.05 s"):
        wait_any(channels, timeout=0.05)
    dist.barrier()
    for channel in channels:
        channel.close()


@every_provider
@ranks(2)
def test_a_closed_channel_gives_what_was_put_and_then_says_so(world, provider):
    for shape in ((3,), None):
        channel = Channel(1 - world.rank, shape=shape, provider=provider, timeout=20)
        if world.rank == 0:
            channel.put(torch.ones(3))
            channel.put(torch.ones(3) * 2)
            channel.close()
            channel.close()
            with pytest.raises(RunError, match="the channel to rank 1 is closed"):
                channel.put(torch.ones(3))
            with pytest.raises(RunError, match="is closed"):
                channel.get()
        else:
            with channel.get() as came:
                assert came.eq(1).all()
            kept = channel.get().tensor
            with pytest.raises(PeerLost, match="rank 0 has closed the channel"):
                channel.get()
            with pytest.raises(PeerLost, match="rank 0 has closed the channel"):
                wait_any([channel])
            channel.close()
            assert kept.eq(2).all()
        dist.barrier()


@ranks(2)
def test_ends_that_differ_are_an_error_on_both(world):
    with pytest.raises(RunError, match=r"differ in shape\n.*\[4\].*\[3\]|shape\n.*\[3\].*\[4\]"):
        Channel(1 - world.rank, shape=(3 + world.rank,))
    with pytest.raises(RunError, match="the two ends of a channel differ in provider"):
        Channel(1 - world.rank, provider="auto" if world.rank else "socket")
    with headway.Channel(1 - world.rank, shape=(2,), timeout=5) as channel:
        with pytest.raises(RunError, match=r"a tensor \[3\] of torch.float32 in a channel"):
            channel.put(torch.ones(3))
        with pytest.raises(RunError, match=r"torch\.float64"):
            channel.put(torch.ones(2, dtype=torch.float64))
        with pytest.raises(RunError, match="empty tensor of a static channel"):
            channel.empty((2,))
        channel.put(torch.ones(2))
        channel.put(torch.ones(2))
        held = [channel.get(), channel.get()]
        with pytest.raises(RunError, match=r"all 2 slots of a channel from rank \d are held"):
            channel.get()
        assert [h.tensor.sum() for h in held] == [2, 2]
        dist.barrier()


@ranks(2)
def test_the_other_end_that_never_opens_is_named(world):
    store = dist.FileStore(str(world.directory / "store"), 2)
    if world.rank == 0:
        with pytest.raises(Stalled, match=r"rank 1 does not open its end of a channel within 0\.2"):
            Channel(1, shape=(2,), store=store, rank=0, timeout=0.2)
    dist.barrier()
    with pytest.raises(UsageError, match="without rank="):
        Channel(1 - world.rank, store=store)
    for peer in (-1, 2):  # Gloo would wait as long as the group allows, and crash in the end
        with pytest.raises(UsageError, match=f"a channel to rank {peer}, which is not in the gr"):
            Channel(peer, shape=(2,), timeout=0.2)
    other = dist.FileStore(str(world.directory / "other"), 2)
    for provider in PROVIDERS:
        with Channel(
            1 - world.rank, shape=(2,), provider=provider, store=other, rank=world.rank, timeout=20
        ) as channel:
            channel.put(torch.full((2,), 1.0 + world.rank))
            with channel.get() as came:
                assert came.eq(2.0 - world.rank).all()
            dist.barrier()
