"""Records what headway answers.

    record.py OUT [--part searches,...] [--only RE] [--quick] [--jobs 2] [--fresh]

Only interfaces that survive a refactoring are used: the command line as `python -m headway`, the
files it writes, and public names of `headway` (in recipes/models.py; recipes/workloads.py names the
bundled workloads). Which headway: the one that PYTHONPATH leads to. Commands are children forked
from this process, which has imported torch, but nothing of headway; --fresh starts each as a
process of its own (slow, same answers).

OUT gets one JSON per case: OUT/PART/NAME.json. What two runs on the same code do not agree in is
normalised in `normal` (texts) and `VOLATILE` (keys of JSON).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
WARM = Path(tempfile.gettempdir()) / "headway-golden-modules.txt"
PYCACHE = Path(tempfile.gettempdir()) / "headway-golden-pycache"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONHASHSEED"] = "0"
# Compiled modules lie outside of the tree that is looked at; without them a command compiles all.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["PYTHONPYCACHEPREFIX"] = str(PYCACHE)
sys.dont_write_bytecode, sys.pycache_prefix = False, str(PYCACHE)
for name in ("COLUMNS", "FORCE_COLOR", "CLICOLOR_FORCE"):
    os.environ.pop(name, None)
os.environ["NO_COLOR"] = "1"
os.environ["COLUMNS"] = "100"

PREFIX = Path(sys.prefix)
SOURCE = Path(os.environ.get("PYTHONPATH", "").split(":")[0] or "/nonexistent")

# ---- normalising -------------------------------------------------------------------------------

NUMBER = r"[0-9][0-9.,]*"
DURATION = rf"{NUMBER} ?(?:ns|us|ms|s|min|h)\b(?: {NUMBER} ?s\b)?"
TEXTS = (
    # whichever rank is the first to tell of what all ranks have found
    (r"(HW-[0-9]{4}) rank [0-9]+, ", r"\1 rank <R>, "),
    # from measured times of a link
    (r"exchange re-arranged after step.*", "exchange re-arranged <FROM MEASURED TIMES>"),
    (r"captured in .*", "captured in <T>"),
    (r"searched in .*", "searched in <T>"),
    (r"peak memory of this process .*", "<MEMORY>"),
    (rf"after {DURATION}", "after <T>"),
    (rf"in {DURATION}", "in <T>"),
    (r"\bpid [0-9]+", "pid <PID>"),
    (r"process [0-9]{3,}", "process <PID>"),
    (r"(127\.0\.0\.1|localhost):[0-9]+", "<ADDRESS>"),
    (r"0x[0-9a-f]{6,}", "<AT>"),
    # progress of `train`: which steps are told depends on time; events.jsonl has them all
    (r"^step [0-9]+/[0-9]+  .*\n", ""),
    (r"line [0-9]+, in", "line <N>, in"),
    (r"\.py:[0-9]+", ".py:<N>"),
)
VOLATILE = {
    # keys of JSON whose numbers are measured, or name a place
    "capture_seconds",
    "search_seconds",
    "captured_seconds",
    "searched_seconds",
    "elapsed",
    "peak_bytes",
    "process_bytes",
}


class Normal:
    """Makes texts of a command that ran in `folder` the same in every folder."""

    def __init__(self, folder: Path) -> None:
        self.names = [
            (str(folder), "<WORK>"), (str(SOURCE), "<SRC>"), (str(PREFIX), "<VENV>"),
            (str(HERE), "<GOLDEN>"), (str(Path.home()), "<HOME>"),
        ]  # fmt: skip

    def text(self, text: str) -> str:
        for old, new in self.names:
            text = text.replace(old, new)
        for pattern, new in TEXTS:
            text = re.sub(pattern, new, text, flags=re.MULTILINE)
        return text

    def tree(self, value):
        if isinstance(value, dict):
            return {k: "<VOLATILE>" if k in VOLATILE else self.tree(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.tree(v) for v in value]
        return self.text(value) if isinstance(value, str) else value


# ---- running -----------------------------------------------------------------------------------


def warm_up() -> None:
    """Import what commands import beside headway, so that children need not."""
    import importlib
    import warnings

    warnings.simplefilter("ignore")
    for name in WARM.read_text().split() if WARM.exists() else ["torch", "numpy"]:
        try:
            importlib.import_module(name)
        except Exception:
            pass
    _export_something()
    warnings.resetwarnings()
    assert not any(n == "headway" or n.startswith("headway.") for n in sys.modules)


def _export_something() -> None:
    """What torch makes when it is first used for tracing."""
    import torch

    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.GELU())
        torch.export.export(model, (torch.ones(2, 3),), strict=False)


def run(words, cwd: Path, *, fresh=False, timeout=300, note_modules=False):
    """Run `headway WORDS` to its end; (exit code, stdout, stderr)."""
    out, err = cwd / ".out", cwd / ".err"
    if fresh:
        with out.open("wb") as o, err.open("wb") as e:
            done = subprocess.run([sys.executable, "-m", "headway", *words], cwd=cwd, stdout=o,
                                  stderr=e, stdin=subprocess.DEVNULL, timeout=timeout)  # fmt: skip
        return done.returncode, out.read_text(), err.read_text()
    child = os.fork()
    if not child:
        try:
            _become(words, cwd, out, err, note_modules)
        finally:
            os._exit(99)
    deadline = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(status), out.read_text(), err.read_text()


def _become(words, cwd, out, err, note_modules):
    os.setsid()
    os.chdir(cwd)
    for fd, path, flags in (
        (0, "/dev/null", os.O_RDONLY),
        (1, out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, fd)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (
        open(0, closefd=False), open(1, "w", closefd=False), open(2, "w", closefd=False)
    )  # fmt: skip
    sys.path[0] = str(cwd)
    sys.argv = ["headway", *map(str, words)]
    code = 0
    try:
        runpy.run_module("headway", run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 98
    if note_modules:
        names = [n for n in sys.modules if not re.match(r"(headway|models|workloads|__)", n)]
        with WARM.open("a") as file:
            file.write("\n".join(names) + "\n")
    # `atexit` of a process of its own: what runs in threads has ended by then
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


class Folder:
    """A place with all recipes in which commands run; gone afterwards."""

    def __enter__(self) -> Path:
        self.path = Path(tempfile.mkdtemp(prefix="golden-"))
        for file in (HERE / "recipes").iterdir():
            if file.is_file():
                shutil.copy(file, self.path)
        return self.path

    def __exit__(self, *_) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def as_json(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


def answer(words, cwd, **options):
    """What a command says, as a record: JSON as JSON, prose as lines."""
    code, out, err = run(words, cwd, **options)
    normal = Normal(cwd)
    found = {"words": " ".join(map(str, words)), "exit": code}
    if words[0] == "verify":  # each row of its table says how long it took
        out = re.sub(
            rf" +{DURATION}  ", "  <T>  ", re.sub(r'("seconds": )[0-9.e+-]+', r"\1-1", out)
        )
    tree = as_json(out) if "--json" in words else None
    if tree is not None:
        found["json"] = normal.tree(tree)
    else:
        found["prose"] = normal.text(out).splitlines()
    found["stderr"] = normal.text(err).splitlines()
    return found


def file_of(path: Path, cwd: Path):
    if not path.exists():
        return None
    return Normal(cwd).tree(json.loads(path.read_text()))


# ---- parts -------------------------------------------------------------------------------------


def searches(cases, options):
    for name, case in cases.items():
        yield name, lambda case=case: _search(case, options)


def _search(case, options):
    with Folder() as cwd:
        words = case["plan"].split("|")
        way = ["plan"] if case.get("short") else ["plan", "search"]
        found = {"answer": answer([*way, *words, "--json", "--out", "plan.json"], cwd, **options)}
        found["plan"] = file_of(cwd / "plan.json", cwd)
        if case.get("prose"):
            found["prose"] = answer([*way, *words, *case.get("prose_words", [])], cwd, **options)
        for number, more in enumerate(case.get("then", [])):
            found[f"then {number}"] = answer(more.split("|"), cwd, **options)
        return found


def histories(cases, options):
    for name, case in cases.items():
        yield name, lambda case=case: _history(case, options)


STEP = ("step", "loss", "samples", "epoch", "position", "lr", "norm", "wire_bytes")


def _history(case, options):
    with Folder() as cwd:
        found = {}
        for file, text in case.get("files", {}).items():
            (cwd / file).write_text(text)
        for number, more in enumerate(case.get("first", [])):
            found[f"first {number}"] = answer(more.split("|"), cwd, **options)
        words = ["train", *case["train"].split("|"), "-d", "run"]
        found["answer"] = answer(words, cwd, **options)
        for more in case.get("again", []):
            found["again"] = answer(["train", *more.split("|"), "-d", "run"], cwd, **options)
        if found["answer"]["exit"]:
            return found
        run_dir = cwd / "run"
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        found["steps"] = [{k: e.get(k) for k in STEP} for e in events if e["event"] == "step"]
        found["validation"] = [
            {k: e[k] for k in ("step", "loss", "samples")} for e in events
            if e["event"] == "validation"
        ]  # fmt: skip
        found["events"] = [e["event"] for e in events]
        found["checkpoints"] = [
            {k: e[k] for k in ("step", "bytes")} for e in events if e["event"] == "checkpoint"
        ]
        found["start"] = [
            {k: e.get(k) for k in ("step", "steps", "ranks", "batch", "plan")} for e in events
            if e["event"] == "start"
        ]  # fmt: skip
        found["plan"] = file_of(run_dir / "plan.json", cwd)
        found["parameters"] = _tensors(run_dir)
        found["done"] = _done(run_dir)
        return found


def _tensors(run_dir: Path):
    """Of the newest checkpoint: every tensor by its bytes' hash and sums, wherever it lies."""
    import torch
    from safetensors import safe_open

    newest = max((run_dir / "checkpoints").glob("step-*"))
    pieces: dict[str, list] = {}
    for path in sorted(newest.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                pieces.setdefault(name, []).append(file.get_tensor(name))
    found = {}
    for name, tensors in sorted(pieces.items()):
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        whole = [
            t.double() if not t.is_complex() else torch.view_as_real(t).double() for t in tensors
        ]
        found[name] = {
            "shapes": [list(t.shape) for t in tensors],
            "dtype": str(tensors[0].dtype),
            "sum": sum(float(t.sum()) for t in whole),
            "squares": sum(float(t.square().sum()) for t in whole),
            "sha256": digest.hexdigest()[:16],
        }
    return found


def _done(run_dir: Path):
    """What each rank did in its first two steps, as its trace says: the executed step program."""
    found = {}
    for path in sorted((run_dir / "ranks").glob("*.jsonl")):
        spans = [json.loads(line) for line in path.read_text().splitlines()]
        # whether a rank waited, or a bucket had to queue, is time's affair
        spans = [s for s in spans if s["event"] == "span" and s["step"] <= 2]
        spans = [s for s in spans if s["kind"] not in ("wait", "queued")]
        lanes: dict[str, list] = {}
        for s in sorted(spans, key=lambda s: (s["step"], s["start"])):
            lanes.setdefault(s["lane"], []).append(f"{s['step']}: {s['kind']} {s['label']}")
        found[path.stem] = {k: sorted(v) for k, v in sorted(lanes.items())}
    return found


def commands(cases, options):
    """verify, errors, others: one or several commands each; the first line of stderr by itself."""
    for name, case in cases.items():
        yield name, lambda case=case: _command(case, options)


CODE = re.compile(r"\b(HW-[0-9]{4})\b")


def _command(case, options):
    with Folder() as cwd:
        for file, text in case.get("files", {}).items():
            (cwd / file).write_text(text)
        found = {}
        words = [case["run"]] if isinstance(case["run"], str) else case["run"]
        for number, one in enumerate(words):
            said = answer(one.split("|"), cwd, **options)
            first = next((line for line in said["stderr"] if CODE.search(line)), "")
            said["code"] = CODE.search(first).group(1) if first else None
            said["first"] = first or (said["stderr"][:1] or [""])[0]
            found[str(number)] = said
        for file in case.get("keep", []):
            path = cwd / file
            found[f"file {file}"] = (
                Normal(cwd).text(path.read_text()).splitlines() if path.exists() else None
            )
        return found


PARTS = {
    "searches": searches, "histories": histories, "verify": commands, "errors": commands,
    "tools": commands,
}  # fmt: skip


def programs(out: Path) -> None:
    target = out / "programs"
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, HERE / "programs.py", target / "programs.json"], check=False)


def _record_all(wanted, target: Path, jobs: int) -> None:
    """Each case in a child forked from here, `jobs` at a time."""
    under_way: set[int] = set()

    def wait() -> None:
        pid, status = os.wait()
        under_way.discard(pid)
        if status:
            print(f"!! a case was not recorded: status {status}", flush=True)

    for name, make in wanted.items():
        while len(under_way) >= jobs:
            wait()
        child = os.fork()
        if not child:
            code = 1
            try:
                _record(name, make, target)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        under_way.add(child)
    while under_way:
        wait()


def _record(name: str, make, target: Path) -> None:
    start = time.monotonic()
    found = make()
    (target / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    codes = [v["exit"] for v in found.values() if isinstance(v, dict) and "exit" in v]
    print(f"{target.name}/{name} {codes} {time.monotonic() - start:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", default="searches,programs,histories,verify,errors,tools")
    parser.add_argument("--only", default="", help="regular expression on names of cases")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--quick", action="store_true", help="without cases that say extra = true")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--learn", action="store_true", help="write warm.txt anew")
    asked = parser.parse_args()
    place = subprocess.run(
        [sys.executable, "-c", "import headway; print(headway.__file__)"],
        capture_output=True, text=True, cwd="/",
    ).stdout.strip()  # fmt: skip
    print(f"headway: {place}", flush=True)
    global SOURCE
    SOURCE = Path(place).parent.parent
    if asked.learn:
        WARM.unlink(missing_ok=True)
    cases = {}
    for part in PARTS:
        with (HERE / "cases" / f"{part}.toml").open("rb") as file:
            cases[part] = tomllib.load(file)
    warmed = False
    for part in asked.part.split(","):
        begun = time.monotonic()
        if part == "programs":
            programs(asked.out)
        else:
            if not asked.fresh and not warmed:
                warm_up()
                warmed = True
            target = asked.out / part
            target.mkdir(parents=True, exist_ok=True)
            if not asked.only:
                for old in target.glob("*.json"):
                    old.unlink()
            options = {"fresh": asked.fresh, "note_modules": asked.learn}
            wanted = {
                name: make for name, make in PARTS[part](cases[part], options)
                if re.search(asked.only, name) and not (asked.quick and cases[part][name].get("extra"))
            }  # fmt: skip
            _record_all(wanted, target, asked.jobs)
        print(f"== {part} {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
