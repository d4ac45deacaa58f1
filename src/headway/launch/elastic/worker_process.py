"""One worker of an elastic job, as its launcher sees it: a process here, or one behind ssh."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from headway.launch.elastic.guardian import GRACE_SECONDS
from headway.launch.elastic.settings import SshOptions
from headway.launch.restart_policy import signal_name

_GUARDIAN = (sys.executable, "-m", "headway.launch.elastic.guardian")


def is_here(host: str) -> bool:
    """Whether a name of a host means this machine."""
    return host in ("localhost", "::1", socket.gethostname()) or host.startswith("127.")


def guardian_command(host: str, ssh: SshOptions, python_path: str) -> list[str]:
    """What starts a guardian on a host.

    Args:
        python_path: Where the guardian finds modules; "": where Python does.
    """
    if is_here(host):
        return [*_GUARDIAN]
    # Without a terminal nobody can answer a question.
    words = ["ssh", "-o", "BatchMode=yes"]
    if ssh.port is not None:
        words += ["-p", str(ssh.port)]
    if ssh.identity is not None:
        words += ["-i", ssh.identity]
    path = [f"PYTHONPATH={python_path}"] if python_path else []
    return [*words, host, shlex.join(["env", *path, *_GUARDIAN])]


class ElasticProcess:
    """A worker that was started.

    Args:
        variables: Of its environment.
        output: A folder for stdout and stderr, which are appended to; None: those of this process.
    """

    def __init__(
        self,
        host: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        ssh: SshOptions,
        output: Path | None,
    ) -> None:
        told = {"command": list(command), "folder": os.getcwd(), "variables": dict(variables)}
        with ExitStack() as files:
            out = err = None
            if output is not None:
                output.mkdir(parents=True, exist_ok=True)
                out, err = (
                    files.enter_context((output / name).open("ab")) for name in ("stdout", "stderr")
                )
            self._process = subprocess.Popen(
                guardian_command(host, ssh, os.environ.get("PYTHONPATH", "")),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
            )
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended at once: its status says so
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()

    def status(self) -> int | None:
        """Its exit status; None: it runs."""
        status = self._process.poll()
        if status is not None:
            self.stop()  # closes what leads to it
        return status

    def stop(self) -> None:
        """Have it end, and all that it has started; does not wait."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(OSError):
                self._process.stdin.close()

    def end(self) -> None:
        """`stop` it, and wait until it has ended."""
        self.stop()
        try:
            self._process.wait(2 * GRACE_SECONDS)
        except subprocess.TimeoutExpired:  # with it the worker dies
            self._process.kill()
            self._process.wait()


def explain_status(status: int) -> str:
    """How a process has ended, by the status that a shell says."""
    if status > 128:
        return f"was ended by {signal_name(status - 128)}"
    return f"ended with exit code {status}"
