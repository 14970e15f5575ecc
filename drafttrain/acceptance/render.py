"""A report as text: Markdown for the run folder, rich tables for the terminal.

Both show the same tables, built once as headers and cells.
"""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .live_blocks import Block, live_blocks
from .report import ALL, Comparison, LiveSection, Report, Section, TauRow

TAU_NOTE = (
    "tau counts the bonus token: tokens emitted per target forward, at least 1. "
    "accepted = tau - 1. Intervals: 95 %, bootstrap over prompts."
)
REPLAY_NOTE = (
    "Teacher-forced on the stored text, which is the target's own greedy text; other samples are "
    "left out."
)
# Titles of tables too wide or too long for a screen.
_FILE_ONLY = ("Acceptance length by slice", "Acceptance by slot", "Tokens per round", "Settings")


def blocks_of(report: Report) -> list[Block]:
    """All tables of a report, the overview first."""
    blocks = [_overview(section) for section in report.sections]
    if report.comparisons:
        blocks.append(_comparison_block(report.comparisons))
    if len(report.curve) > 1:
        blocks.append(_curve_block(report))
    for section in report.sections:
        blocks += [_slices_block(section), _slots_block(section), _histogram_block(section)]
        if section.beyond:
            blocks.append(_length_block(section, report.drafter.get("trained_length")))
        if isinstance(section, LiveSection):
            blocks += live_blocks(section)
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
    rows = [(section, row, "the target's own output") for section, row in report.judged()]
    rows += [(s, s.stored, "the stored text") for s in report.live if s.stored]
    for section, row, what in rows:
        if row.unexplained:
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


def _length_block(section: Section, trained_length: int | None) -> Block:
    return Block(
        f"Behind the trained length, {section.name}",
        ["method", "rounds within", "tau", "rounds beyond", "tau beyond"],
        [
            [
                row.method,
                f"{row.rounds_within:,}",
                "-" if row.tau_within is None else f"{row.tau_within:.3f}",
                f"{row.rounds_beyond:,}",
                f"{row.tau_beyond:.3f}",
            ]
            for row in section.beyond
        ],
        f"The longest training sample had {trained_length} tokens; anchors at and behind that "
        "position are beyond.",
    )


def _histogram_block(section: Section) -> Block:
    rows, width = [], 0
    for method, counts in section.emitted.items():
        width, total = len(counts), sum(counts)
        rows.append([method, *(f"{100 * count / total:.1f}" for count in counts[1:])])
    head = ["tokens emitted, % of rounds", *(str(k) for k in range(1, width))]
    return Block(f"Tokens per round, {section.name}", head, rows)


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
