"""The program `headway`; as `python -m headway` the form in which torchrun and srun start a run."""

import signal
import sys


def run() -> int:
    """Run one command; Ctrl-C while modules are imported, or after the end, prints no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from headway.cli.main import main

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(run())
