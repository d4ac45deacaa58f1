"""The user's discovery script, run again and again beside the job."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from os import killpg
from typing import IO

from headway.errors import UsageError
from headway.launch.elastic.hosts import parse_hosts
from headway.launch.elastic.settings import ElasticSettings

PAUSE_SECONDS = 1.0
"""Between two runs of the script."""


class HostDiscovery:
    """Says which hosts there are; times are seconds of a monotonic clock.

    Args:
        warn: Told of a run that has failed, except the first: that is an error.
    """

    def __init__(self, settings: ElasticSettings, warn: Callable[[str], None]) -> None:
        self._settings, self._warn = settings, warn
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._begun = self._next = 0.0
        self._first = True

    def poll(self, now: float) -> dict[str, int] | None:
        """Slots by host, if the script has ended since the last call; does not wait.

        Raises:
            UsageError: Its first run has failed.
        """
        if not self._settings.script:
            first, self._first = self._first, False
            return dict(self._settings.hosts) if first else None
        if self._process is None:
            if now >= self._next:
                self._start(now)
            return None
        late = now > self._begun + self._settings.seconds
        if self._process.poll() is None and not late:
            return None
        self._next = now + PAUSE_SECONDS
        try:
            found = self._result(self._process, late)
        except UsageError as error:
            if self._first:
                raise
            self._warn(f"{error.what}; the hosts stay as they are")
            return None
        self._first = False
        return found

    def close(self) -> None:
        """End the script."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._said is not None:
            self._said.close()
            self._said = None

    def _start(self, now: float) -> None:
        # A file: what it prints may be more than a pipe holds.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._begun = now
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", self._settings.script],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            start_new_session=True,
        )

    def _result(self, process: subprocess.Popen[bytes], late: bool) -> dict[str, int]:
        assert self._said is not None
        self._said.seek(0)
        text = self._said.read().decode(errors="replace")
        self.close()
        if late or process.returncode:
            how = f"ended with {process.returncode}"
            if late:
                how = f"has run for {self._settings.seconds:.0f} s"
            raise UsageError(
                f"the discovery script {self._settings.script!r} {how}",
                fix="Its messages are above. It prints a host in each line, as HOST or HOST:SLOTS.",
            )
        return parse_hosts(text, self._settings.default_slots)
