"""Set a report beside earlier ones: paired changes of tau, and the curve over training.

A change is called ``improved`` or ``worse`` only if the paired 95 % interval over the prompts of
both reports excludes 0. Reports with unlike settings are refused, naming the fields.
"""

from collections.abc import Sequence

import numpy as np

from drafttrain.data.errors import DraftTrainError

from .report import Comparison, CurvePoint, Report, Section
from .settings import differing_settings, require_alike
from .stats import paired_interval
from .tree import AUTOREGRESSIVE, CHAIN


def compare(new: Report, old: Report, against: str) -> list[Comparison]:
    """Change from ``old`` to ``new`` for every section and drafting method both have.

    Args:
        new: a report.
        old: the report it is held against.
        against: what ``old`` is to it, e.g. ``previous``.

    Raises:
        RecipeError: the two were measured under unlike settings; names the fields.
    """
    require_alike(new.settings, old.settings, f"the reports of steps {new.step} and {old.step}")
    earlier = {section.name: section for section in old.sections}
    return [
        _comparison(section, earlier[section.name], method, new, (old.step, against))
        for section in new.sections
        if section.name in earlier
        for method in section.per_prompt
        if method != AUTOREGRESSIVE.label and method in earlier[section.name].per_prompt
    ]


def _comparison(
    new: Section, old: Section, method: str, report: Report, against: tuple[int, str]
) -> Comparison:
    ours, theirs = new.per_prompt[method], old.per_prompt[method]
    names = sorted(ours.keys() & theirs.keys())
    if not names:
        raise DraftTrainError(
            f"{new.name}, {method}: steps {report.step} and {against[0]} share no prompt; "
            "evaluate both on the same samples"
        )
    sides = [np.array([side[name] for name in names]).T for side in (ours, theirs)]
    change = paired_interval(
        (sides[0][0], sides[0][1]),
        (sides[1][0], sides[1][1]),
        report.settings.bootstrap_resamples,
        report.settings.seed,
    )
    return Comparison(
        against=against[1],
        step=against[0],
        section=new.name,
        method=method,
        prompts=len(names),
        change=change.value,
        low=change.low,
        high=change.high,
        verdict=change.verdict,
    )


def with_history(report: Report, earlier: Sequence[Report]) -> Report:
    """Add the comparison with the previous and the best checkpoint, and the curve.

    Reports measured under unlike settings are left out of both; a note names them and the fields.
    """
    notes, alike = list(report.notes), []
    for other in sorted(earlier, key=lambda item: item.step):
        if fields := differing_settings(report.settings, other.settings):
            notes.append(f"not compared with step {other.step}: {'; '.join(fields)}")
        elif other.step < report.step:
            alike.append(other)
    comparisons: list[Comparison] = []
    if alike:
        previous, best = alike[-1], max(alike, key=_rank)
        comparisons += compare(report, previous, "previous")
        if best.step != previous.step:
            comparisons += compare(report, best, "best")
    curve = [curve_point(item) for item in [*alike, report]]
    return report.model_copy(update={"comparisons": comparisons, "curve": curve, "notes": notes})


def curve_point(report: Report) -> CurvePoint:
    """Overall tau per method, of the replay if there is one."""
    section = report.sections[0]
    rows = {method: section.overall(method) for method in section.per_prompt}
    return CurvePoint(
        step=report.step,
        section=section.name,
        tau={method: row.tau for method, row in rows.items() if row is not None},
    )


def _rank(report: Report) -> float:
    """What makes a checkpoint the best: the chain's overall tau."""
    return curve_point(report).tau.get(CHAIN.label, 0.0)
