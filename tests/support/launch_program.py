"""A launcher as a program of its own, to be sent signals: `launch_program.py ENTRY FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    from headway.launch.forkserver import start_forkserver
    from headway.launch.local import launch_local

    start_forkserver(2, ("support.launch_entries",))
    from support import launch_entries

    entry = getattr(launch_entries, sys.argv[1])
    result = launch_local(entry, (sys.argv[2],), processes=2, shutdown_seconds=3)
    print(f"{result.stopped_by} {result.results} killed {list(result.killed)}")


if __name__ == "__main__":
    main()
