"""ranks: headway.Exchange in place of DistributedDataParallel, in a loop of one's own."""

from __future__ import annotations

import contextlib
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import headway
from headway.collective.compression import CompressorSpeed
from headway.collective.model.link_fit import LinkFit
from headway.collective.model.scheme_ranking import TYPICAL_COMPRESSOR_SPEEDS
from headway.comm.tuning import autotuning
from headway.errors import PlanError, Stalled, UsageError
from headway.run.distributed.world import World
from support.ranks import run_ranks
from support.sampling import sampled

FEATURES, CLASSES, STEPS = 6, 4, 8


class Net(nn.Module):
    """A tied weight, a layer that is sometimes unused, one that is frozen in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.again = nn.Linear(8, 8)
        self.twin = nn.Linear(8, 8)
        self.twin.weight = self.again.weight
        self.extra = nn.Linear(8, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        x = torch.tanh(self.twin(torch.tanh(self.again(torch.tanh(self.first(x))))))
        if extra:
            x = x + self.extra(x)
        return self.last(x)


def build(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(5)
    return Net().to(dtype)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def batch(step: int, rank: int, micro: int = 0, size: int = 5) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    x = torch.randn(size, FEATURES, generator=draw)
    return x, torch.randint(CLASSES, (size,), generator=draw)


def loss_of(model: Any, step: int, rank: int, micro: int = 0, **options: Any) -> Tensor:
    x, y = batch(step, rank, micro)
    return F.cross_entropy(model(x, **options), y)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def ddp(world: Any, what: str) -> dict[str, Tensor]:
    """The peer: what DDP makes of the same steps."""
    model = build()
    found = DistributedDataParallel(model, find_unused_parameters=what in ("unused", "frozen"))
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        if what == "accumulated":
            with found.no_sync():
                loss_of(found, step, world.rank, 0).backward()
        if what == "frozen" and step == 4:
            for parameter in model.first.parameters():
                parameter.requires_grad_(False)
            found = DistributedDataParallel(model, find_unused_parameters=True)
        with autocast(what):
            loss_of(found, step, world.rank, 1, extra=uses_extra(what, step)).backward()
        if what == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return parameters(model)


def ours(world: Any, what: str, **choices: Any) -> dict[str, Tensor]:
    """The same steps with headway."""
    model = build()
    optimizer = optimizer_of(model)
    exchange = headway.Exchange(model, optimizer, world=World.adopt(), **choices)
    for step in range(STEPS):
        if what == "accumulated":
            with exchange.no_sync():
                loss_of(model, step, world.rank, 0).backward()
        if what == "frozen" and step == 4:
            exchange.flush()
            for parameter in model.first.parameters():
                parameter.requires_grad_(False)
        with autocast(what):
            loss_of(model, step, world.rank, 1, extra=uses_extra(what, step)).backward()
        if what == "clipped":
            exchange.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        exchange.step()
    exchange.close()
    return parameters(model)


def uses_extra(what: str, step: int) -> bool:
    return what not in ("unused", "frozen") or step % 3 == 1


def autocast(what: str) -> Any:
    if what == "mixed":
        return torch.autocast("cpu", dtype=torch.bfloat16)
    return contextlib.nullcontext()


CHOICES = {
    "default": {},
    "small buckets": {"bucket": "200"},
    "fitted buckets": {"bucket": "auto"},
    "priority": {"priority": True, "chunk": "100"},
}


@pytest.mark.parametrize(
    ("what", "choice"),
    sampled(
        [*product(["plain", "accumulated", "unused", "frozen", "clipped", "mixed"], CHOICES)], 8
    ),
)
def test_every_rank_holds_the_parameters_that_ddp_makes(what, choice):
    """Bit for bit: two ranks add the same two numbers, whatever the buckets."""
    expected = run_ranks(2, ddp, what)[0]
    for rank, found in enumerate(run_ranks(2, ours, what, **CHOICES[choice])):
        for name, value in expected.items():
            if what == "clipped":  # the norm is summed in another order
                torch.testing.assert_close(found[name], value)
            else:
                assert torch.equal(found[name], value), f"rank {rank}: {name}"


def ddp_uneven(world: Any) -> dict[str, Tensor]:
    model = build()
    found = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with found.join():
        for step in range(STEPS - 3 * world.rank):
            optimizer.zero_grad()
            loss_of(found, step, world.rank, extra=True).backward()
            optimizer.step()
    return parameters(model)


def ours_uneven(world: Any, **choices: Any) -> tuple[int, dict[str, Tensor]]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = headway.Exchange(model, optimizer, world=World.adopt(), **choices)
    with exchange.join():
        for step in range(STEPS - 3 * world.rank):
            loss_of(model, step, world.rank, extra=True).backward()
            exchange.step()
    exchange.close()
    return exchange.steps_done, parameters(model)


@pytest.mark.parametrize("choice", CHOICES)
def test_ranks_may_have_fewer_batches(choice):
    expected = run_ranks(2, ddp_uneven)[0]
    for steps, found in run_ranks(2, ours_uneven, **CHOICES[choice]):
        assert steps == STEPS
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_three_ranks_agree_to_rounding():
    expected = run_ranks(3, ddp, "plain")[0]
    first, *others = run_ranks(3, ours, "plain", priority=True)
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value)
        assert all(torch.equal(first[name], other[name]) for other in others)


def state_in_flight(world: Any) -> None:
    """A state_dict in the middle of a priority exchange waits for the updates."""
    model = build()
    optimizer = optimizer_of(model)
    exchange = headway.Exchange(model, optimizer, world=World.adopt(), priority=True)
    for step in range(STEPS):
        loss_of(model, step, world.rank, extra=True).backward()
        exchange.step()
        saved = model.state_dict(), optimizer.state_dict()
    exchange.flush()
    for name, value in model.state_dict().items():
        assert torch.equal(saved[0][name], value), name
    assert saved[1]["state"][0]["step"] == STEPS
    optimizer.load_state_dict(saved[1])
    loss_of(model, 0, world.rank, extra=True).backward()
    exchange.step()
    exchange.close()
    assert optimizer.state_dict()["state"][0]["step"] == STEPS + 1


def test_state_dicts_are_those_of_whole_steps():
    run_ranks(2, state_in_flight)


def groups(world: Any, **choices: Any) -> dict[str, Tensor]:
    """`first` is averaged inside pairs of ranks only, the rest over all."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    description = headway.plans.ExchangePlan(
        parts=(headway.plans.ExchangePart(parameters="first.*", ranks=((0, 1), (2, 3))),), **choices
    )
    exchange = headway.Exchange(model, optimizer, description, world=World.adopt())
    loss_of(model, 0, world.rank, extra=True).backward()
    exchange.synchronize()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    exchange.step()
    exchange.close()
    return found


def own_gradients(rank: int) -> dict[str, Tensor]:
    model = build()
    loss_of(model, 0, rank, extra=True).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("choices", [{}, {"priority": True}])
def test_layers_may_be_summed_over_different_groups(choices):
    """MLSL's node groups; the mean of a group is that over its own ranks."""
    gradients = [own_gradients(rank) for rank in range(4)]
    for rank, found in enumerate(run_ranks(4, groups, **choices)):
        for name, value in found.items():
            members = ((0, 1), (2, 3))[rank // 2] if name.startswith("first.") else range(4)
            mean = sum(gradients[member][name] for member in members) / len(members)
            torch.testing.assert_close(value, mean)


def test_what_cannot_be_is_refused():
    model = build()
    optimizer = optimizer_of(model)
    with pytest.raises(UsageError, match="no choice compression"):
        headway.Exchange(model, optimizer, compression="fp16")
    with pytest.raises(UsageError, match="not both"):
        headway.Exchange(model, optimizer, headway.plans.ExchangePlan(), compress="fp16")
    with pytest.raises(PlanError, match="did you mean powersgd"):
        headway.Exchange(model, optimizer, compress="powersdg:2")
    with pytest.raises(PlanError, match="adasum does not go with priority"):
        headway.Exchange(model, optimizer, reduce="adasum", priority=True)


def test_one_process_needs_no_exchange():
    model, plain = build(), build()
    with headway.Exchange(model, optimizer_of(model)) as exchange:
        optimizer = optimizer_of(plain)
        for step in range(3):
            loss_of(model, step, 0).backward()
            exchange.step()
            optimizer.zero_grad()
            loss_of(plain, step, 0).backward()
            optimizer.step()
    for name, value in parameters(plain).items():
        assert torch.equal(value, parameters(model)[name])


def automatic(world: Any) -> tuple[list[str], dict[str, Tensor]]:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    exchange = headway.Exchange(model, optimizer, world=World.adopt(), compress="auto")
    draw = torch.Generator().manual_seed(world.rank)
    for _ in range(6):
        model(torch.randn(2, 256, generator=draw)).square().mean().backward()
        exchange.step()
    exchange.close()
    return exchange.remarks, parameters(model)


def test_the_compressor_may_be_chosen_from_the_measured_link():
    (said, first), (also_said, second) = run_ranks(2, automatic)
    assert len(said) == len(also_said) <= 1  # nothing is said where nothing is changed
    assert all("compress = " in text for text in said)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def automatic_here(world: Any, seconds_per_byte: float | None) -> str:
    """On a link of 10 Mbit/s, with compressors of a given speed or as measured."""
    autotuning.probe_link = lambda *_: LinkFit(1e-4, 8e-7, 0.0, world.size)
    if seconds_per_byte is not None:
        speeds = dict.fromkeys(
            TYPICAL_COMPRESSOR_SPEEDS, CompressorSpeed(seconds_per_byte, seconds_per_byte)
        )
        autotuning.measure_speeds = lambda _: speeds
    said, _ = automatic(world)
    return said[0] if said else "nothing"


def test_the_choice_depends_on_how_fast_compressors_are():
    measured = run_ranks(2, automatic_here, None)
    assert "compress = powersgd" in measured[0] or "compress = topk" in measured[0]
    assert measured[0] == measured[1]
    slow = run_ranks(2, automatic_here, 1.0)
    assert slow == ["nothing"] * 2


def stalls(world: Any) -> None:
    """Rank 1 has made the gradients of its last layer only when the exchange gives up."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = headway.Exchange(model, optimizer, world=World.adopt(), bucket="80", overlap=True)
    model[1](torch.randn(2, 4)).sum().backward()
    with pytest.raises(Stalled) as caught, exchange._strategy.context.exchanging():
        raise Stalled("rank 1 did not come", why="Rank 0 waited 5 s.")
    assert "Rank 0 waited 5 s." in caught.value.why
    assert "here bucket 0 (1.bias, 1.weight) is on its way" in caught.value.why
    assert "here bucket 1 (0.bias, 0.weight) waits for 2 of its gradients" in caught.value.why
    exchange.synchronize()
    exchange.close()


def test_a_stall_says_what_buckets_wait_for():
    run_ranks(2, stalls)
