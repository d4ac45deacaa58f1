"""Commands that are processes of their own, yet need not import torch: forked from a warm process.

`warm_path()` is a folder with `python`, `headway` and `torchrun`; with it in front of PATH a script
of the shell runs as ever, each command some five seconds of processor time cheaper. What such a
command starts by way of multiprocessing (headway's workers) is forked from it, too.

Options of the interpreter other than -m, -c and -u start the real one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import itertools
import json
import marshal
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from multiprocessing import process, util
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from support import leaks

CLIENT = Path(__file__).with_name("warm_client.py")
KINDS = ("python", "headway", "torchrun")
PRELOAD = (
    "torch", "torch.distributed", "torch.distributed.run", "torch.export", "torch.utils.data",
    "headway.launch.worker", "headway.verification", "headway.checkpoint.storage",
    "headway.run.recipe.factory", "headway.cli.train", "headway.cli.verify",
    "headway.launch.local",
    "headway.launch.preload",
)  # fmt: skip
"""The last one lets the collector work again."""
PATIENCE = 60.0
"""Seconds that the warm process may take to begin."""


@functools.cache
def warm_path() -> Path:
    """The folder with the commands; starts the warm process, which ends with this one."""
    folder = Path(tempfile.mkdtemp(prefix="headway-warm-"))
    address = folder / "socket"
    for kind in KINDS:
        words = [sys.executable, "-IS", str(CLIENT), str(address), kind]
        (folder / kind).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (folder / kind).chmod(0o755)
    # The same headway as here, which in a worktree is not the installed one.
    source = find_spec("headway")
    assert source is not None
    assert source.origin is not None
    plain = os.environ | {"PYTHONPATH": str(Path(source.origin).parent.parent)}
    server = subprocess.Popen(
        [sys.executable, "-m", "support.warm_commands", str(address)],
        cwd=Path(__file__).parent.parent, env=plain | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
    )  # fmt: skip
    leaks.KEPT.add(server.pid)
    atexit.register(_end, server)
    deadline = time.monotonic() + PATIENCE
    while not address.exists():
        assert server.poll() is None, "the warm process ended before it had begun"
        assert time.monotonic() < deadline, f"the warm process did not begin within {PATIENCE:g} s"
        time.sleep(0.02)
    return folder


def _end(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait(timeout=10)


# ---- in the warm process --------------------------------------------------------------------


def serve(address: str) -> None:
    """Fork a process for each command that comes, until standard input ends."""
    paths = _paths_of_a_script()
    gc.disable()
    for name in PRELOAD:
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(f"{address}.early")
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ, None)
        selector.register(sys.stdin.buffer, selectors.EVENT_READ, None)
        os.rename(f"{address}.early", address)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin.buffer:
                    return  # the commands that still run are killed: see `_live`
                if key.fileobj is listener:
                    _begin(listener, selector, paths)
                else:
                    _attend(key, selector)


def _paths_of_a_script() -> list[str]:
    """sys.path of a fresh interpreter without PYTHONPATH and without a folder of its own."""
    code = "import json, sys; print(json.dumps(sys.path))"
    shown = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=True)
    return list(json.loads(shown.stdout))


def _begin(listener: socket.socket, selector: selectors.BaseSelector, paths: Sequence[str]) -> None:
    line, _ = listener.accept()
    line.settimeout(10)
    head, files, _, _ = socket.recv_fds(line, 8, 3)
    missing, parts = int.from_bytes(head, "big"), []
    while missing:
        parts.append(line.recv(min(missing, 65536)))
        missing -= len(parts[-1])
        if not parts[-1]:
            line.close()
            return
    pid = os.fork()
    if not pid:
        _live(marshal.loads(b"".join(parts)), files, paths)
    for file in files:
        os.close(file)
    handle = os.pidfd_open(pid)
    job = (line, handle, pid)
    selector.register(line, selectors.EVENT_READ, job)
    selector.register(handle, selectors.EVENT_READ, job)


def _attend(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
    """A command has ended, or its client passes a signal on or is gone."""
    line, handle, pid = key.data
    if key.fileobj is line:
        passed = line.recv(1)
        os.kill(pid, passed[0] if passed else signal.SIGKILL)
        if not passed:
            selector.unregister(line)
        return
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    selector.unregister(handle)
    os.close(handle)
    if line in (k.fileobj for k in selector.get_map().values()):
        selector.unregister(line)
        line.sendall(code.to_bytes(4, "big", signed=True))
    line.close()


# ---- in the process of a command ------------------------------------------------------------


def _live(request: Any, files: Sequence[int], paths: Sequence[str]) -> NoReturn:
    """The life of a command, as an interpreter would lead it."""
    kind, words, variables, folder = request
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: dies with the warm process
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    util.spawnv_passfds = _fork_instead
    code = 1
    try:
        if "-u" in words[:1]:
            words = words[1:]
        _open_files()
        _run(kind, words, paths)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException as error:
        traceback.print_exc()
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _finish(code)


def _open_files() -> None:
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def _run(kind: str, words: list[str], paths: Sequence[str]) -> None:
    """Run a command as its console script does, or what is behind `python`."""
    extra = os.environ.get("PYTHONPATH")
    sys.path[:] = [*(extra.split(os.pathsep) if extra else []), *paths]
    sys.argv = [kind, *words]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if kind != "python":
        module = {"headway": "headway.cli.main", "torchrun": "torch.distributed.run"}[kind]
        sys.exit(importlib.import_module(module).main())
    if not words or (words[0].startswith("-") and words[0] not in ("-m", "-c")):
        os.execv(sys.executable, [sys.executable, *words])
    sys.argv = words[int(words[0].startswith("-")) :]
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv[0] = "-c"
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def _finish(code: int) -> NoReturn:
    """What an interpreter does at its end, but for taking itself apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        try:
            file.flush()
        except (OSError, ValueError):
            code = code or 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _fork_instead(path: object, words: Sequence[Any], kept: Sequence[int]) -> int:
    """`multiprocessing.util.spawnv_passfds`: the forkserver of a command is forked, not started."""
    for file in (sys.stdout, sys.stderr):
        file.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        places = [-1, *sorted({0, 1, 2, *map(int, kept)}), 1024]
        for before, after in itertools.pairwise(places):
            if before + 1 < after:  # CPython 3.11 takes an empty range for all files
                os.closerange(before + 1, after)
        _open_files()
        sys.modules["__main__"] = ModuleType("__main__")
        sys.argv = ["-c"]
        with contextlib.suppress(SystemExit):
            exec(str(words[-1]), {"__name__": "__main__"})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
    shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
    os._exit(0)
