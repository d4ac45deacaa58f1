"""A run directory as frozen records.

`reader` replays the files that a run wrote; `records` holds what comes out. Pictures and pages read
records only, never the files."""
