"""All schedules by the names that users write, with their traits; `make_schedule` makes them.

Every generator is in `SCHEDULES` once per variant. Who must know something of a schedule before
there is a table asks its traits here and compares no names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple

from headway.documents import nearest
from headway.errors import PlanError, UsageError
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
        priced: (stages of one pipe on a rank, pipes) with which the search has a price for it and
            the executor runs its plans; empty: not yet.
        held: Micro-batches that a stage holds at a time, where every rank has one stage and whole
            backwards: "all" of a step, or as many as stages come behind it and one ("depth"); so
            bounds of time and memory are known without a table. "": of all others.
        placement: Of its stages, as `headway schedule search` names it, where a search for tables
            may start from this one; "": it may not.
        mode: Of a variant of Chimera: the mode that its name fixes.
        variant_of: The schedule that takes this mode as an option.
    """

    generate: Callable[..., PipelineSchedule]
    about: str
    source: str
    options: tuple[str, ...] = ()
    priced: tuple[tuple[int, int], ...] = ()
    held: Literal["all", "depth", ""] = ""
    placement: Literal["straight", "v", "loop", "both-directions", ""] = ""
    mode: str = ""
    variant_of: str = ""


SCHEDULES: Mapping[str, NamedSchedule] = MappingProxyType(
    {
        "gpipe": NamedSchedule(
            gpipe,
            "all forwards, then all backwards",
            "Huang et al. 2019",
            priced=((1, 1),),
            held="all",
            placement="straight",
        ),
        "1f1b": NamedSchedule(
            one_f_one_b,
            "one forward, one backward in turn, with a flush (DAPPLE)",
            "Fan et al. 2021",
            priced=((1, 1),),
            held="depth",
            placement="straight",
        ),
        "gems": NamedSchedule(
            gems, "two opposite copies take turns, two micro-batches active", "Jain et al. 2020"
        ),
        "interleaved": NamedSchedule(
            interleaved,
            "1f1b with several stages per rank in a loop, depth first",
            "Narayanan et al. 2021",
            ("virtual",),
            priced=((2, 1), (4, 1)),
            placement="loop",
        ),
        "breadth-first": NamedSchedule(
            breadth_first,
            "several stages per rank in a loop, all micro-batches at each (LoopedBFS)",
            "Lamy-Poirier 2023",
            ("virtual",),
            placement="loop",
        ),
        "zb-h1": NamedSchedule(
            zb_h1,
            "1f1b with weight gradients in its bubbles",
            "Qi et al. 2023",
            priced=((1, 1),),
            placement="straight",
        ),
        "interleaved-zero-bubble": NamedSchedule(
            interleaved_zero_bubble,
            "interleaved with weight gradients in its bubbles",
            "Qi et al. 2023",
            ("virtual",),
            placement="loop",
        ),
        "zbv": NamedSchedule(
            zbv,
            "two stages per rank as a V, backwards split in two",
            "Qi et al. 2024",
            priced=((2, 1),),
            placement="v",
        ),
        "dualpipe": NamedSchedule(
            dualpipe,
            "two opposite copies, forwards and backwards in pairs",
            "DeepSeek-AI 2024",
            placement="both-directions",
        ),
        "dualpipe-v": NamedSchedule(
            dualpipe_v,
            "dualpipe with one copy, folded to a V",
            "DeepSeek-AI 2024",
            priced=((2, 1),),
            placement="v",
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
            priced=((1, 2), (1, 4)),
            placement="both-directions",
        ),
        "chimera-doubling": NamedSchedule(
            partial(chimera, mode="doubling"),
            "chimera, two micro-batches per forward, with recomputation",
            "Li and Hoefler 2021",
            ("pipes",),
            placement="both-directions",
            mode="doubling",
            variant_of="chimera",
        ),
        "chimera-halving": NamedSchedule(
            partial(chimera, mode="halving"),
            "chimera, backwards of half a micro-batch",
            "Li and Hoefler 2021",
            ("pipes",),
            mode="halving",
            variant_of="chimera",
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


class ScheduleOption(NamedTuple):
    """A schedule with its options, as the search's degrees have it."""

    name: str
    virtual: int = 1
    pipes: int = 1

    def __str__(self) -> str:
        option = {"virtual": self.virtual, "pipes": self.pipes}
        words = [f"{key} {option[key]}" for key in SCHEDULES[self.name].options if key in option]
        return " ".join([self.name, *words])


PLAIN = ScheduleOption("1f1b")
"""What is taken where nothing is said."""
SCHEDULE_OPTIONS = tuple(
    ScheduleOption(name, virtual, pipes)
    for name, kind in sorted(SCHEDULES.items(), key=lambda item: item[0] != PLAIN.name)
    for virtual, pipes in kind.priced
)
"""All that the search can price and the executor can run; of equal plans the first is taken."""
RUNNABLE_SCHEDULES = tuple(dict.fromkeys(option.name for option in SCHEDULE_OPTIONS))
"""Their names."""


def schedule_option(name: str, virtual: int, pipes: int) -> ScheduleOption:
    """A schedule of which the search has a price."""
    kind = SCHEDULES[name]
    own_virtual, own_pipes = kind.priced[0]
    return ScheduleOption(
        name,
        virtual if "virtual" in kind.options else own_virtual,
        pipes if "pipes" in kind.options else own_pipes,
    )


def schedule_options(words: Sequence[str]) -> tuple[ScheduleOption, ...]:
    """Those of some names, with all their options; "all": all.

    Raises:
        PlanError: No price is known for a name.
    """
    if unknown := [word for word in words if word not in {*RUNNABLE_SCHEDULES, "all"}]:
        raise PlanError(
            "the search has no price for a schedule",
            problems=unknown,
            fix=f"Take some of {', '.join(sorted(RUNNABLE_SCHEDULES))}, or all.",
        )
    return tuple(s for s in SCHEDULE_OPTIONS if s.name in words or "all" in words)


MAX_FORWARDS = 2**20
"""Of a table: forward passes of a micro-batch through a stage. Tables take about 1 KB for each."""


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
        stages: D, the ranks of the pipeline (a looped or folded one holds several stages on each).
        pipes: Of Chimera: how many at once, half of them in each direction.
        mode: Of Chimera: how it goes beyond N = D: "direct", "doubling" or "halving".

    Options that the schedule does not take (`NamedSchedule.options`) have no effect.

    Raises:
        UsageError: No such schedule; names the nearest.
        PlanError: The schedule is impossible with these numbers; names the legal ones. Or its
            table would be too large.
    """
    if name not in SCHEDULES:
        raise UsageError(f"no schedule {name!r}{nearest(name, list(SCHEDULES))}")
    kind = SCHEDULES[name]
    forwards = stages * microbatches * (virtual if "virtual" in kind.options else 1)
    if forwards > MAX_FORWARDS:
        raise PlanError(
            f"no schedule {name} with {stages} ranks and {microbatches} micro-batches",
            problems=[f"its table would have {forwards} forward passes; at most {MAX_FORWARDS}"],
            fix="Use fewer micro-batches or stages.",
        )
    options = {"pipes": pipes, "virtual": virtual, "mode": mode}
    return kind.generate(stages, microbatches, **{key: options[key] for key in kind.options})
