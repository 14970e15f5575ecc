"""Evaluation results of a checkpoint -> its report files, set beside the run's earlier reports."""

import logging
from pathlib import Path

from drafttrain.data.errors import DraftTrainError
from drafttrain.data.files import write_text
from drafttrain.drafter.config import DrafterConfig

from .compare import with_history
from .config import EvalConfig
from .records import LiveResult, ReplayResult
from .render import to_markdown
from .report import Report, read_report, report_path, report_steps, write_report
from .settings import EvalSettings
from .summary import live_sections, replay_section

logger = logging.getLogger(__name__)


def build_report(
    step: int,
    settings: EvalSettings,
    drafter: DrafterConfig,
    config: EvalConfig,
    replay: ReplayResult | None,
    live: LiveResult | None = None,
) -> Report:
    """Summarise results, without history.

    Args:
        step: optimizer step of the checkpoint.
        settings: what the numbers depend on besides the drafter.
        drafter: its resolved configuration.
        config: of the evaluation.
        replay: merged over ranks, or None if the store holds no greedy text or was not replayed.
        live: merged over ranks, or None.

    Raises:
        DraftTrainError: nothing was measured.
    """
    section = replay_section(replay, config) if replay and replay.records else None
    lives = live_sections(live, config) if live and live.records else []
    if section is None and not lives:
        raise DraftTrainError(
            "nothing was measured: the evaluation store holds no greedy responses of two tokens or "
            "more for replay, and no prompt was decoded live; set eval.live_prompts, or add "
            "responses regenerated at temperature 0 to data.eval"
        )
    return Report(
        step=step,
        settings=settings,
        drafter=drafter.model_dump(mode="json"),
        replay=section,
        replay_samples=replay.samples if replay else 0,
        replay_skipped=replay.skipped if replay else 0,
        prompt_heads=replay.prompt_heads if replay else {},
        live=lives,
    )


def publish_report(folder: Path, report: Report) -> Report:
    """Add history from the reports in ``folder`` and write ``step-NNNNNN.json`` and ``.md``.

    Reports that cannot be read, or were measured under unlike settings, are named in the notes.
    """
    earlier = []
    for step in report_steps(folder):
        if step == report.step:
            continue
        try:
            earlier.append(read_report(report_path(folder, step)))
        except DraftTrainError as exc:
            logger.warning("%s", exc)
            notes = [*report.notes, f"not compared with step {step}: {exc}"]
            report = report.model_copy(update={"notes": notes})
    report = with_history(report, earlier)
    path = write_report(folder, report)
    write_text(path.with_suffix(".md"), to_markdown(report))
    return report
