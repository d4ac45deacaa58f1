"""What a rank does when another one is lost: it raises in its main thread, or ends the process.

Invariant: from the loss of a rank on, this process ends within seconds, and the reason is said
before. A main thread that comes to an exchange raises there; one that waits in an exchange is let
go by breaking its connections; one that does neither (slow user code, a hang) is not waited for.
"""

from __future__ import annotations

import os
import re
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from headway.errors import HeadwayError, UsageError
from headway.run.heartbeat import PATIENCE_SECONDS, Heartbeat, Listener, connect
from headway.run.loss import Loss
from headway.run.peer import Identity
from headway.run.place import Place
from headway.run.sockets import break_connections, open_sockets

LEAST_PATIENCE_SECONDS = 2.0
_BY_ITSELF_SECONDS = 1.0
"""For the main thread to notice a closed connection, or its own error, before it is made to."""
_LET_GO_SECONDS = 1.5
"""For the main thread to report once its connections are broken."""


def check_patience(seconds: float) -> None:
    """Refuse a patience in which a few lost packets would end a job.

    Raises:
        UsageError: Less than two seconds, and not 0 (no heartbeat).
    """
    if seconds and not seconds >= LEAST_PATIENCE_SECONDS:
        raise UsageError(
            f"a patience of {seconds:g} s is too short",
            why="Ranks beat once a second.",
            fix=f"Give at least {LEAST_PATIENCE_SECONDS:g} s, or 0 to rely on time-outs alone.",
        )


class Lifeline:
    """One rank's, for as long as its world lasts.

    Args:
        place: Where this rank is; its `emergency` ends the process.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._said: tuple[str, tuple[object, ...], float] = ("", (), time.monotonic())
        self._begun = False
        self._waiting = 0
        self._over = threading.Event()
        self._kept: frozenset[str] = frozenset()
        self._heartbeat: Heartbeat | None = None

    def start(
        self, listener: Listener | None, host: str, notice: str, patience: float = PATIENCE_SECONDS
    ) -> None:
        """Begin to hear of the other ranks; later connections may be broken to let go of torch.

        Args:
            listener: Of rank 0.
            host: Where the others reach rank 0.
            notice: What rank 0's listener wants them to know; "": there is no heartbeat.
            patience: Seconds of silence until a rank is lost.
        """
        self._kept = frozenset(open_sockets().values())
        if not notice:
            return
        own = Identity.here(self._place)
        hub = None
        if listener is None:
            try:
                hub = connect(host, notice, own)
            except OSError as error:
                warnings.warn(
                    f"rank {own.rank} cannot reach the heartbeat of rank 0 ({error}): a lost rank "
                    "will only be noticed by the time-out",
                    stacklevel=2,
                )
                return
        self._heartbeat = Heartbeat(
            own,
            listener=listener,
            hub=hub,
            patience=patience,
            said=self.said,
            on_loss=self._end_all,
        )
        self._heartbeat.start()

    def stop(self, failure: str | None = None) -> None:
        """Say goodbye to the others, or with `failure` why this rank ends."""
        if failure is None:
            self._over.set()
        if self._heartbeat is not None:
            self._heartbeat.stop(failure)

    def doing(self, text: str, arguments: tuple[object, ...]) -> None:
        """Note what this rank does; the text is put together only if somebody asks."""
        self._said = (text, arguments, time.monotonic())
        if not self._begun:
            self._begun = True
            if self._heartbeat is not None:
                self._heartbeat.beat_now()

    def said(self) -> tuple[str, float, bool]:
        """What this rank does, since when, and whether it still prepares."""
        text, arguments, since = self._said
        return (text % arguments if arguments else text), since, not self._begun

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While the main thread is in an exchange."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def lost(self, seconds: float = 0.0) -> HeadwayError | None:
        """The error of a lost rank, if there is one.

        Args:
            seconds: For the news to arrive.
        """
        if self._heartbeat is None:
            return None
        if seconds:
            self._heartbeat.lost.wait(seconds)
        loss = self._heartbeat.loss
        return None if loss is None else self._error(loss)

    def states(self) -> dict[int, str]:
        """What each rank has been doing for how long; without those that nothing is known of."""
        if self._heartbeat is None:
            return {}
        found = self._heartbeat.states().items()
        return {rank: f"{text}, for {seconds:.0f} s" for rank, (text, seconds) in found if text}

    def _error(self, loss: Loss) -> HeadwayError:
        step = re.search(r"\bstep \d+", self.said()[0])
        error = loss.error(where=step.group() if step else "")
        error.__dict__["frozen"] = loss.frozen
        return error

    def _end_all(self, loss: Loss) -> None:
        """In the heartbeat's thread: see to it that this process ends.

        After a silence the launcher's way is taken at once: the main thread's own report could
        come too late, when the end of frozen siblings has been noticed already.
        """
        error = self._error(loss)
        if loss.kind == "silent" and self._place.emergency is not None:
            self._place.emergency(error)
        if loss.kind != "silent" and self._over.wait(_BY_ITSELF_SECONDS):
            return
        break_connections(self._kept)
        if self._over.wait(_LET_GO_SECONDS):
            return
        if self._place.emergency is not None:
            self._place.emergency(error)
        elif self._waiting:
            # A program of the user's own that even a broken connection does not let go.
            os.write(2, f"{error.code} {error}\n".encode())
            os._exit(error.exit_code)
