"""Network namespaces: create, enter, and remove them; also inside a user namespace.

A name carries the process id and start time of its maker, so that what a dead process left is told
from what a living one uses, even where the id is used again. `NamespaceGuard` is a small process
that removes the namespaces and links of a maker as soon as that has gone; should both be killed,
the next start removes them.

`enter_user_namespace` is for users who are not root, where Linux allows it: the process becomes
root of a user, a network and a mount namespace of its own; to everybody else, and to files, it
stays the user that it was. It cannot go back, and it has left the machine's network. The kernel
removes everything made inside when the process and its children end.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import UsageError

NETNS_FOLDER = Path("/run/netns")
_NAME = re.compile(r"headway-([0-9]+)-([0-9]+)-([0-9]+)-.+")
_HOSTS = Path("/etc/hosts")
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
_NEEDED = ("ip", "tc")
_GUARD_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Tag:
    """The maker of a set of namespaces, and the number of the set.

    Attributes:
        start: When the process began, in the kernel's clock ticks.
        serial: From 0; a process may emulate several clusters at a time.
    """

    pid: int
    start: int
    serial: int

    def namespace(self, part: str) -> str:
        return f"headway-{self.pid}-{self.start}-{self.serial}-{part}"

    @property
    def link(self) -> str:
        """The host's end of its link to the hub; the kernel allows 15 letters."""
        return f"hw{self.pid}.{self.serial}"

    @property
    def alive(self) -> bool:
        return process_start(self.pid) == self.start


def process_start(pid: int) -> int | None:
    """The start time of a process in the kernel's clock ticks; None: there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # proc(5), field 22; the command's name, field 2, may contain spaces and brackets itself.
    return int(text.rpartition(")")[2].split()[19])


def check_tools() -> None:
    """Raise unless the commands of iproute2 are there.

    Raises:
        UsageError: With the name of the missing one.
    """
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        raise UsageError(
            f"the command {' and '.join(missing)} is missing",
            why="Namespaces and links are made by it.",
            fix="Install iproute2.",
        )


def run_batch(tool: str, lines: Iterable[str], *, namespace: str = "") -> None:
    """Run many commands of `ip` or `tc` in one process.

    Args:
        lines: One command each, without the tool's name.

    Raises:
        UsageError: The first command that failed, with what the kernel said.
    """
    commands = list(lines)
    done = _run_tool(tool, "-batch", "-", namespace=namespace, text="\n".join([*commands, ""]))
    if done.returncode:
        raise UsageError(
            "the emulated network could not be made or changed",
            where=_failed(tool, commands, done.stderr),
            why=" ".join(done.stderr.split()),
            fix="It needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN), and a kernel with veth, bridge, "
            "sch_htb and cls_u32.",
        )


def _run_tool(
    tool: str, *words: str, namespace: str, text: str = ""
) -> subprocess.CompletedProcess[str]:
    where = ["-n", namespace] if namespace else []
    return subprocess.run(
        [tool, *where, *words], input=text, capture_output=True, text=True, check=False
    )


def _failed(tool: str, commands: list[str], said: str) -> str:
    number = re.search(r"Command failed -:([0-9]+)", said)
    line = int(number.group(1)) - 1 if number else 0
    return f"{tool} {commands[line]}" if line < len(commands) else tool


def command_json(tool: str, *words: str, namespace: str = "") -> Any:
    """What `ip -json` or `tc -json` says, as plain data."""
    return json.loads(command_output(tool, "-json", *words, namespace=namespace) or "[]")


def command_output(tool: str, *words: str, namespace: str = "") -> str:
    """What `ip` or `tc` says; classes have no JSON form.

    Raises:
        UsageError: It fails.
    """
    done = _run_tool(tool, *words, namespace=namespace)
    if done.returncode:
        raise UsageError(
            "the emulated network cannot be read",
            where=f"{tool} {' '.join(words)}",
            why=" ".join(done.stderr.split()),
        )
    return done.stdout


def enter_namespace(name: str) -> None:
    """Move the calling thread, and all threads and processes that it starts, into a namespace.

    Sockets that are open already stay where they are.

    Raises:
        UsageError: There is no such namespace, or this user may not enter it.
    """
    try:
        descriptor = os.open(NETNS_FOLDER / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _setns(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UsageError(
            "cannot enter the namespace of a node", where=name, why=str(error.strerror)
        ) from error


def name_hosts(names: Mapping[str, str], folder: Path | None = None) -> None:
    """Give addresses names, for the calling thread and all that it starts, as if in /etc/hosts.

    Args:
        folder: For the file, which stays there if this process is killed in the middle.
    """
    # In a namespace without a route out no name server answers, and torch warns of every connection
    # whose other end has no name. The file itself is not changed: this thread gets a mount
    # namespace of its own, with another file mounted over it. Where that is not allowed (some
    # containers) addresses stay without names, and nothing else is lost.
    if not _HOSTS.exists():
        return
    lines = [_HOSTS.read_text(), "::1 localhost"]
    for address, name in names.items():
        # Sockets for both families, as torch's, see IPv4 addresses in their IPv6 form.
        lines += [f"{address} {name}", f"::ffff:{address} {name}"]
    # The mount keeps the file's content after its name is gone.
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile("w", dir=folder) as file:
        file.write("\n".join([*lines, ""]))
        file.flush()
        # Readable for programs of all users, as /etc/hosts is; a temporary file is not.
        os.chmod(file.name, 0o644)
        library_call("unshare", ctypes.c_int(CLONE_NEWNS))
        # Else the mount below would spread to the machine's own view, where mounts are shared.
        mount("none", "/", MS_REC | MS_SLAVE)
        mount(file.name, str(_HOSTS), MS_BIND)


def _setns(descriptor: int) -> None:
    setns = getattr(os, "setns", None)  # since Python 3.12
    if setns is not None:
        setns(descriptor, CLONE_NEWNET)
    else:
        library_call("setns", ctypes.c_int(descriptor), ctypes.c_int(CLONE_NEWNET))


def mount(source: str, target: str, flags: int, kind: str = "") -> None:
    """mount(2), in the calling thread's view of the file system.

    Raises:
        OSError: The kernel refuses.
    """
    words = [ctypes.c_char_p(word.encode()) for word in (source, target)]
    kinds = ctypes.c_char_p(kind.encode()) if kind else None
    library_call("mount", *words, kinds, ctypes.c_ulong(flags), None)


def library_call(name: str, *arguments: object) -> None:
    """A function of the C library that returns 0 or sets errno.

    Raises:
        OSError: With that errno.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """No other process chooses names and addresses at the same time; leaves no file behind.

    The lock is on the folder above: `ip netns add` itself locks the one with the names.
    """
    descriptor = os.open(NETNS_FOLDER.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def tags_in_use() -> set[Tag]:
    """The makers of all namespaces that are there, dead or alive."""
    names = [path.name for path in NETNS_FOLDER.iterdir()] if NETNS_FOLDER.is_dir() else []
    found = (_NAME.fullmatch(name) for name in names)
    return {
        Tag(pid=int(m.group(1)), start=int(m.group(2)), serial=int(m.group(3))) for m in found if m
    }


def remove(tag: Tag) -> None:
    """Remove everything that carries a tag; what is gone already is no error.

    The host's link goes first and the names last, so that an interrupted removal is found again.
    """
    subprocess.run(
        ["sh", "-c", removal_commands(tag)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )


def remove_stale() -> None:
    """Remove what dead processes have left."""
    for tag in tags_in_use():
        if not tag.alive:
            remove(tag)


def removal_commands(tag: Tag) -> str:
    """A shell's commands that remove everything of a tag."""
    names = NETNS_FOLDER / tag.namespace("*")
    return (
        f"ip link del {tag.link}; for f in {names}; do "
        f'[ -e "$f" ] && ip netns del "$(basename "$f")"; done; true'
    )


class NamespaceGuard:
    """A small process that waits for the end of this one, and then removes what carries its tag.

    It ignores the signals of a terminal, holds no file of this process, and its only input is a
    pipe that closes when this process ends, however it does. A line on it means an orderly end;
    without one a command of the killed maker may still be running, so it removes everything twice.
    """

    def __init__(self, tag: Tag) -> None:
        self._tag, clean = tag, removal_commands(tag)
        self._process = subprocess.Popen(
            ["sh", "-c", f"trap '' HUP INT TERM QUIT; read _ || {{ {clean}; sleep 1; }}; {clean}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",  # this process's own folder may be removed before the guard ends
            start_new_session=True,
        )

    def close(self) -> None:
        """Have it remove everything now; done here should it not be there any more."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"\n")
            self._process.stdin.close()
        try:
            self._process.wait(_GUARD_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._tag in tags_in_use():
            remove(self._tag)


_CLONE_NEWUSER = 0x10000000


def enter_user_namespace() -> bool:
    """Move this process into namespaces in which it may emulate nodes.

    Returns:
        Whether it worked; if not, the process is as it was before. It does not where the process
        has several threads, where the system forbids user namespaces, or gives them no rights.
    """
    if not _alone() or not _tried():
        return False
    _move()
    return True


def _alone() -> bool:
    # unshare(2): CLONE_NEWUSER fails with EINVAL in a process with several threads.
    tasks = Path("/proc/self/task")
    return tasks.is_dir() and len(list(tasks.iterdir())) == 1


def _tried() -> bool:
    # In a child: some systems grant the namespace, refuse its use, and there is no way back.
    child = os.fork()
    if child == 0:
        good = False
        with contextlib.suppress(OSError):
            _move()
            _run("ip netns add try && ip -n try link set lo up")
            good = True
        os._exit(0 if good else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _move() -> None:
    # Before unshare: afterwards both read as "nobody" until the maps are written.
    user, group = os.geteuid(), os.getegid()
    library_call("unshare", ctypes.c_int(_CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWNS))
    own = Path("/proc/self")
    # user_namespaces(7): without this an unprivileged process may not write its gid_map.
    (own / "setgroups").write_text("deny")
    (own / "uid_map").write_text(f"0 {user} 1")
    (own / "gid_map").write_text(f"0 {group} 1")
    mount("none", "/", MS_REC | MS_SLAVE)
    # `ip netns` keeps names there; the machine's folder belongs to the real root.
    mount("tmpfs", str(NETNS_FOLDER if NETNS_FOLDER.is_dir() else NETNS_FOLDER.parent), 0, "tmpfs")
    # The loopback of a new network namespace is down.
    _run("ip link set lo up")


def _run(commands: str) -> None:
    done = subprocess.run(["sh", "-c", commands], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr)
