"""What commands write: results and errors, and the progress of a run.

Standard output carries the result and nothing else, so that it can be piped; everything else goes
to standard error. All rooms of `headway.cli` may import this one; it imports none of them.
"""
