"""The program of a worker and the holders it talks to, for every way to agree.

`make_run` gives both for a plan's synchrony: see `actors` for how they are driven. A program is
written as its paper writes it, with one gradient for each step. Where models meet while a gradient
is computed, the message is posted before and awaited after (Lian et al. 2017, algorithm 1).
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.plans.synchrony import Synchrony
from headway.synchrony import merging, mixing, servers
from headway.synchrony.actors import (
    Address,
    Await,
    Compute,
    Gradient,
    Holder,
    Post,
    Replica,
    Value,
    WorkerProgram,
)
from headway.synchrony.history import Joined
from headway.synchrony.snapshots import Look, Snapshots


@dataclass
class AgreementRun:
    """All parts of a run.

    Attributes:
        programs: Of the workers.
        holders: Whom they talk to.
        places: The worker in whose process each holder lives; None: nowhere (a meeting).
        replicas: Of the workers.
    """

    programs: list[WorkerProgram]
    holders: dict[Address, Holder] = field(default_factory=dict)
    places: dict[Address, int | None] = field(default_factory=dict)

    def add(self, address: Address, holder: Holder, place: int | None) -> None:
        self.holders[address], self.places[address] = holder, place


def make_run(
    synchrony: Synchrony,
    replicas: Sequence[Replica],
    shares: Sequence[Any] = (),
    seed: int = 0,
    snapshots: Snapshots | None = None,
    joined: Joined | None = None,
) -> AgreementRun:
    """The programs and holders of a run.

    Args:
        replicas: Of each worker: its parameters, with its own optimiser where it has one.
        shares: Of each server, or of the centre: what it holds, a `Replica`; of one that lives in
            another process only `read` is used, once. With servers a worker's values are
            tuples, with one entry for each share.
        seed: Of whom gossip is sent to, and when.
        snapshots: Of the worker whose program is driven here; None: nobody takes any.
        joined: A worker that has come back, and how; None: all begin together.
    """
    workers = len(replicas)
    run = AgreementRun([])
    snapshots = snapshots or Snapshots()
    if synchrony.central:
        _with_servers(run, synchrony, replicas, shares, snapshots, joined)
    elif synchrony.in_rounds:
        run.add(Address("meeting"), merging.Meeting(workers), None)
        matrix = mixing.mixing_matrix(synchrony, workers) if synchrony.merge == "neighbour" else ()
        for worker, replica in enumerate(replicas):
            if matrix:
                inbox = merging.Inbox(worker, mixing.neighbours(matrix, worker))
                run.add(Address("model", worker), inbox, worker)
            common = merging.CommonModel(synchrony)
            run.programs.append(rounds_program(synchrony, worker, workers, replica, common))
    elif synchrony.place == "master":
        run.add(Address("centre"), merging.Centre(shares[0]), 0)
        run.programs = [
            _elastic_worker(synchrony, replica, _of_first(worker, snapshots), _of(joined, worker))
            for worker, replica in enumerate(replicas)
        ]
    else:
        _with_models(run, synchrony, replicas, seed, snapshots, joined)
    return run


def _of(joined: Joined | None, worker: int) -> Joined | None:
    return joined if joined is not None and joined.worker == worker else None


def _of_first(worker: int, snapshots: Snapshots) -> Snapshots:
    """Of servers and a centre the first worker asks for what they have."""
    return Snapshots() if worker else snapshots


def rejoin_step(synchrony: Synchrony, own: int, others: list[int]) -> int:
    """The step, from 0, with which a worker comes back: where the slowest of the others is.

    It makes no step twice, and none that a replay of the life before may enter, where it notices
    its death only when it hears nothing of the others.

    Args:
        own: Steps that it has noted as made.
        others: Steps that each of the others has made.
    """
    quiet = max(synchrony.fetch_every, synchrony.push_every, synchrony.local_steps)
    return max(own + 2 + quiet, min(others, default=0))


def rounds_program(
    synchrony: Synchrony,
    worker: int,
    workers: int,
    replica: Replica,
    common: merging.CommonModel,
    step: int = 0,
) -> WorkerProgram:
    """The program of one worker where all meet in rounds (`Synchrony.in_rounds`).

    Args:
        common: What the workers have agreed on; as it was left, where a run is resumed.
        step: The first one to make.
    """
    match synchrony.merge:
        case "mean":
            return _local_worker(synchrony, replica, common, step)
        case "elastic":
            return _elastic_rounds(synchrony, workers, replica, common, step)
        case "neighbour":
            matrix = mixing.mixing_matrix(synchrony, workers)
            return _neighbour_worker(synchrony, matrix, worker, replica, step)
    raise ValueError(f"merge {synchrony.merge} knows no rounds")


# -- central: servers --------------------------------------------------------------------------


def server_places(synchrony: Synchrony, workers: int) -> tuple[int, ...]:
    """The workers in whose processes the servers live, spread evenly."""
    count = {"single": 1, "colocated": workers}.get(synchrony.place) or synchrony.servers or 1
    return tuple(number * workers // count for number in range(count))


def _with_servers(
    run: AgreementRun,
    synchrony: Synchrony,
    replicas: Sequence[Replica],
    shares: Sequence[Any],
    snapshots: Snapshots,
    joined: Joined | None,
) -> None:
    workers, eager = len(replicas), synchrony.remedy == "eager_push"
    places = server_places(synchrony, workers)
    for number, place in enumerate(places):
        server = servers.make_server(synchrony, shares[number], workers, number)
        run.add(Address("server", number), server, place)
        for worker in range(workers) if eager else ():
            assert synchrony.delay_bound is not None
            start = servers.Parameters(shares[number].read(), 0, 0, 0)
            run.add(
                Address("cache", worker, number),
                servers.Cache(synchrony.delay_bound, start),
                worker,
            )
    for worker, replica in enumerate(replicas):
        sources = [
            Address("cache", worker, number) if eager else Address("server", number)
            for number in range(len(places))
        ]
        program = _ahead_worker if synchrony.read == "ahead" else _server_worker
        back, seen = _of(joined, worker), _of_first(worker, snapshots)
        first = 0 if back is None else back.step
        run.programs.append(program(synchrony, replica, sources, seen, first))


def _server_worker(
    synchrony: Synchrony,
    replica: Replica,
    sources: Sequence[Address],
    snapshots: Snapshots,
    first: int,
) -> WorkerProgram:
    """Pull, compute, push; Downpour pulls and pushes every so many steps (Dean et al. 2012)."""
    sinks = [Address("server", number) for number in range(len(sources))]
    waits = synchrony.value_bound is not None
    cause = "bound" if synchrony.kind == "bounded" else "server"
    versions = [0] * len(sources)
    unsent: list[Gradient] = []
    step, pushes, fetched = first, first // synchrony.push_every, False
    while True:
        if step % synchrony.fetch_every == 0 or not fetched:
            fetched = True
            answers = yield from _ask(sources, [servers.Pull(pushes)] * len(sources), cause)
            replica.write(tuple(answer.value for answer in answers))
            versions = [answer.version for answer in answers]
            if synchrony.kind == "synchronous":
                # Where the others have closed steps without this worker, it goes on with them.
                step = pushes = max(step, *(answer.clock for answer in answers))
        # Behind the pull: synchronous servers have closed the step before then.
        yield from _look(snapshots, step, sinks, cause)
        gradient: Gradient | None = yield Compute(step)
        if gradient is not None:
            unsent.append(gradient)
            step += 1
        if unsent and (gradient is None or step % synchrony.push_every == 0):
            parts = _by_share(_sum(unsent), len(sources))
            messages = [
                servers.Push(pushes, version, part)
                for version, part in zip(versions, parts, strict=True)
            ]
            yield from _ask(sinks, messages, cause, wants=waits)
            unsent = []
            pushes += 1
        if gradient is None:
            yield from _ask(sinks, [servers.Leave()] * len(sinks), cause, wants=False)
            return
        if step % synchrony.fetch_every and gradient.count:
            replica.step(gradient.value)


def _ahead_worker(
    synchrony: Synchrony,
    replica: Replica,
    servers_of: Sequence[Address],
    snapshots: Snapshots,
    first: int,
) -> WorkerProgram:
    """Parameters are on their way while the gradient before is computed (the threads of Dean et al.
    2012, algorithm 7.1): a worker does not see its own last push, and waits for no message."""
    cause = "bound" if synchrony.kind == "bounded" else "server"
    pushes = first
    tickets = yield from _post(servers_of, [servers.Pull(pushes)] * len(servers_of))
    while True:
        answers = yield Await(tickets, cause)
        replica.write(tuple(answer.value for answer in answers))
        # Now no pull is under way, whose answer would be taken for the other's.
        yield from _look(snapshots, pushes, servers_of, cause)
        tickets = yield from _post(servers_of, [servers.Pull(pushes + 1)] * len(servers_of))
        gradient: Gradient | None = yield Compute(pushes)
        if gradient is None:
            yield Await(tickets, cause)
            yield from _ask(servers_of, [servers.Leave()] * len(servers_of), cause, wants=False)
            return
        messages = [
            servers.Push(pushes, answer.version, part)
            for answer, part in zip(answers, _by_share(gradient, len(servers_of)), strict=True)
        ]
        yield from _ask(servers_of, messages, cause, wants=False)
        pushes += 1


def _post(
    holders: Sequence[Address], messages: Sequence[Any]
) -> Generator[Any, Any, tuple[int, ...]]:
    """Post a message to each of some holders that wants an answer."""
    tickets = []
    for holder, message in zip(holders, messages, strict=True):
        tickets.append((yield Post(holder, message)))
    return tuple(tickets)


def _ask(
    holders: Sequence[Address], messages: Sequence[Any], cause: str, *, wants: bool = True
) -> Generator[Any, Any, Any]:
    """Post a message to each of some holders, then wait for their answers."""
    tickets = []
    for holder, message in zip(holders, messages, strict=True):
        tickets.append((yield Post(holder, message, wants)))
    return (yield Await(tuple(tickets), cause)) if wants else None


def _look(
    snapshots: Snapshots, step: int, holders: Sequence[Address], cause: str
) -> Generator[Any, Any, None]:
    """Ask holders for all that they have, where a checkpoint is due before a step."""
    if snapshots.due(step):
        seen = yield from _ask(holders, [Look()] * len(holders), cause)
        snapshots.take(step, seen)


def _sum(parts: Sequence[Gradient]) -> Gradient:
    """What some steps have added up; Downpour pushes that."""
    counted = [part for part in parts if part.count]
    if not counted:
        return Gradient(None, 0.0)
    value = counted[0].value
    for part in counted[1:]:
        value = tuple(a + b for a, b in zip(value, part.value, strict=True))
    return Gradient(value, sum(part.count for part in counted))


def _by_share(gradient: Gradient, shares: int) -> list[Gradient]:
    values = gradient.value if gradient.count else [None] * shares
    return [Gradient(value, gradient.count) for value in values]


# -- decentral, in rounds ----------------------------------------------------------------------


def _local_worker(
    synchrony: Synchrony, replica: Replica, common: merging.CommonModel, step: int
) -> WorkerProgram:
    """Local SGD with warm-up, and an outer optimiser (SlowMo, DiLoCo)."""
    if common.at is None:
        common.at = replica.read()
    met = not step or meets_after(synchrony, step)
    while True:
        gradient: Gradient | None = yield Compute(step)
        if gradient is not None:
            if gradient.count:
                replica.step(gradient.value)
            step += 1
            met = meets_after(synchrony, step)
        elif met:
            return
        if met or gradient is None:
            yield from _meet(step, replica, common)
            yield from _agree_on_state(synchrony, step, replica)
        if gradient is None:
            return


def _meet(step: int, replica: Replica, common: merging.CommonModel) -> Generator[Any, Any, None]:
    """All go on with one model."""
    rules = common.synchrony
    warm = step <= rules.warm_up
    if rules.compress == "none":
        average = yield from _mean(step, replica.read())
        if warm:
            common.at = average
        else:
            common.step(average)
    else:
        delta = yield from _mean(step, common.at - replica.read(), "difference")
        if warm:
            common.at = common.at - delta
        else:
            common.move(delta)
    replica.write(common.at)


def meets_after(synchrony: Synchrony, steps: int) -> bool:
    """Whether the mean of all models is taken after so many steps: after each while warming up."""
    since = steps - synchrony.warm_up
    return since <= 0 or since % synchrony.local_steps == 0


def _mean(step: int, value: Value, what: str = "model") -> Generator[Any, Any, Value]:
    meeting = [Address("meeting")]
    answers = yield from _ask(meeting, [merging.Meet(step, value, what)], "meeting")
    return answers[0]


def _agree_on_state(synchrony: Synchrony, step: int, replica: Replica) -> Generator[Any, Any, None]:
    """What becomes of the optimiser's state at a meeting."""
    if synchrony.state == "reset":
        replica.write_state(None)
    elif synchrony.state == "average" and (state := replica.read_state()) is not None:
        replica.write_state((yield from _mean(step, state, "state")))


def _neighbour_worker(
    synchrony: Synchrony,
    matrix: Sequence[Sequence[float]],
    worker: int,
    replica: Replica,
    step: int,
) -> WorkerProgram:
    """D-PSGD: the gradient is computed while models travel (Lian et al. 2017, algorithm 1)."""
    listeners = [
        Address("model", other)
        for other in range(len(matrix))
        if other != worker and matrix[other][worker]
    ]
    weights = dict(enumerate(matrix[worker]))
    while True:
        meets = (step + 1) % synchrony.local_steps == 0
        if meets:
            message = merging.Meet(step, replica.read())
            for listener in listeners:
                yield Post(listener, message, wants=False)
            ticket = yield Post(Address("model", worker), message)
        gradient: Gradient | None = yield Compute(step)
        if meets:
            models = (yield Await((ticket,), "neighbour"))[0]
        if gradient is None:
            return  # what was sent for a step that is not made changes nothing
        if meets:
            replica.write(merging.mixed(weights, models))
        if gradient.count:
            replica.step(gradient.value)
        step += 1


# -- elastic -----------------------------------------------------------------------------------


def _elastic_worker(
    synchrony: Synchrony, replica: Replica, snapshots: Snapshots, joined: Joined | None
) -> WorkerProgram:
    """EASGD: the step uses the gradient at the model before it met the centre (Langer, fig. 10)."""
    step = 0
    if joined is not None:  # begins with the centre, which it does not move
        step, look = joined.step, merging.Pull(replica.read(), 0.0)
        replica.write((yield from _ask([Address("centre")], [look], "server"))[0])
    while True:
        yield from _look(snapshots, step, [Address("centre")], "server")
        before = replica.read()
        meets = (step + 1) % synchrony.local_steps == 0
        if meets:
            pull = merging.Pull(before, synchrony.beta)
            ticket = yield Post(Address("centre"), pull)
        gradient: Gradient | None = yield Compute(step)
        if meets:
            centre = (yield Await((ticket,), "server"))[0]
            replica.write(merging.elastic_pull(before, centre, synchrony.alpha))
        if gradient is None:
            return
        if gradient.count:
            replica.step(gradient.value)
        step += 1


def _elastic_rounds(
    synchrony: Synchrony,
    workers: int,
    replica: Replica,
    common: merging.CommonModel,
    step: int,
) -> WorkerProgram:
    """Synchronous EASGD (Zhang et al. 2015, eq. 2.3, 2.4); every worker keeps the same centre."""
    if common.at is None:
        common.at = replica.read()
    while True:
        before = replica.read()
        meets = (step + 1) % synchrony.local_steps == 0
        if meets:
            ticket = yield Post(Address("meeting"), merging.Meet(step, before))
        gradient: Gradient | None = yield Compute(step)
        if meets:
            average = (yield Await((ticket,), "meeting"))[0]
        if gradient is None:
            return  # as above
        if meets:
            replica.write(merging.elastic_pull(before, common.at, synchrony.alpha))
            # Each worker moves the centre by beta (x_i - centre); their sum is n times the mean's.
            common.at = merging.elastic_pull(common.at, average, synchrony.beta * workers)
        if gradient.count:
            replica.step(gradient.value)
        step += 1


# -- decentral, asynchronous: others change a worker's model -------------------------------------


def _with_models(
    run: AgreementRun,
    synchrony: Synchrony,
    replicas: Sequence[Replica],
    seed: int,
    snapshots: Snapshots,
    joined: Joined | None,
) -> None:
    workers = len(replicas)
    for worker, replica in enumerate(replicas):
        weight, back = 1.0, _of(joined, worker)
        if synchrony.merge == "push_sum":
            weight = 1 / workers if back is None else 0.0
        run.add(Address("model", worker), merging.Model(replica, weight), worker)
        match synchrony.merge:
            case "pairwise":
                others = mixing.partners(synchrony.place, worker, workers)
                program = _pairwise_worker(worker, workers, others, seed, snapshots, back)
            case "push_sum":
                others = mixing.receives_from(synchrony.place, worker, workers)
                program = _gossip_worker(synchrony, worker, workers, others, seed, snapshots, back)
            case _:
                program = _tree_worker(synchrony, worker, workers, snapshots, back)
        run.programs.append(program)


def _own(worker: int, message: Any) -> Generator[Any, Any, Any]:
    """Read or change one's own model, in its turn."""
    answers = yield from _ask([Address("model", worker)], [message], "own model")
    return answers[0]


def _draws(seed: int, worker: int, joined: Joined | None) -> random.Random:
    life = "" if joined is None else f", life {joined.life}"
    return random.Random(f"whom worker {worker} meets, seed {seed}{life}")


def _asked_for(worker: int, workers: int, message: Any) -> Generator[Any, Any, Any]:
    """What the model of the first other worker says that is there; None where there is none."""
    for distance in range(1, workers):
        other = Address("model", (worker + distance) % workers)
        answer = (yield from _ask([other], [message], "neighbour"))[0]
        if answer is not None:
            return answer
    return None


def _taken_over(worker: int, workers: int, joined: Joined | None) -> Generator[Any, Any, int]:
    """One that has come back begins with the model of another; gives its first step."""
    if joined is None:
        return 0
    model = yield from _asked_for(worker, workers, merging.Read())
    if model is not None:
        yield from _own(worker, merging.Replace(model))
    return joined.step


def _pairwise_worker(
    worker: int,
    workers: int,
    others: Sequence[int],
    seed: int,
    snapshots: Snapshots,
    joined: Joined | None,
) -> WorkerProgram:
    """AD-PSGD (Lian et al. 2018, algorithm 1); without partners, only answer."""
    draws = _draws(seed, worker, joined)
    step = yield from _taken_over(worker, workers, joined)
    while True:
        yield from _look(snapshots, step, [Address("model", worker)], "own model")
        value = yield from _own(worker, merging.Read())
        ticket = None
        if others:
            partner = Address("model", draws.choice(others))
            ticket = yield Post(partner, merging.Pair(value))
        gradient: Gradient | None = yield Compute(step, value)
        if ticket is not None:
            both = (yield Await((ticket,), "neighbour"))[0]
            yield from _own(worker, merging.Replace(both))
        if gradient is None:
            return
        yield from _own(worker, merging.Update(gradient))
        step += 1


def _gossip_worker(
    synchrony: Synchrony,
    worker: int,
    workers: int,
    others: Sequence[int],
    seed: int,
    snapshots: Snapshots,
    joined: Joined | None,
) -> WorkerProgram:
    """GoSGD: now and then half of one's weight goes to somebody (Blot et al. 2016, alg. 3)."""
    draws = _draws(seed, worker, joined)
    step = 0
    if joined is not None:  # its weight has died with it: another gives it half of its own
        step = joined.step
        given = yield from _asked_for(worker, workers, merging.Halve())
        if given is None:
            given = (yield from _own(worker, merging.Read())), 1 / workers
        yield Post(Address("model", worker), merging.Gossip(*given), wants=False)
    while True:
        yield from _look(snapshots, step, [Address("model", worker)], "own model")
        value = yield from _own(worker, merging.Read())
        gradient: Gradient | None = yield Compute(step, value)
        if gradient is None:
            return
        yield from _own(worker, merging.Update(gradient))
        if others and draws.random() < synchrony.probability:
            model, weight = yield from _own(worker, merging.Halve())
            listener = Address("model", draws.choice(others))
            yield Post(listener, merging.Gossip(model, weight), wants=False)
        step += 1


def _tree_worker(
    synchrony: Synchrony, worker: int, workers: int, snapshots: Snapshots, joined: Joined | None
) -> WorkerProgram:
    """Tree EASGD: models go up and down at periods of their own (Langer et al. 2020, fig. 16)."""
    parent = mixing.tree_parent(worker)
    near: list[tuple[int, tuple[int, ...]]] = [
        (synchrony.period_up, () if parent is None else (parent,)),
        (synchrony.period_down, mixing.tree_children(worker, workers)),
    ]
    step = yield from _taken_over(worker, workers, joined)
    while True:
        yield from _look(snapshots, step, [Address("model", worker)], "own model")
        value = yield from _own(worker, merging.Read())
        gradient: Gradient | None = yield Compute(step, value)
        if gradient is None:
            return
        yield from _own(worker, merging.Update(gradient))
        step += 1
        for period, others in near:
            if others and step % period == 0:
                model = yield from _own(worker, merging.Read())
                for other in others:
                    pull = merging.Pull(model, synchrony.alpha)
                    yield Post(Address("model", other), pull, wants=False)
