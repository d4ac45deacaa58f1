"""Kills processes of training runs at random moments, from the first millisecond on.

    PYTHONPATH=src:tests python benchmarks/kills.py --runs 100 --seed 1 --log kills.jsonl
    PYTHONPATH=src:tests python benchmarks/kills.py --summary kills.jsonl

A run is started and disturbed (`KINDS`) at random moments (`MOMENTS`), as a rule several times; if
a disturbance ends it, it is resumed, and may be disturbed again. Each signal that reaches a process
of a run that has not ended counts as one kill. In the end

- every launch has completed, or been stopped by the signal, or has ended with one true error;
- parameters are those of an undisturbed run bit by bit, and each step stands in the history once;
- nothing is left: processes, files for temporary data and below the run directory, shared memory,
  sockets, namespaces. As root (Linux) the campaign has /dev/shm and a network of its own, so that
  whatever is found there was left by the run.

A run depends on its seed "SEED/NUMBER" alone (as far as moments can be hit): `--first NUMBER`
begins with it.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
OF_TORCH = ("torchinductor_", "torchelastic_")
"""Its cache, and the logs that torchrun keeps."""
LIMIT = 200.0
STEPS = 30
SHORT_TIMEOUT = "20 s"
RESTARTS = 25
NODES = 'nodes = 2\nbetween = { rate = "10 Gbit/s" }\n'


@dataclass(frozen=True)
class Family:
    """A kind of plan: the settings of `headway train` that make it."""

    settings: tuple[str, ...] = ()
    ranks: int = 2
    recipe: str = "trapped"
    emulated: bool = False

    @property
    def command(self) -> list[str]:
        steps = "arguments.steps" if self.recipe == "trapped" else "stop"
        settings = [f"{steps}={STEPS}", *self.settings]
        settings += ["arguments.pause=0.05"] if self.recipe == "trapped" else []
        if self.recipe == "own_loop":
            torchrun = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={self.ranks}",
            ]
            return [*torchrun, "--max-restarts=20", "--monitor-interval=0.1",
                    str(HERE / "kills_own_loop.py"), "run", str(STEPS)]  # fmt: skip
        module = "recipes" if self.recipe == "trapped" else "split_recipes"
        where = ["--emulate", "cluster.toml"] if self.emulated else ["-n", str(self.ranks)]
        words = ["-m", "headway", "train", f"support.{module}:{self.recipe}", "-d", "run"]
        words += ["--device", "cpu", *where]
        return [*words, *(word for setting in settings for word in ("--set", setting))]


_STAGES = ("stages=2", "pipeline.microbatches=2")
FAMILIES = {
    "ddp": Family(),
    "loader processes": Family(("arguments.workers=2",)),
    "fp16": Family(("exchange.compress='fp16'",)),
    "int8": Family(("exchange.compress='int8'",)),
    "top-k": Family(("exchange.compress='topk:0.1'",)),
    "priority": Family(("exchange.priority=true",)),
    "bucket auto": Family(("exchange.bucket='auto'",)),
    "ring": Family(("exchange.collective='ring'",)),
    "adasum": Family(("exchange.reduce='adasum'",)),
    "hierarchical": Family(("exchange.collective='hierarchical'",), emulated=True),
    "zero-1": Family(("zero=1",)),
    "zero-2": Family(("zero=2",)),
    "zero-3": Family(("zero=3",)),
    "hybrid shards": Family(("zero=3", "shards=2"), 4),
    "pipeline": Family(("stages=2",)),
    "chimera": Family((*_STAGES, "pipeline.schedule='chimera'")),
    "pipeline x data": Family(_STAGES, 4),
    "pipeline x zero-1": Family((*_STAGES, "zero=1"), 4),
    "pipeline x zero-3": Family((*_STAGES, "zero=3"), 4),
    "tensor": Family(("split.tensor=[2]",), 2, "speaker"),
    "tensor 2-D": Family(("split.tensor=[2, 2]",), 4, "speaker"),
    "tensor x data": Family(("split.tensor=[2]",), 4, "speaker"),
    "tensor x pipeline": Family((*_STAGES, "split.tensor=[2]"), 4, "speaker"),
    "spatial": Family(("split.spatial=[2]",), 2, "segmenter"),
    "spatial x data": Family(("split.spatial=[2]",), 4, "segmenter"),
    "spatial x pipeline": Family((*_STAGES, "split.spatial=[2]"), 4, "segmenter"),
    "own loop": Family((), 2, "own_loop"),
}

KINDS = {
    # name: weight
    "rank": 150,
    "all ranks": 20,
    "forkserver": 8,
    "tracker": 6,
    "launcher": 3,
    "everything": 2,
    "SIGTERM": 1,
    "SIGINT": 1,
    "SIGINT twice": 1,
    "SIGHUP": 1,
    "SIGTERM to all": 1,
    "frozen rank": 1,
}
NUMBERS = {"SIGTERM": 15, "SIGINT": 2, "SIGINT twice": 2, "SIGHUP": 1, "SIGTERM to all": 15}
"""Signals to stop; Ctrl-C goes to the launcher's process group, as that of a terminal does."""
KINDS_OF_OWN_LOOP = {"rank": 150, "all ranks": 20, "launcher": 3, "everything": 2}
"""torchrun has neither a forkserver nor a tracker; at signals it ends as it likes."""
LAST = {"launcher", "everything", "frozen rank", *NUMBERS}
"""After these the launch ends."""
MOMENTS = ("any", "any", "birth", "start", "save", "last step", "after the last step", "restart")


# -- the processes of a run ------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def helpers(launcher: int, module: str) -> list[int]:
    return [pid for pid in children(launcher) if f"multiprocessing.{module}" in command_line(pid)]


def workers(launcher: int, folder: Path) -> list[int]:
    """The ranks: children of the forkserver, of guardians that it has forked, or of torchrun; none
    before the first is forked.

    Args:
        folder: Of the run.
    """
    if "torch.distributed.run" in command_line(launcher):
        return [pid for pid in children(launcher) if "kills_own_loop" in command_line(pid)]
    forked = [pid for server in helpers(launcher, "forkserver") for pid in children(server)]
    guardians = set()
    for note in notes(folder, "guardian"):
        with suppress(OSError, ValueError):
            guardians.add(int(note.read_text()))
    return [rank for pid in forked for rank in (children(pid) if pid in guardians else [pid])]


def notes(folder: Path, name: str) -> list[Path]:
    """What the processes of a run have written of themselves."""
    return list((folder / "tmp").glob(f"pymp-*/headway-*/attempt-*/{name}-*"))


def in_group(launcher: int) -> list[int]:
    """The processes that a terminal's Ctrl-C reaches."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == launcher:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def of_run(folder: Path) -> list[int]:
    """All processes that were started with this run's folder for temporary files."""
    mark = f"TMPDIR={folder / 'tmp'}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


# -- one launch ------------------------------------------------------------------------------------


@dataclass
class Kill:
    """A disturbance, planned and done."""

    kind: str
    moment: str
    seconds: float = 0.0
    hit: bool = False
    rank: int | None = None


@dataclass
class Launch:
    """One start of a run, with what was done to it, and how it ended."""

    family: Family
    folder: Path
    kills: list[Kill] = field(default_factory=list)
    resume: bool = False

    def start(self) -> None:
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        (self.folder / "cluster.toml").write_text(NODES)
        words = list(self.family.command)
        own = self.family.recipe == "own_loop"
        if not own:
            frozen = any(kill.kind == "frozen rank" for kill in self.kills)
            words += ["--timeout", SHORT_TIMEOUT] if frozen else []
            words += ["--restarts", str(RESTARTS)]
            words += ["--resume"] if self.resume else []
        path = os.pathsep.join((str(TESTS), str(TESTS.parent / "src")))
        self.begun = time.monotonic()
        self.output = (self.folder / "err").open("w+")
        self.job = subprocess.Popen(
            [sys.executable, *words], cwd=self.folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=self.output, start_new_session=True,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
        )  # fmt: skip

    def disturb(self, total: float, random_: random.Random) -> None:
        for number, kill in enumerate(self.kills):
            self._await(kill, total, random_, self.kills[:number])
            if self.job.poll() is not None:
                return
            kill.seconds = time.monotonic() - self.begun
            kill.hit = self._strike(kill, random_)

    def end(self) -> None:
        try:
            self.code: int | None = self.job.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.code = None
            self.stacks = [(pid, command_line(pid), state(pid)) for pid in of_run(self.folder)]
            for pid in of_run(self.folder):
                os.kill(pid, signal.SIGKILL)
        self.output.seek(0)
        self.err = self.output.read()
        self.output.close()

    def _await(self, kill: Kill, total: float, random_: random.Random, earlier: list[Kill]) -> None:
        """Wait for the moment of a kill, or the end of the job."""
        drawn = random_.random()
        before = set(workers(self.job.pid, self.folder)) if earlier else set()
        match kill.moment:
            case "any":
                self._sleep(drawn * (1.0 if earlier else 0.8 * total))
            case "start":
                self._sleep(drawn * min(1.0, total / 4))
            case "birth":  # of a rank, in its first milliseconds
                self._until(lambda: bool(set(workers(self.job.pid, self.folder)) - before))
                self._sleep(random_.choice([0, 0.02 * drawn]))
            case "restart":  # while ranks end, or others come
                self._sleep(drawn * (1.5 if earlier else 0.8 * total))
            case "save":
                self._until(lambda: any((self.folder / "run/checkpoints").glob("*.partial")))
            case "last step":
                self._until(lambda: self._steps() >= STEPS - 1)
                self._sleep(0.05 * drawn)
            case "after the last step":
                self._until(lambda: self._steps() >= STEPS)
                self._sleep(0.4 * drawn)

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= deadline)

    def _until(self, holds: Callable[[], bool]) -> None:
        while not holds() and self.job.poll() is None:
            time.sleep(0.0005)

    def _steps(self) -> int:
        """The last step in the log."""
        try:
            tail = (self.folder / "run/events.jsonl").read_text()[-3000:]
        except OSError:
            return 0
        return max(map(int, re.findall(r'"event": ?"step".*?"step": ?(\d+)', tail)), default=0)

    def _strike(self, kill: Kill, random_: random.Random) -> bool:
        launcher = self.job.pid
        match kill.kind:
            case "launcher":
                victims = [launcher]
            case "everything" | "SIGTERM to all":
                victims = of_run(self.folder)
            case "SIGINT" | "SIGINT twice":
                victims = in_group(launcher)
            case "forkserver" | "tracker":
                module = "forkserver" if kill.kind == "forkserver" else "resource_tracker"
                self._until(lambda: bool(helpers(launcher, module)))
                victims = helpers(launcher, module)
            case "rank" | "all ranks" | "frozen rank":
                self._until(lambda: bool(workers(launcher, self.folder)))
                victims = workers(launcher, self.folder)
                if kill.kind != "all ranks":
                    victims = [random_.choice(sorted(victims))] if victims else []
            case _:
                victims = [launcher]
        number = signal.SIGKILL
        if kill.kind in NUMBERS:
            number = signal.Signals(NUMBERS[kill.kind])
        elif kill.kind == "frozen rank":
            number = signal.SIGSTOP
            kill.rank = self._rank_of(victims)
        hit = 0
        for victim in victims:
            try:
                os.kill(victim, number)
                hit += 1
            except ProcessLookupError:
                continue
        if kill.kind == "SIGINT twice":
            self._sleep(0.3 * random_.random())
            for victim in in_group(launcher):
                os.kill(victim, number)
        return hit > 0

    def _rank_of(self, victims: list[int]) -> int | None:
        for note in notes(self.folder, "pid"):
            try:
                if victims and int(note.read_text()) == victims[0]:
                    return int(note.name.partition("-")[2])
            except (OSError, ValueError):
                continue
        return None

    @property
    def struck(self) -> list[Kill]:
        return [kill for kill in self.kills if kill.hit]

    def wrong(self) -> str:
        """What is wrong with the way in which the launch ended; empty: nothing."""
        if self.code is None:
            return f"no end within {LIMIT:g} s: {self.stacks}"
        kinds = {kill.kind for kill in self.struck}
        allowed = {0}
        if kinds & {"launcher", "everything"}:
            allowed |= {-signal.SIGKILL}
        for kind in kinds & set(NUMBERS):
            allowed |= {-NUMBERS[kind], 128 + NUMBERS[kind]}
        said = [line for line in self.err.splitlines() if re.match(r"HW-\d", line)]
        if self.family.recipe == "own_loop":
            # torchrun starts all again after each; what the ranks raise is that they lost a peer.
            others = set(raised(self.err)) - {"headway.errors.PeerLost"}
            if others:
                return f"raised: {sorted(others)}"
            return "" if self.code in allowed else f"exit code {self.code}"
        # Ctrl-C before any line of headway has run is Python's own affair.
        early = "KeyboardInterrupt" in self.err and "/headway/" not in self.err
        if "Traceback" in self.err and not early:
            return "a traceback"
        if self.code in allowed:
            return f"{len(said)} errors beside exit code {self.code}" if said else ""
        if len(said) != 1:
            return f"exit code {self.code} with {len(said)} errors"
        return self._untrue(said[0])

    def _untrue(self, said: str) -> str:
        """Why the one error is not the true one; empty: it is."""
        frozen = [kill for kill in self.struck if kill.kind == "frozen rank"]
        ranks = [kill for kill in self.struck if kill.kind in ("rank", "all ranks")]
        if frozen and said.startswith("HW-5001"):
            rank = frozen[0].rank
            named = rank is None or re.search(rf"\branks? ([\d, ]+and )?{rank}\b|, {rank}\b", said)
            return "" if named else f"rank {rank} was frozen"
        if len(ranks) > RESTARTS and "SIGKILL" in said:
            return ""
        return f"not true: {said}"


def raised(err: str) -> list[str]:
    """The exceptions that ended ranks; torch begins the lines of a rank with its number."""
    by_rank: dict[str, list[str]] = collections.defaultdict(list)
    for line in err.splitlines():
        rank = re.match(r"\[rank\d+\]: |", line)
        assert rank is not None
        by_rank[rank.group()].append(line[rank.end() :])
    found = []
    for lines in by_rank.values():
        text = "\n".join(lines)
        # Of a chain of exceptions the last was raised.
        text = re.sub(
            r"^\S.*\n\n(The above exception|During handling) .*\n\nTraceback .*\n", "", text,
            flags=re.MULTILINE,
        )  # fmt: skip
        for trace in re.split(r"^Traceback .*\n", text, flags=re.MULTILINE)[1:]:
            found += re.findall(r"^\S[^:\n]*", trace, flags=re.MULTILINE)[:1]
    return found


def state(pid: int) -> str:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{fields[0]} {Path(f'/proc/{pid}/wchan').read_text()}"
    except OSError:
        return ""


# -- what is left ----------------------------------------------------------------------------------


def sockets() -> Iterator[str]:
    """All that listens or is connected in this network; a closed one may linger in TIME_WAIT."""
    for name in ("tcp", "tcp6", "udp", "udp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        yield from (f"{name} {line.split()[1]}" for line in lines if line.split()[3] != "06")
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    yield from (f"unix {line.split(maxsplit=6)[6:]}" for line in lines)


def left_behind(folder: Path, alone: bool, all_killed: bool = False) -> list[str]:
    """What a launch that has ended left; waits for what is about to end by itself.

    Args:
        alone: Nothing else runs in this network, nor has anything in /dev/shm.
        all_killed: There was nobody left to remove files, which the next launch does.
    """
    deadline = time.monotonic() + 20
    while True:
        found = [f"process {pid} {command_line(pid)} {state(pid)}" for pid in of_run(folder)]
        if alone:
            found += [str(path) for path in Path("/dev/shm").iterdir()]
            found += sockets()
        if not all_killed:
            found += [
                f"tmp/{name}"
                for name in os.listdir(folder / "tmp")
                if not name.startswith(OF_TORCH)
            ]
            found += namespaces() if alone else []
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def namespaces() -> list[str]:
    """Of emulated nodes, with their links."""
    links = subprocess.check_output(["ip", "-o", "link"], text=True).splitlines()
    names = [str(path) for path in Path("/run/netns").glob("headway-*")]
    return names + [line for line in links if ": lo:" not in line]


def strange_files(run: Path, usual: set[str]) -> list[str]:
    """Files below the run directory that an undisturbed run does not have."""
    mine = kinds_of_files(run)
    return sorted(
        name for name in mine - usual if not name.startswith("failures/attempt-#-rank-#.")
    )


def kinds_of_files(run: Path) -> set[str]:
    names = (str(path.relative_to(run)) for path in run.rglob("*"))
    return {re.sub(r"\d+", "#", name) for name in names if name != "failures"}


def history_wrong(run: Path) -> str:
    """Steps follow each other in the history that counts, and samples as well."""
    from headway.report.history.reader import read_history

    steps = read_history(run).steps
    if [step.step for step in steps] != list(range(1, STEPS + 1)):
        return f"the history has the steps {[step.step for step in steps]}"
    position = (0, 0)
    for step in steps:
        begins = (step.epoch, step.position)
        if begins != position and begins != (position[0] + 1, 0):
            return f"step {step.step} begins at {begins}, not at {position}"
        position = (step.epoch, step.position + step.samples)
    return ""


# -- a campaign ------------------------------------------------------------------------------------


@dataclass
class Expected:
    """An undisturbed run."""

    tensors: dict[str, Any]
    files: set[str]
    seconds: float


def tensors(run: Path) -> dict[str, Any]:
    """Name -> tensor of the last checkpoint."""
    import torch

    from support.commands import newest_tensors

    file = run / "checkpoints" / "state.pt"
    if not file.exists():
        return newest_tensors(run)
    step, weights, state = torch.load(file)
    found = {"step": torch.tensor(step), **weights}
    for index, values in state["state"].items():
        found |= {f"{index}.{name}": torch.as_tensor(value) for name, value in values.items()}
    return found


def undisturbed(name: str, cache: Path) -> Expected:
    import torch

    file = cache / f"{name.replace(' ', '-')}.pt"
    if not file.exists():
        with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
            launch = Launch(FAMILIES[name], Path(folder))
            launch.start()
            launch.end()
            seconds = time.monotonic() - launch.begun
            if launch.code != 0:
                raise SystemExit(f"{name} fails undisturbed:\n{launch.err}")
            left = left_behind(Path(folder), alone=False)
            if left:
                raise SystemExit(f"{name} leaves behind, undisturbed: {left}")
            run = Path(folder) / "run"
            torch.save((tensors(run), kinds_of_files(run), seconds), file)
    return Expected(*torch.load(file, weights_only=False))


def plan_kills(random_: random.Random, family: Family) -> list[Kill]:
    own = family.recipe == "own_loop"
    kinds, weights = zip(*(KINDS_OF_OWN_LOOP if own else KINDS).items(), strict=True)
    kills: list[Kill] = []
    wished = random_.randint(12, 20)
    while len(kills) < wished:
        kind = random_.choices(kinds, weights)[0]
        kills.append(Kill(kind, random_.choice(MOMENTS[:4] if own else MOMENTS)))
        if kind in LAST:
            break
    # Those at the end of the run come last, or there would be nothing left to kill.
    ending = kills.pop() if kills[-1].kind in LAST else None
    kills.sort(key=lambda kill: "last step" in kill.moment)
    return [*kills, ending] if ending else kills


def run_once(seed: str, name: str, expected: Expected, alone: bool) -> dict[str, Any]:
    """One run to its end, through all kills and resumptions."""
    import torch

    random_ = random.Random(seed)
    family = FAMILIES[name]
    launches: list[Launch] = []
    wrong = ""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        while not wrong:
            kills = plan_kills(random_, family) if len(launches) < 2 else []
            launch = Launch(family, folder, kills, resume=bool(launches))
            launches.append(launch)
            launch.start()
            launch.disturb(expected.seconds, random_)
            launch.end()
            wrong = launch.wrong()
            everything = any(kill.kind == "everything" for kill in launch.struck)
            left = [] if wrong else left_behind(folder, alone, everything)
            if left:
                wrong = f"left behind: {left}"
            if launch.code == 0 or (not kills and wrong):
                break
            if not kills:
                wrong = f"exit code {launch.code} without a kill"
        run = folder / "run"
        if not wrong:
            got = tensors(run)
            same = {key for key in got if torch.equal(expected.tensors[key], got[key])}
            different = sorted(set(expected.tensors) - same)
            wrong = f"differs: {different[:3]}" if different else ""
        if not wrong and family.recipe != "own_loop":
            strange = strange_files(run, expected.files)
            wrong = f"strange files: {strange}" if strange else history_wrong(run)
        if wrong:
            kept = Path(tempfile.gettempdir()) / "headway-kills" / seed.replace("/", "-")
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(run, kept) if run.exists() else None
    return {
        "seed": seed,
        "family": name,
        "wrong": wrong,
        "launches": [
            {
                "code": launch.code,
                "kills": [vars(kill) for kill in launch.kills],
                "err": launch.err[-3000:] if wrong or launch.code not in (0,) else "",
            }
            for launch in launches
        ],
    }  # fmt: skip


def ends(record: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(family, kind, end) of each kill that hit."""
    for launch in record["launches"]:
        for kill in launch["kills"]:
            if kill["hit"]:
                error = re.search(r"^HW-\d+", launch["err"], re.MULTILINE)
                end = "WRONG" if record["wrong"] else "error" if error else "equal"
                yield record["family"], kill["kind"], end


def summary(files: list[Path]) -> int:
    """Print how many kills there were, by family, kind and end; returns the wrong runs."""
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    found = [each for record in records for each in ends(record)]
    kinds = [kind for kind in KINDS if any(each[1] == kind for each in found)]
    print(f"| family | runs | {' | '.join(kinds)} | kills | one true error |")
    print("|" + "---|" * (len(kinds) + 4))
    counts = collections.Counter((family, kind) for family, kind, _ in found)
    for name in [*FAMILIES, "all"]:
        runs = [r for r in records if name in (r["family"], "all")]
        mine = [each for each in found if name in (each[0], "all")]
        row = [sum(counts[f, kind] for f in FAMILIES if name in (f, "all")) for kind in kinds]
        errors = sum(end == "error" for *_, end in mine)
        print(f"| {name} | {len(runs)} | {' | '.join(map(str, row))} | {len(mine)} | {errors} |")
    moments = collections.Counter(
        k["moment"]
        for r in records
        for launch in r["launches"]
        for k in launch["kills"]
        if k["hit"]
    )
    print("\nmoments:", dict(moments))
    bad = [record for record in records if record["wrong"]]
    for record in bad:
        print(f"WRONG {record['seed']} {record['family']}: {record['wrong']}")
    print(f"{len(records)} runs, {len(found)} kills, {len(bad)} runs wrong")
    return len(bad)


def alone_again(arguments: list[str]) -> None:
    """As root: begin again with /dev/shm and a network of one's own."""
    if os.geteuid() or sys.platform != "linux" or os.environ.get("KILLS_ALONE"):
        return
    mounts = "mkdir -p /run/netns; for f in /dev/shm /run/netns; do mount -t tmpfs own $f; done"
    inner = f'{mounts}; ip link set lo up; exec "$@"'
    os.environ["KILLS_ALONE"] = "1"
    os.execvp(
        "unshare",
        ["unshare", "-mni", "bash", "-c", inner, "bash", sys.executable, __file__, *arguments],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--log", type=Path)
    parser.add_argument("--cache", type=Path, help="keeps the undisturbed runs")
    parser.add_argument("--summary", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.summary:
        return 1 if summary(asked.summary) else 0
    alone_again(sys.argv[1:])
    alone = bool(os.environ.get("KILLS_ALONE"))
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        cache = asked.cache or Path(scratch)
        cache.mkdir(parents=True, exist_ok=True)
        for number in range(asked.first, asked.first + asked.runs):
            name = asked.families[number % len(asked.families)]
            expected = undisturbed(name, cache)
            begin = time.monotonic()
            record = run_once(f"{asked.seed}/{number}", name, expected, alone)
            if asked.log:
                with asked.log.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            wrong += bool(record["wrong"])
            told = "; ".join(
                f"{launch['code']} after "
                + ", ".join(f"{k['kind']} at {k['seconds']:.2f} s ({k['moment']})"
                            for k in launch["kills"] if k["hit"])
                for launch in record["launches"]
            )  # fmt: skip
            print(f"{record['seed']} {name} [{told}] {time.monotonic() - begin:.0f} s: "
                  f"{record['wrong'] or 'equal'}", flush=True)  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
