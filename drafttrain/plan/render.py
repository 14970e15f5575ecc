"""A plan on the screen: a row per stage, the sum, the limits of the disk, what was assumed."""

from collections.abc import Callable

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from drafttrain.data.sizes import human_bytes

from .plan import Plan
from .stage_plan import Rate, StagePlan

_UNKNOWN = "unknown"
_COLUMNS = (
    "stage", "tokens", "left", "on disk", "to write", "files", "tokens/s", "GPU-hours", "wall",
)  # fmt: skip


def to_terminal(plan: Plan) -> RenderableType:
    """The plan as a table with notes."""
    table = Table(title="Plan", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for i, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for stage in plan.stages:
        table.add_row(*_cells(stage))
    table.add_section()
    table.add_row(
        "all",
        "",
        "",
        human_bytes(sum(stage.bytes_done for stage in plan.stages)),
        human_bytes(plan.bytes_left),
        f"{sum(stage.files for stage in plan.stages):,}",
        "",
        _total([stage.gpu_hours for stage in plan.stages], _hours),
        _total([stage.wall_hours for stage in plan.stages], _duration),
    )
    return Group(table, *(Text(note) for note in _notes(plan)))


def _cells(stage: StagePlan) -> list[str]:
    return [
        stage.name,
        _count(stage.tokens),
        _count(stage.tokens_left),
        human_bytes(stage.bytes_done),
        human_bytes(stage.bytes_left),
        f"{stage.files:,}",
        _rate(stage.rate),
        _total([stage.gpu_hours], _hours),
        _total([stage.wall_hours], _duration),
    ]


def _count(tokens: int) -> str:
    """Exact below ten million, then in millions or billions; the JSON is always exact."""
    if tokens < 10**7:
        return f"{tokens:,}"
    return f"{tokens / 1e6:,.1f} M" if tokens < 10**9 else f"{tokens / 1e9:,.2f} G"


def _rate(rate: Rate | None) -> str:
    if rate is None:
        return ""
    digits = ",.0f" if rate.tokens_per_s >= 10 else ".2g"
    return f"{rate.tokens_per_s:{digits}} {rate.source}"


def _total(values: list[float | None], show: Callable[[float], str]) -> str:
    """The sum of what is known, and whether that is all."""
    known = [value for value in values if value is not None]
    if len(known) == len(values):
        return show(sum(known))
    return f"≥ {show(sum(known))}" if any(known) else _UNKNOWN


def _hours(hours: float) -> str:
    return f"{hours:,.2f}"


def _duration(hours: float) -> str:
    """Days and hours, hours and minutes, or minutes and seconds."""
    minutes, seconds = divmod(round(hours * 3600), 60)
    whole, minutes = divmod(minutes, 60)
    if whole >= 24:
        return f"{whole // 24} d {whole % 24} h"
    return f"{whole} h {minutes} min" if whole else f"{minutes} min {seconds} s"


def _notes(plan: Plan) -> list[str]:
    notes = [f"{human_bytes(limit.bytes)} {limit.name}" for limit in plan.limits]
    missing = {s.name.split()[0]: None for s in plan.stages if s.tokens_left and s.rate is None}
    if missing:
        options = ", ".join(f"--{name}-rate" for name in missing)
        notes.append(
            f"unknown times: give {options} in tokens/s (--probe SECONDS measures extract and"
            " train on this machine)"
        )
    notes.append(
        "replay follows every checkpoint; live decoding is that of one checkpoint, every response"
        " at its longest; reports and logs are not counted"
    )
    return notes
