"""Pipeline parallelism: schedules as data (schedules.py), their checks (validate.py), clock and drawing (timeline.py)
and the runtime that executes them (runtime.py). What is named here needs no torch."""

from crosscut.parallel.pipeline.schedules import (
    Action,
    Lists,
    add_communication,
    build,
    forward_only,
    gpipe,
    one_f_one_b,
    stage_ranks,
)
from crosscut.parallel.pipeline.timeline import (
    ScheduleError,
    Span,
    Timeline,
    bubble_fraction,
    draw,
    grid,
    peak_in_flight,
    simulate,
    utilisation,
)
from crosscut.parallel.pipeline.validate import validate

__all__ = [
    "Action",
    "Lists",
    "ScheduleError",
    "Span",
    "Timeline",
    "add_communication",
    "bubble_fraction",
    "build",
    "draw",
    "forward_only",
    "gpipe",
    "grid",
    "one_f_one_b",
    "peak_in_flight",
    "simulate",
    "stage_ranks",
    "utilisation",
    "validate",
]
