"""A report as text: Markdown for the run folder, rich tables for the terminal.

Both show the same tables, built once as headers and cells.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .records import OutputRecord
from .report import ALL, Comparison, LiveSection, LosslessRow, Report, Section, TauRow

TAU_NOTE = (
    "tau counts the bonus token: tokens emitted per target forward, at least 1. "
    "accepted = tau - 1. Intervals: 95 %, bootstrap over prompts."
)
REPLAY_NOTE = (
    "Teacher-forced on the stored text, which is the target's own greedy text; other samples are "
    "left out."
)
_SHOWN_DIFFERENCES = 20
# Titles of tables too wide or too long for a screen.
_FILE_ONLY = ("Acceptance length by slice", "Acceptance by slot", "Tokens per round", "Settings")
_AGREEMENT = 0.02


@dataclass(frozen=True, slots=True)
class Block:
    """A titled table with an optional remark."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def blocks_of(report: Report) -> list[Block]:
    """All tables of a report, the overview first."""
    blocks = [_overview(section) for section in report.sections]
    if report.comparisons:
        blocks.append(_comparison_block(report.comparisons))
    if len(report.curve) > 1:
        blocks.append(_curve_block(report))
    for section in report.sections:
        blocks += [_slices_block(section), _slots_block(section), _histogram_block(section)]
        if isinstance(section, LiveSection):
            blocks += _live_blocks(section)
    blocks.append(_settings_block(report))
    return blocks


def to_markdown(report: Report) -> str:
    """The report as Markdown."""
    lines = [f"# Acceptance report, step {report.step}", "", TAU_NOTE, ""]
    for note in _notes(report):
        lines += [f"- {note}"]
    for block in blocks_of(report):
        lines += ["", f"## {block.title}", ""]
        if block.note:
            lines += [block.note, ""]
        lines.append("| " + " | ".join(block.head) + " |")
        lines.append(
            "|" + "|".join(":--" if i == 0 else "--:" for i in range(len(block.head))) + "|"
        )
        lines += ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in block.rows]
    return "\n".join(lines) + "\n"


def to_terminal(report: Report) -> RenderableType:
    """What fits a screen: overview, comparison, curve, speed, losslessness; the files hold all."""
    parts: list[RenderableType] = [
        Text(f"Acceptance report, step {report.step}", style="bold"),
        Text(TAU_NOTE, style="dim"),
    ]
    parts += [Text(note, style="yellow") for note in _notes(report)]
    for block in blocks_of(report):
        if block.title.startswith(_FILE_ONLY):
            continue
        table = Table(title=block.title, title_justify="left", box=box.SIMPLE_HEAD)
        for i, name in enumerate(block.head):
            table.add_column(name, justify="left" if i == 0 else "right", no_wrap=i == 0)
        for row in block.rows:
            table.add_row(*(Text(cell) for cell in row))
        parts.append(table)
    return Group(*parts)


def _notes(report: Report) -> list[str]:
    notes = list(report.notes)
    if report.replay:
        notes.append(
            f"replay: {report.replay_samples} samples, {report.replay_skipped} left out because "
            "they are not the target's greedy text"
        )
    for section in report.live:
        for row in [*section.lossless, *([section.stored] if section.stored else [])]:
            if row.unexplained:
                what = "the stored text" if row is section.stored else "the target's own output"
                notes.append(
                    f"{section.name}, {row.method}: {row.unexplained} of {row.responses} responses "
                    f"differ from {what} beyond rounding"
                )
    return notes


def _overview(section: Section) -> Block:
    rows = [row for row in section.rows if row.source == ALL]
    title = f"Acceptance length, {section.name}"
    note = REPLAY_NOTE if section.name == "replay" else ""
    return Block(
        title, ["method", *_TAU_HEAD], [[row.method, *_tau_cells(row)] for row in rows], note
    )


_TAU_HEAD = ["tau", "95 %", "accepted", "prompts", "rounds", "tokens"]


def _tau_cells(row: TauRow) -> list[str]:
    return [
        f"{row.tau:.3f}",
        _interval(row.low, row.high),
        f"{row.accepted:.3f}",
        f"{row.prompts:,}",
        f"{row.rounds:,}",
        f"{row.tokens:,}",
    ]


def _slices_block(section: Section) -> Block:
    rows = [
        [row.source, row.mode, row.bucket, row.method, *_tau_cells(row)]
        for row in section.rows
        if row.source != ALL
    ]
    head = ["data set", "mode", "context", "method", *_TAU_HEAD]
    return Block(f"Acceptance length by slice, {section.name}", head, rows)


def _slots_block(section: Section) -> Block:
    rows, width = [], 0
    for method, rates in section.slots.items():
        width = len(rates.unconditional)
        rows.append([f"{method}, of all rounds", *(f"{rate:.3f}" for rate in rates.unconditional)])
        rows.append(
            [
                f"{method}, given slot k-1",
                *("-" if rate is None else f"{rate:.3f}" for rate in rates.conditional),
            ]
        )
    head = ["slot", *(str(k) for k in range(1, width + 1))]
    return Block(f"Acceptance by slot, {section.name}", head, rows)


def _histogram_block(section: Section) -> Block:
    rows, width = [], 0
    for method, counts in section.emitted.items():
        width, total = len(counts), sum(counts)
        rows.append([method, *(f"{100 * count / total:.1f}" for count in counts[1:])])
    head = ["tokens emitted, % of rounds", *(str(k) for k in range(1, width))]
    return Block(f"Tokens per round, {section.name}", head, rows)


def _live_blocks(section: LiveSection) -> list[Block]:
    stages = list(section.speed[0].stage_ms) if section.speed else []
    speed = Block(
        f"Speed, {section.name}",
        ["method", "tokens/s", "ratio", *(f"{name}, ms/round" for name in stages), "prefill, ms"],
        [
            [
                row.method,
                f"{row.tokens_per_second:.1f}",
                f"{row.ratio:.2f}",
                *(f"{row.stage_ms[name]:.2f}" for name in stages),
                f"{row.prefill_ms:.1f}",
            ]
            for row in section.speed
        ],
        "Prefill is not part of tokens/s; the ratio is to autoregressive decoding in this run.",
    )
    blocks = [speed, _lossless_block(section)]
    if section.gaps:
        blocks.append(
            Block(
                f"Replay against live, {section.name}",
                ["method", "live tau", "replay tau", "gap", "prompts", ""],
                [
                    [
                        row.method,
                        f"{row.live:.3f}",
                        f"{row.replay:.3f}",
                        f"{100 * row.gap:.2f} %",
                        f"{row.prompts:,}",
                        "agrees" if row.gap <= _AGREEMENT else "DISAGREES",
                    ]
                    for row in section.gaps
                ],
                "Same prompts, same stretch of text; beyond 2 % one of the two is wrong.",
            )
        )
    return blocks


def _lossless_block(section: LiveSection) -> Block:
    named: list[tuple[str, LosslessRow]] = [(row.method, row) for row in section.lossless]
    if section.stored:
        named.append(("autoregressive against stored text", section.stored))
    rows = [
        [
            name,
            f"{row.identical}/{row.responses}",
            str(row.near_ties),
            str(row.unexplained),
            ", ".join(_difference(item) for item in row.differences[:_SHOWN_DIFFERENCES]) or "-",
        ]
        for name, row in named
    ]
    return Block(
        f"Losslessness, {section.name}",
        ["method", "identical", "near-tie flips", "unexplained", "first difference (top-2 margin)"],
        rows,
        "Against the target's own output of the same run and seed. In float32 nothing may differ.",
    )


def _difference(item: OutputRecord) -> str:
    margin = "" if item.margin is None else f" ({item.margin:.2g})"
    return f"{item.sample_id[:8]}@{item.position}{margin}"


def _comparison_block(comparisons: Sequence[Comparison]) -> Block:
    return Block(
        "Change of tau",
        ["against", "section", "method", "change", "95 %", "prompts", "verdict"],
        [
            [
                f"{item.against} (step {item.step})",
                item.section,
                item.method,
                f"{item.change:+.3f}",
                _interval(item.low, item.high, sign=True),
                f"{item.prompts:,}",
                item.verdict,
            ]
            for item in comparisons
        ],
        "Same prompts, resampled together; improved or worse only if the interval excludes 0.",
    )


def _curve_block(report: Report) -> Block:
    methods = list(report.curve[-1].tau)
    rows = [
        [str(point.step), *(f"{point.tau[m]:.3f}" if m in point.tau else "-" for m in methods)]
        for point in report.curve
    ]
    return Block(f"tau over training, {report.curve[-1].section}", ["step", *methods], rows)


def _settings_block(report: Report) -> Block:
    values = report.settings.model_dump(mode="json")
    values |= {f"drafter.{name}": value for name, value in report.drafter.items()}
    values |= {
        f"first prompt of {name}": " ".join(map(str, ids))
        for name, ids in report.prompt_heads.items()
    }
    return Block("Settings", ["setting", "value"], [[k, str(v)] for k, v in values.items()])


def _interval(low: float | None, high: float | None, sign: bool = False) -> str:
    if low is None or high is None:
        return "-"
    return f"{low:+.3f} to {high:+.3f}" if sign else f"{low:.3f} to {high:.3f}"


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
