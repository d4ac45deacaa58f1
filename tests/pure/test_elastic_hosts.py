"""pure: hosts of an elastic job: their order, exclusion, cooling down; what a script may print."""

from __future__ import annotations

import sys

import pytest

from headway.errors import UsageError
from headway.launch.elastic.discovery import PAUSE_SECONDS, HostDiscovery
from headway.launch.elastic.hosts import ElasticHosts, Slot, parse_hosts
from headway.launch.elastic.settings import ElasticSettings, SshOptions
from headway.launch.elastic.worker_process import explain_status, guardian_command


def named(slots):
    return [str(slot) for slot in slots]


def test_who_was_there_first_comes_first():
    hosts = ElasticHosts()
    hosts.update({"b": 1, "a": 2}, 0)
    assert named(hosts.slots()) == ["b[0]", "a[0]", "a[1]"]
    hosts.update({"c": 1, "a": 1, "b": 1}, 1)
    assert named(hosts.slots()) == ["b[0]", "a[0]", "c[0]"]
    assert named(hosts.slots(most=2)) == ["b[0]", "a[0]"]
    hosts.update({"a": 1}, 2)
    hosts.update({"b": 1, "a": 1}, 3)  # b has come back, without its state
    assert named(hosts.slots()) == ["a[0]", "b[0]"]
    assert hosts.slots(first=["b"], most=1) == (Slot("b", 0),)


def test_a_host_is_excluded_for_ever_or_twice_as_long_each_time():
    hosts = ElasticHosts()
    hosts.update({"a": 1, "b": 1}, 0)
    hosts.exclude("a", 0)
    hosts.update(None, 1e9)
    assert (named(hosts.slots()), hosts.excluded, hosts.all_excluded) == (["b[0]"], ("a",), False)
    hosts.exclude("b", 1e9)
    assert hosts.all_excluded
    hosts = ElasticHosts(cooldown=(10, 30))
    hosts.update({"a": 1}, 0)
    now = 0.0
    for seconds in (10, 20, 30, 30):
        hosts.exclude("a", now)
        assert not hosts.all_excluded
        hosts.update({"a": 1}, now + seconds - 1)
        assert hosts.slots() == ()
        now += seconds
        hosts.update(None, now)
        assert hosts.slots() == (Slot("a", 0),)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a\nb:3\n\n", {"a": 2, "b": 3}),
        ("", {}),
        ("a:0\nb", {"b": 2}),
        ("fd00::2:4", {"fd00::2": 4}),
        ("a:b", None),
        ("-x:1", None),
        ("two words", None),
        (":2", None),
    ],
)
def test_what_a_script_prints(text, found):
    if found is None:
        with pytest.raises(UsageError, match="the discovery script says"):
            parse_hosts(text, 2)
    else:
        assert parse_hosts(text, 2) == found


def polled(discovery, begin):
    """The first answer from a time on, and when it came on the clock of the test."""
    now = begin
    while (found := discovery.poll(now)) is None and discovery._process is not None:
        now = begin + 0.001
    return found


def test_a_script_runs_again_and_may_fail_later(tmp_path):
    (tmp_path / "hosts").write_text("a:1\n")
    said = []
    settings = ElasticSettings(
        start_processes=1, min_processes=1, script=f"cat {tmp_path / 'hosts'}", seconds=60
    )
    discovery = HostDiscovery(settings, said.append)
    assert polled(discovery, 0.0) == {"a": 1}
    assert discovery.poll(PAUSE_SECONDS / 2) is None
    assert discovery._process is None
    (tmp_path / "hosts").write_text("a:1\nb\n")
    assert polled(discovery, PAUSE_SECONDS + 1) == {"a": 1, "b": 1}
    (tmp_path / "hosts").unlink()
    assert polled(discovery, 9.0) is None
    assert "ended with 1; the hosts stay as they are" in said[0]
    slow = HostDiscovery(
        ElasticSettings(start_processes=1, min_processes=1, script="sleep 100", seconds=5),
        said.append,
    )
    slow.poll(0)
    assert slow.poll(4) is None
    with pytest.raises(UsageError, match="has run for 5 s"):
        slow.poll(6)


def test_another_host_is_reached_through_ssh():
    guardian = [sys.executable, "-m", "headway.launch.elastic.guardian"]
    assert guardian_command("127.0.0.1", SshOptions(), "p") == guardian
    found = guardian_command("there", SshOptions(port=23, identity="key"), "/a b")
    assert found[:-1] == ["ssh", "-o", "BatchMode=yes", "-p", "23", "-i", "key", "there"]
    assert found[-1] == f"env 'PYTHONPATH=/a b' {' '.join(guardian)}"
    assert explain_status(137) == "was ended by SIGKILL"
    assert explain_status(3) == "ended with exit code 3"
