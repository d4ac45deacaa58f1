"""single: every launcher's variables become the right Place; contradictions name the variables."""

from __future__ import annotations

import pytest

from headway.errors import UsageError
from headway.run.distributed.launch_env import (
    PORT_RANGE,
    LaunchEnv,
    derive_port,
    expand_slurm_hosts,
    user_threads,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "4711",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "node[01-02,07]",
    "SLURM_JOB_NODELIST": "login,node[01-02,07]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}


def test_nothing_set_is_alone():
    place = LaunchEnv.here({"PATH": "/bin"})
    assert place == LaunchEnv()
    assert (place.rank, place.ranks, place.found_world) == (0, 1, False)


def test_the_environment_of_the_process_is_the_default(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert LaunchEnv.here() == LaunchEnv.here(TORCHRUN)


def test_torchrun():
    assert LaunchEnv.here(TORCHRUN) == LaunchEnv(
        rank=3,
        ranks=8,
        local_rank=1,
        local_ranks=2,
        node_rank=1,
        attempt=2,
        launcher="torchrun",
        master_address="node7",
        master_port=4711,
        agent_store=True,
    )
    assert LaunchEnv.here(TORCHRUN).found_world


def test_ranks_that_share_a_machine_have_the_same_node():
    """By the name that the launcher gives, or by the number of the machine."""
    assert LaunchEnv.here(TORCHRUN).node == "node-1"
    assert LaunchEnv.here(TORCHRUN | {"HEADWAY_NODE": "left"}).node == "left"
    assert LaunchEnv.here(SRUN).node == "node-2"
    assert LaunchEnv.here(OPEN_MPI).node == LaunchEnv().node == "node-0"
    assert LaunchEnv.here(OPEN_MPI).pace is None


def test_torchrun_with_its_own_store_switched_off():
    assert not LaunchEnv.here(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store


def test_own_workers_count_attempts_themselves():
    place = LaunchEnv.here(TORCHRUN | {"HEADWAY_ATTEMPT": "7"})
    assert (place.launcher, place.attempt) == ("headway", 7)


def test_variables_set_by_hand_or_by_an_operator():
    place = LaunchEnv.here(
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "NODE_RANK": "1"}
    )
    assert (place.launcher, place.agent_store) == ("environment", False)
    assert (place.local_rank, place.node_rank) == (0, 1)
    assert (place.master_address, place.master_port) == ("head", 29500)


def test_torchrun_inside_srun_is_torchrun():
    assert LaunchEnv.here(SRUN | TORCHRUN).launcher == "torchrun"


def test_slurm():
    place = LaunchEnv.here(SRUN)
    assert (place.rank, place.ranks, place.launcher) == (5, 6, "slurm")
    assert (place.local_rank, place.local_ranks, place.node_rank) == (1, 2, 2)
    assert place.master_address == "node01"
    assert place.master_port in PORT_RANGE
    assert not place.agent_store
    assert place.found_world


def test_slurm_ranks_compute_one_port_and_other_steps_another():
    other_rank = SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    assert LaunchEnv.here(other_rank).master_port == LaunchEnv.here(SRUN).master_port
    ports = {derive_port(f"{job}.0") for job in range(200)}
    assert len(ports) > 190
    assert min(ports) >= 1024
    assert max(ports) < 32768


def test_slurm_takes_the_users_meeting_point():
    place = LaunchEnv.here(SRUN | {"MASTER_ADDR": "ib-node01", "MASTER_PORT": "5000"})
    assert (place.master_address, place.master_port) == ("ib-node01", 5000)


def test_slurm_without_a_list_of_hosts_uses_the_launching_node():
    bare = {k: v for k, v in SRUN.items() if "NODELIST" not in k}
    assert LaunchEnv.here(bare).master_address == "10.0.0.1"


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
        SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["salloc", "batch script", "one task", "interactive step of a larger allocation"],
)
def test_an_allocation_without_srun_is_alone(env):
    assert LaunchEnv.here(env) == LaunchEnv()


def test_open_mpi_on_one_machine():
    place = LaunchEnv.here(OPEN_MPI)
    assert (place.rank, place.ranks, place.local_rank, place.local_ranks) == (1, 4, 1, 4)
    assert (place.launcher, place.master_address, place.node_rank) == ("mpi", "127.0.0.1", 0)


def test_open_mpi_inside_slurm_is_open_mpi():
    """mpirun starts one daemon a machine through srun: SLURM_PROCID counts the daemons."""
    assert LaunchEnv.here(SRUN | OPEN_MPI).launcher == "mpi"


def test_open_mpi_over_machines_needs_the_address_of_rank_0():
    env = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(UsageError, match="MASTER_ADDR is missing"):
        LaunchEnv.here(env)
    place = LaunchEnv.here(env | {"MASTER_ADDR": "head"})
    assert (place.master_address, place.node_rank) == ("head", 0)


def test_mpich():
    place = LaunchEnv.here(PMI)
    assert (place.rank, place.ranks, place.local_ranks, place.launcher) == (2, 3, 3, "mpi")


def test_mpich_inside_slurm_goes_by_pmi_unless_srun_set_both():
    assert LaunchEnv.here(SRUN | PMI).launcher == "mpi"
    agreeing = {"PMI_RANK": SRUN["SLURM_PROCID"], "PMI_SIZE": SRUN["SLURM_STEP_NUM_TASKS"]}
    assert LaunchEnv.here(SRUN | agreeing).launcher == "slurm"


def test_one_mpi_process_is_alone():
    assert LaunchEnv.here({"PMI_RANK": "0", "PMI_SIZE": "1"}) == LaunchEnv()


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"RANK": "0"}, ["WORLD_SIZE"]),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, ["RANK"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR", "WORLD_SIZE=2"]),
        (TORCHRUN | {"RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
        (TORCHRUN | {"RANK": "-1"}, ["RANK", "'-1'"]),
        (TORCHRUN | {"WORLD_SIZE": "two"}, ["WORLD_SIZE", "'two'"]),
        (TORCHRUN | {"LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE", "WORLD_SIZE=8"]),
        (TORCHRUN | {"MASTER_PORT": "70000"}, ["MASTER_PORT", "70000"]),
        (SRUN | {"SLURM_PROCID": "6"}, ["SLURM_PROCID=6", "SLURM_STEP_NUM_TASKS=6"]),
        (SRUN | {"SLURM_NODEID": "3"}, ["SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"]),
        (SRUN | {"SLURM_LOCALID": "2"}, ["SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"]),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(y"}, ["SLURM_STEP_TASKS_PER_NODE", "2(y"]),
        (SRUN | {"SLURM_STEP_NODELIST": "node[1-"}, ["SLURM_STEP_NODELIST", "node[1-"]),
        ({"OMPI_COMM_WORLD_RANK": "1"}, ["OMPI_COMM_WORLD_SIZE"]),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, ["OMPI_COMM_WORLD_RANK=4"]),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "4"}, ["OMPI_COMM_WORLD_LOCAL_SIZE=4"]),
    ],
)
def test_contradictions_name_the_variables(env, names):
    with pytest.raises(UsageError) as caught:
        LaunchEnv.here(env)
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("node[01-04,07],gpu3", ["node01", "node02", "node03", "node04", "node07", "gpu3"]),
        ("node[9-11]", ["node9", "node10", "node11"]),
        ("node[098-101].cluster", [f"node{n:03d}.cluster" for n in range(98, 102)]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
    ],
)
def test_host_lists(text, hosts):
    assert expand_slurm_hosts(text) == hosts


def test_the_users_threads():
    assert user_threads({"OMP_NUM_THREADS": "3"}) == 3
    assert user_threads({"OMP_NUM_THREADS": "0"}) is None
    assert user_threads({"OMP_NUM_THREADS": "many"}) is None
    assert user_threads({}) is None
