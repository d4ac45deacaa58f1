"""pure: what a worker that comes back begins with, and what it changes for the others."""

from __future__ import annotations

from typing import Any

import pytest

from headway.plans import Synchrony
from headway.synchrony.actors import Address, Compute, Gradient
from headway.synchrony.driving import MailRoom, WorkerSeat
from headway.synchrony.history import Died, History, Joined, Resumed
from headway.synchrony.programs import AgreementRun, make_run, rejoin_step
from headway.synchrony.servers import Leave, Parameters, Pull, Push, RoundServer, StreamServer
from support.plain_replicas import Descent, Shares

JOINED = Joined(2, 1, 6)


def first_gradient(run: AgreementRun, gone: frozenset[int] = frozenset()) -> Compute:
    """Let worker 2 go on until it wants its first gradient; models of others may be gone."""
    room = MailRoom(run)
    posted: list[Address] = []

    def send(sender: Any, to: Address, message: Any) -> None:
        room.put(sender, to, message)
        posted.append(to)

    seat = WorkerSeat(2, run.programs[2], send)
    wanted = seat.resume()
    while wanted is None:
        to = posted.pop(0)
        if to.number in gone:
            if seat.answer(to, None):
                wanted = seat.go_on()
            continue
        for sent in room.handle(2, to):
            if seat.answer(to, sent.value):
                wanted = seat.go_on()
    for to in posted:
        room.handle(2, to)
    return wanted


def decentral(**words: Any) -> tuple[AgreementRun, list[Descent]]:
    replicas = [Descent(float(10 + worker), 0.1) for worker in range(3)]
    return make_run(Synchrony(**words), replicas, [Descent(5.0, 0.1)], joined=JOINED), replicas


def model(run: AgreementRun, worker: int) -> Any:
    return run.holders[Address("model", worker)]


def test_gossip_gets_half_of_the_weight_of_the_first_that_is_there() -> None:
    run, replicas = decentral(merge="push_sum", kind="asynchronous")
    assert first_gradient(run).step == 6
    assert [model(run, worker).weight for worker in range(3)] == [1 / 6, 1 / 3, 1 / 6]
    assert [replica.read() for replica in replicas] == [10.0, 11.0, 10.0]


def test_gossip_asks_the_next_where_the_first_is_gone() -> None:
    run, replicas = decentral(merge="push_sum", kind="asynchronous")
    assert first_gradient(run, frozenset({0})).step == 6
    assert [model(run, worker).weight for worker in range(3)] == [1 / 3, 1 / 6, 1 / 6]
    assert replicas[2].read() == 11.0


@pytest.mark.parametrize("words", [{"merge": "pairwise"}, {"merge": "elastic", "topology": "tree"}])
def test_a_model_of_its_own_begins_as_that_of_another(words: dict[str, Any]) -> None:
    run, replicas = decentral(kind="asynchronous", **words)
    wanted = first_gradient(run)
    assert (wanted.step, wanted.value) == (6, 10.0)
    assert [replica.read() for replica in replicas] == [10.0, 11.0, 10.0]


def test_an_elastic_worker_begins_with_the_centre_and_does_not_move_it() -> None:
    run, replicas = decentral(merge="elastic", kind="asynchronous", local_steps=4)
    assert first_gradient(run).step == 6
    centre: Any = run.holders[Address("centre")]
    assert (replicas[2].read(), centre.replica.read()) == (5.0, 5.0)


@pytest.mark.parametrize("fetch", [1, 4])
def test_a_worker_of_servers_begins_with_what_they_have(fetch: int) -> None:
    words = Synchrony(kind="asynchronous", fetch_every=fetch, topology="single")
    replicas = [Shares((1.0,), 0.1) for _ in range(3)]
    run = make_run(words, replicas, [Descent(7.0, 0.1)], joined=JOINED)
    assert first_gradient(run).step == 6
    assert replicas[2].read() == (7.0,)


def answers(found: Any) -> list[int]:
    return [sent.to for sent in found if isinstance(sent.value, Parameters)]


def test_a_bound_counts_from_the_step_with_which_it_comes_back() -> None:
    server = StreamServer(Synchrony(kind="bounded", delay_bound=1), Descent(0.0, 0.1), 2)
    for clock in range(4):
        server.handle(0, Push(clock, 0, Gradient(1.0)))
        server.handle(1, Push(clock, 0, Gradient(1.0)))
    server.lose(1)
    for clock in range(4, 9):
        server.handle(0, Push(clock, 0, Gradient(1.0)))
    server.join(1, 8)
    assert answers(server.handle(0, Pull(9))) == [0]
    server.handle(0, Push(9, 0, Gradient(1.0)))
    assert not answers(server.handle(0, Pull(10)))
    assert server.missing() == [1]
    assert answers(server.handle(1, Push(8, 0, Gradient(1.0)))) == [0]


@pytest.mark.parametrize("bound", [0, 2])
def test_a_round_does_not_wait_for_steps_before_it_came_back(bound: int) -> None:
    words = Synchrony(kind="bounded", delay_bound=bound, read="snapshot")
    server = RoundServer(words, Descent(0.0, 0.1), 2)
    for worker in (0, 1):
        server.handle(worker, Push(0, 0, Gradient(1.0)))
    server.lose(1)
    server.handle(0, Push(1, 1, Gradient(1.0)))
    server.join(1, 5)
    for clock in range(2, 5):
        server.handle(0, Push(clock, clock, Gradient(1.0)))
    assert server.version == 5
    assert answers(server.handle(1, Pull(5))) == [1]
    server.handle(0, Push(5, 5, Gradient(1.0)))
    assert server.version == 5
    assert server.missing() == ()
    server.handle(1, Push(5, 5, Gradient(1.0)))
    assert server.version == 6


def test_rounds_that_nobody_makes_are_closed_empty() -> None:
    """The others have died or ended before the step with which one comes back."""
    server = RoundServer(Synchrony(kind="bounded", read="snapshot"), Descent(0.0, 0.1), 2)
    server.handle(0, Push(0, 0, Gradient(1.0)))
    server.lose(1)
    assert answers(server.join(1, 7)) == []
    server.handle(0, Leave())
    assert answers(server.handle(1, Pull(7))) == [1]
    assert server.version == 7


def test_a_worker_comes_back_where_the_slowest_of_the_others_is() -> None:
    often, rare = Synchrony(kind="asynchronous"), Synchrony(kind="asynchronous", fetch_every=5)
    assert rejoin_step(often, 10, [30, 25]) == 25
    assert rejoin_step(often, 10, [11, 25]) == 13  # a replay of the life before may make step 12
    assert rejoin_step(rare, 10, [11, 25]) == 17


def test_one_that_comes_back_does_not_know_the_dead_of_its_life_before() -> None:
    """Worker 2 died, then 1; both come back, 2 first: the log of 1 has only the death of 2."""
    history = History()
    own, others = Address("model", 1), Address("model", 0)
    for entry in (Died(2), Joined(1, 1, 7), Resumed(2, 1, 0)):
        history.add(own, entry)
    for entry in (Died(2), Died(1), Joined(2, 1, 6), Joined(1, 1, 7)):
        history.add(others, entry)
    assert history.dead() == set()
    history.add(others, Died(2))
    assert history.dead() == {2}
