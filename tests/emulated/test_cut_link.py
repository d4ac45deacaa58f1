"""emulated: a link that is cut without a word ends the job within ten seconds, and is named.

Packets vanish: no connection is closed, gloo's collectives wait for ever, and no launcher sees a
dead process.
"""

from __future__ import annotations

import os
import re
import subprocess
import time

import pytest

from headway.cluster import Cluster
from headway.errors import Stalled
from headway.launch.emulation import Emulation
from headway.launch.local import launch_local
from headway.run.distributed.failure_record import read_failures
from support import heartbeat_entries as entries
from support.commands import environment, events, none_left, warm_variables
from support.emulated import needs_root
from support.patience import patient

pytestmark = [needs_root, pytest.mark.filterwarnings("ignore:.*CPU cores.*:UserWarning")]

LIMIT = 15.0  # it is under 6 on a free machine
CLUSTER = """
nodes = [{ name = "a", processes = 1 }, { name = "b", processes = 1 }]
between = { rate = "100 Mbit/s" }
"""


def test_a_link_that_is_cut_in_a_collective_is_named_and_no_process_stays(tmp_path):
    with (
        Emulation(Cluster.of(2, 2, rate="50 Mbit/s")) as emulated,
        pytest.raises(Stalled) as caught,
    ):
        launch_local(
            entries.cut_in_the_middle, (str(tmp_path), emulated, ["a", "b"]),
            processes=4, emulated=emulated, directory=tmp_path,
            preload=("support.heartbeat_entries",),
        )  # fmt: skip
    seconds = time.time() - float((tmp_path / "when").read_text())
    print(f"from the cut to the error, with no process left: {seconds:.1f} s")
    assert seconds < LIMIT
    text = str(caught.value)
    # Whoever is first: the two directions are not cut at the same moment.
    assert re.match(
        r"rank 0, step 3: ranks 2 and 3 on b have sent no heartbeat for \d s"
        r"|rank [23], step 3: rank 0 on a cannot be reached from rank [23] on b",
        text,
    ), text
    assert "Nothing sent there is acknowledged: the network" in text
    for rank in range(4):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid-{rank}").read_text()), 0)
    records = {record.rank: record for record in read_failures(tmp_path, 0)}
    assert 1 not in records or records[1].secondary
    for rank in {2, 3} & records.keys():
        assert records[rank].what == f"rank 0 on a cannot be reached from rank {rank} on b"


@pytest.mark.slow
def test_the_command_names_the_cut_link_once(tmp_path):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    with subprocess.Popen(
        ("headway", "train", "support.recipes:trapped", "-d", "run", "--emulate", "cluster.toml",
         "--fault", "cut link a-b at step 5", "--set", "arguments.pause=0.05"),
        cwd=tmp_path, env=environment(**warm_variables()), stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL, text=True,
    ) as job:  # fmt: skip
        assert job.stderr is not None
        lines = [(time.time(), line.rstrip()) for line in job.stderr]
        assert job.wait(timeout=patient(30)) == 5, lines
    told = [(when, line) for when, line in lines if line.startswith("HW-")]
    ((when, line),) = told
    assert line == "HW-5001 rank 0, step 5: rank 1 on b has sent no heartbeat for 5 s"
    (fault,) = events(tmp_path / "run", "fault")
    print(f"from the cut to the error: {when - fault['time']:.1f} s")
    assert when - fault["time"] < LIMIT
    assert none_left(tmp_path / "run", seconds=0.5)
