"""All schedules by the names that users write; `make_schedule` makes them.
Every generator is in `SCHEDULES` once per variant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from headway.documents import nearest
from headway.errors import UsageError
from headway.schedule.generators.chimera import chimera, chimera_split
from headway.schedule.generators.dualpipe import dualpipe, dualpipe_v
from headway.schedule.generators.gpipe_and_1f1b import (
    gems,
    gpipe,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
)
from headway.schedule.generators.interleaved import breadth_first, interleaved
from headway.schedule.generators.zero_bubble import interleaved_zero_bubble, zb_h1, zbv
from headway.schedule.pipeline_schedule import PipelineSchedule


@dataclass(frozen=True, slots=True)
class NamedSchedule:
    """A schedule that users can name.

    Attributes:
        generate: Called with ranks, micro-batches, and the options below by keyword.
        options: Which of "pipes", "virtual" and "mode" it takes.
    """

    generate: Callable[..., PipelineSchedule]
    about: str
    source: str
    options: tuple[str, ...] = ()


SCHEDULES: Mapping[str, NamedSchedule] = MappingProxyType(
    {
        "gpipe": NamedSchedule(gpipe, "all forwards, then all backwards", "Huang et al. 2019"),
        "1f1b": NamedSchedule(
            one_f_one_b,
            "one forward, one backward in turn, with a flush (DAPPLE)",
            "Fan et al. 2021",
        ),
        "gems": NamedSchedule(
            gems, "two opposite copies take turns, two micro-batches active", "Jain et al. 2020"
        ),
        "interleaved": NamedSchedule(
            interleaved,
            "1f1b with several stages per rank in a loop, depth first",
            "Narayanan et al. 2021",
            ("virtual",),
        ),
        "breadth-first": NamedSchedule(
            breadth_first,
            "several stages per rank in a loop, all micro-batches at each (LoopedBFS)",
            "Lamy-Poirier 2023",
            ("virtual",),
        ),
        "zb-h1": NamedSchedule(
            zb_h1, "1f1b with weight gradients in its bubbles", "Qi et al. 2023"
        ),
        "interleaved-zero-bubble": NamedSchedule(
            interleaved_zero_bubble,
            "interleaved with weight gradients in its bubbles",
            "Qi et al. 2023",
            ("virtual",),
        ),
        "zbv": NamedSchedule(
            zbv, "two stages per rank as a V, backwards split in two", "Qi et al. 2024"
        ),
        "dualpipe": NamedSchedule(
            dualpipe, "two opposite copies, forwards and backwards in pairs", "DeepSeek-AI 2024"
        ),
        "dualpipe-v": NamedSchedule(
            dualpipe_v, "dualpipe with one copy, folded to a V", "DeepSeek-AI 2024"
        ),
        "pipedream": NamedSchedule(
            pipedream, "no flush, a step after every micro-batch", "Narayanan et al. 2019"
        ),
        "pipedream-2bw": NamedSchedule(
            pipedream_2bw, "no flush, two versions of the weights", "Narayanan et al. 2021"
        ),
        "chimera": NamedSchedule(
            chimera,
            "pipes in both directions at once",
            "Li and Hoefler 2021",
            ("pipes", "mode"),
        ),
        "chimera-doubling": NamedSchedule(
            partial(chimera, mode="doubling"),
            "chimera, two micro-batches per forward, with recomputation",
            "Li and Hoefler 2021",
            ("pipes",),
        ),
        "chimera-halving": NamedSchedule(
            partial(chimera, mode="halving"),
            "chimera, backwards of half a micro-batch",
            "Li and Hoefler 2021",
            ("pipes",),
        ),
        "chimera-split": NamedSchedule(
            chimera_split,
            "chimera with weight gradients in its bubbles",
            "headway; Li and Hoefler 2021 with the split of Qi et al. 2023",
            ("pipes",),
        ),
    }
)
"""By name, oldest first, those without a flush and Chimera last."""


def make_schedule(
    name: str,
    *,
    stages: int,
    microbatches: int,
    pipes: int = 2,
    virtual: int = 2,
    mode: str = "direct",
) -> PipelineSchedule:
    """The schedule of a name.

    Args:
        name: A key of `SCHEDULES`.
        stages: D, the ranks of the pipeline (a looped or folded one holds several stages on each).
        microbatches: N, of one step.
        pipes: Of Chimera: how many at once, half of them in each direction.
        virtual: Of looped schedules: stages per rank.
        mode: Of Chimera: how it goes beyond N = D: "direct", "doubling" or "halving".

    Options that the schedule does not take (`NamedSchedule.options`) have no effect.

    Raises:
        UsageError: No such schedule; names the nearest.
        PlanError: The schedule is impossible with these numbers; names the legal ones.
    """
    if name not in SCHEDULES:
        raise UsageError(f"no schedule {name!r}{nearest(name, list(SCHEDULES))}")
    kind = SCHEDULES[name]
    options = {"pipes": pipes, "virtual": virtual, "mode": mode}
    return kind.generate(stages, microbatches, **{key: options[key] for key in kind.options})
