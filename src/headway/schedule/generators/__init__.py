"""Generators: one function per schedule, `name(ranks, microbatches, *, options)`, compute alone.

Each gives a `PipelineSchedule` whose order on every rank is complete without messages (`lowering`
adds them), and refuses impossible sizes with a PlanError that names the legal ones.
"""

from headway.schedule.generators.dual import dualpipe, dualpipe_v
from headway.schedule.generators.flush import gems, gpipe, one_f_one_b
from headway.schedule.generators.looped import breadth_first, interleaved
from headway.schedule.generators.stale import pipedream, pipedream_2bw
from headway.schedule.generators.zero_bubble import interleaved_zero_bubble, zb_h1, zbv

__all__ = [
    "breadth_first",
    "dualpipe",
    "dualpipe_v",
    "gems",
    "gpipe",
    "interleaved",
    "interleaved_zero_bubble",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
    "zb_h1",
    "zbv",
]
