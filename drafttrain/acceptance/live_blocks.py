"""The tables of a report's live sections: speed, losslessness, agreement with replay."""

from collections.abc import Sequence
from dataclasses import dataclass

from .lossless import NEAR_TIE_STEPS
from .records import OutputRecord
from .report import LiveSection, LosslessRow

LOSSLESS_NOTE = (
    "Against the target's own output of the same run and seed. In float32 nothing may differ. In a "
    "16-bit type the first difference is a near-tie flip if the target's two best logits were less "
    f"than {NEAR_TIE_STEPS} x eps x |best logit| apart; behind it nothing is compared."
)
_SHOWN_DIFFERENCES = 20
_AGREEMENT = 0.02


@dataclass(frozen=True, slots=True)
class Block:
    """A titled table with an optional remark."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def live_blocks(section: LiveSection) -> list[Block]:
    """Speed, losslessness and, for greedy decoding, replay against live."""
    stages = list(section.speed[0].stage_ms) if section.speed else []
    speed = Block(
        f"Speed, {section.name}",
        [
            *("method", "tokens/s", "ratio"),
            *(f"{name}, ms/round" for name in stages),
            "prefill, ms",
            *(["peak, GB"] if section.speed and section.speed[0].peak_gb is not None else []),
        ],
        [
            [
                row.method,
                f"{row.tokens_per_second:.1f}",
                f"{row.ratio:.2f}",
                *(f"{row.stage_ms[name]:.2f}" for name in stages),
                f"{row.prefill_ms:.1f}",
                *([] if row.peak_gb is None else [f"{row.peak_gb:.1f}"]),
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
            f"{row.responses - row.identical} in {row.tokens:,}",
            str(row.near_ties),
            str(row.unexplained),
            ", ".join(_difference(item) for item in row.differences[:_SHOWN_DIFFERENCES]) or "-",
        ]
        for name, row in named
    ]
    return Block(
        f"Losslessness, {section.name}",
        [
            *("method", "identical", "differences in tokens", "near-tie flips", "unexplained"),
            "first difference (top-2 margin / bound)",
        ],
        rows,
        LOSSLESS_NOTE,
    )


def _difference(item: OutputRecord) -> str:
    margin = ""
    if item.margin is not None and item.bound is not None:
        margin = f" ({item.margin:.2g} / {item.bound:.2g})"
    return f"{item.sample_id[:8]}@{item.position}{margin}"
