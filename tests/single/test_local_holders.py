"""single: holders of a rank that repeat a recorded order."""

from __future__ import annotations

import pytest

from headway.errors import RunError
from headway.run.synchrony.agreement_recorder import AgreementRecorder
from headway.run.synchrony.local_holders import LocalHolders, Request
from headway.synchrony.actors import Address
from headway.synchrony.history import Died, Handled, History, Joined
from headway.synchrony.merging import Model, Read
from support.plain_replicas import Descent

OWN, OTHER = Address("model", 1), Address("model", 0)


def repeated(history: History) -> LocalHolders:
    holders = LocalHolders(
        {OWN: Model(Descent(0.0, 0.1))},
        1,
        History(),
        lambda *_: None,
        lambda *_: None,
        AgreementRecorder(),
    )
    holders.repeat(history)
    return holders


def test_a_life_of_which_nobody_has_heard_is_not_waited_for() -> None:
    history = History()
    history.add(OWN, Handled(1))
    history.add(OWN, Joined(1, 1, 9))
    holders = repeated(history)
    assert not holders.ended(OWN)
    holders.take(Request(OWN, 1, Read()))
    assert holders.ended(OWN)
    holders.check_handled()


def test_a_life_of_which_others_have_heard_is() -> None:
    history, joined = History(), Joined(1, 1, 9)
    for entry in (Died(1), joined):
        history.add(OTHER, entry)
    for own in (Handled(1), joined, Handled(1)):
        history.add(OWN, own)
    holders = repeated(history)
    holders.take(Request(OWN, 1, Read()))
    assert holders.have_ended()
    with pytest.raises(RunError, match="another one"):
        holders.check_handled()
    holders.take(Request(OWN, 1, Read(), number=1))  # of the life before: nobody takes it
    holders.begin_anew({OWN: Model(Descent(0.0, 0.1))}, joined)
    assert not holders.ended(OWN)
    holders.take(Request(OWN, 1, Read(), life=1))
    holders.check_handled()
