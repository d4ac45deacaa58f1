"""pure: horovodrun's arguments: what is used, handed on, not needed and refused; hosts."""

from __future__ import annotations

import pytest

from headway.errors import UsageError
from headway.launch.elastic.settings import ElasticSettings, SshOptions
from headway.launch.horovodrun.arguments import OPTIONS, commands_by_host, parse_horovodrun


def parse(line: str):
    return parse_horovodrun(line.split())


def test_a_usual_command_line():
    found = parse(
        "-np 4 -H localhost:4 --gloo -p 12345 --output-filename out --reset-limit 3 "
        "python -u train.py --lr 0.1 -np 9"
    )
    assert (found.processes, found.hosts, found.restarts) == (4, (("localhost", 4),), 3)
    assert found.command == ("train.py", "--lr", "0.1", "-np", "9")
    assert found.output is not None
    assert [note.split()[0] for note in found.notes] == ["-p"]


def test_what_the_horovod_interface_goes_by_is_handed_on():
    found = parse(
        "-np 2 --fusion-threshold-mb 32 --cycle-time-ms=3.5 --start-timeout 60 --no-stall-check "
        "--timeline-filename t.json --timeline-mark-cycles --gloo-timeout-seconds 9 a.py"
    )
    assert found.variables == {
        "HOROVOD_FUSION_THRESHOLD": str(32 * 2**20),
        "HOROVOD_CYCLE_TIME": "3.5",
        "HOROVOD_START_TIMEOUT": "60",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "9",
    }
    assert found.notes == ()


def test_an_elastic_job():
    found = parse(
        "-np 3 --min-np 2 --max-np 4 --slots 2 --elastic-timeout 30 --reset-limit 5 -p 23 -i key "
        "--blacklist-cooldown-range 10 60 --network-interfaces eth1,eth2 "
        "--host-discovery-script ./hosts.sh a.py"
    )
    assert found.notes == ()
    assert (found.hosts, found.processes) == ((), 3)
    assert found.elastic == ElasticSettings(
        start_processes=3,
        min_processes=2,
        max_processes=4,
        script="./hosts.sh",
        default_slots=2,
        seconds=30,
        reset_limit=5,
        cooldown=(10, 60),
        interface="eth1",
        ssh=SshOptions(port=23, identity="key"),
    )
    alone = parse("--min-np 2 -H a:1,b:2 a.py").elastic
    assert alone is not None
    assert (alone.start_processes, alone.hosts, alone.reset_limit) == (2, {"a": 1, "b": 2}, None)
    # Without either of the two options they say nothing.
    assert [note.split()[0] for note in parse("-np 2 --max-np 4 a.py").notes] == ["--max-np"]


def test_every_option_is_used_or_says_why_not():
    names = [name for option in OPTIONS for name in option.names]
    assert len(set(names)) == len(names)
    assert all(option.says for option in OPTIONS if option.use != "used")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-np 2 --check-build --config-file c.yaml a.py", "no --check-build, --config-file"),
        ("-np 2 --min-np 3 -H a:2,b:2 a.py", "--min-np 3, -np 2 and --max-np none contradict"),
        ("-np 2 --max-np 1 --host-discovery-script s a.py", "-np 2 and --max-np 1 contradict"),
        ("-np 2 --min-np 1 a.py", "none is given"),
        ("-np 2 -H a:2 --host-discovery-script s a.py", "both are given"),
        ("-np 2 --min-np 1 -H a:1 a.py", "2 processes on 1 slot"),
        ("--min-np 1 -H a:1 --blacklist-cooldown-range 9 3 a.py", "9 3 is no range"),
        ("--min-np 1 -H a:1 --blacklist-cooldown-range 9 x a.py", "x is not a whole number"),
        ("-np 2 --tmeline-filename x a.py", "did you mean --timeline-filename"),
        ("-np two a.py", "-np two is not a whole number of at least 1"),
        ("-np 2 --cycle-time-ms nan a.py", "--cycle-time-ms nan is not a number"),
        ("-np", "-np takes 1 value"),
        ("--gloo=3 a.py", "--gloo takes 0 values"),
        ("-np 3 -H a:1,b:1 a.py", "3 processes on 2 slots"),
        ("-H a:1 --hostfile f a.py", "both given"),
        ("-H a:0 a.py", "no slots"),
        ("-np 2 bash train.sh", "starts Python programs, not bash train.sh"),
        ("-np 2", "starts Python programs, not nothing"),
    ],
)
def test_refusals(line, said):
    with pytest.raises(UsageError) as refused:
        parse(line)
    assert said in str(refused.value)


def test_a_host_file_with_tabs_and_comments(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# two\na\tslots=2\nb   slots = 3 # b\n\nc:1\nd\n")
    found = parse(f"--hostfile {path} --slots-per-host 4 a.py")
    assert found.hosts == (("a", 2), ("b", 3), ("c", 1), ("d", 4))
    assert found.processes == 10


def test_other_hosts_are_told_what_to_run():
    found = parse("-np 3 -H one:2,two:2 --cycle-time-ms 2 python -m pkg.train")
    assert [command for _, command in commands_by_host(found)] == [
        f"HOROVOD_CYCLE_TIME=2 torchrun --nnodes=2 --node-rank={rank} --nproc-per-node={processes} "
        "--master-addr=one --master-port=29500 -m pkg.train"
        for rank, processes in ((0, 2), (1, 1))
    ]
