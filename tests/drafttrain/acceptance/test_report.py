"""Reports: complete, readable again, compared only with their like."""

import io
import json

import pytest
from rich.console import Console

from drafttrain.acceptance.compare import compare, with_history
from drafttrain.acceptance.config import EvalConfig
from drafttrain.acceptance.publish import build_report, publish_report
from drafttrain.acceptance.records import (
    LiveResult,
    OutputRecord,
    PromptRecord,
    ReplayResult,
    SpeedRecord,
)
from drafttrain.acceptance.render import to_markdown, to_terminal
from drafttrain.acceptance.report import read_report, report_path, report_steps
from drafttrain.acceptance.settings import EvalSettings
from drafttrain.data.errors import DraftTrainError, RecipeError

from .factory import make_drafter, make_target

CONFIG = EvalConfig(tree_budgets=[8], context_buckets=[100], bootstrap_resamples=200)
METHODS = {"autoregressive": 0, "chain": 1, "tree@8": 2}


def settings(**changes):
    hashes = ("target_fingerprint", "tokenizer_hash", "template_hash", "table_hash", "store_hash")
    values = dict.fromkeys([*hashes, "recipe_hash", "target"], "toy") | {
        "dtype": "float32",
        "template_kwargs": {"enable_thinking": True},
        "codec": "bf16",
        "taps": [1],
        "versions": {"torch": "2"},
    }
    return EvalSettings(**(values | CONFIG.model_dump() | changes))


@pytest.fixture(scope="module")
def drafter():
    return make_drafter(make_target(), block_size=4)[0].config


def record(prompt, method, emitted, **changes):
    """``emitted``: tokens of each round of one prompt."""
    values = {"source": "math", "mode": "think", "bucket": "<=100"} | changes
    counts = [emitted.count(n) for n in range(5)]
    return PromptRecord(
        sample_id=f"p{prompt}", method=method, accepted=counts[1:], emitted=counts, **values
    )


def replay(gain=0, prompts=12):
    """Ten rounds per prompt; the chain emits 1 or 2, one more in ``gain`` rounds."""
    records = []
    for prompt in range(prompts):
        for method, extra in METHODS.items():
            rounds = [1 + min(extra, (r + prompt) % 3) for r in range(10)]
            if extra:
                rounds[:gain] = [n + 1 for n in rounds[:gain]]
            source, bucket = ("math", "<=100") if prompt % 2 else ("chat", ">100")
            records.append(record(prompt, method, rounds, source=source, bucket=bucket))
    return ReplayResult(block_size=4, records=records, samples=prompts, skipped=3)


def live():
    records, speed, outputs = [], [], []
    for prompt in range(4):
        for method, extra in METHODS.items():
            rounds = [1 + extra] * 6
            records.append(record(prompt, method, rounds))
            speed.append(
                SpeedRecord(
                    sample_id=f"p{prompt}",
                    method=method,
                    temperature=0.0,
                    tokens=sum(rounds),
                    rounds=6,
                    prefill_seconds=0.01,
                    seconds={"draft": 0.01 * extra, "tree": 0.0, "verify": 0.06, "commit": 0.0},
                )
            )
            if extra:
                flip = {"position": 7, "margin": 0.01 * (1 + 9 * (prompt == 1)), "bound": 0.05}
                where = flip if prompt < 2 else {"position": None}
                outputs.append(
                    OutputRecord(sample_id=f"p{prompt}", method=method, temperature=0.0, **where)
                )
    replayed = [item for item in records if item.sample_id != "p3"]
    return LiveResult(
        block_size=4, records=records, replayed=replayed, speed=speed, outputs=outputs,
        stored=[OutputRecord(sample_id="p0", method="autoregressive", temperature=0.0,
                             position=None)],
    )  # fmt: skip


def report(drafter, step=100, gain=0, with_live=False, **changes):
    lives = live() if with_live else None
    return build_report(step, settings(**changes), drafter, CONFIG, replay(gain), lives)


def test_tau_is_reported_by_slice_before_any_sum(drafter):
    """(fault kind 20: a grand mean hides the slice that fails)"""
    rows = report(drafter).replay.rows
    slices = {(row.source, row.mode, row.bucket) for row in rows}
    assert slices == {
        ("chat", "think", ">100"), ("chat", "think", "all"),
        ("math", "think", "<=100"), ("math", "think", "all"), ("all", "all", "all"),
    }  # fmt: skip
    assert [row.source for row in rows][-3:] == ["all"] * 3
    for row in rows:
        assert row.accepted == row.tau - 1 and row.tau == row.tokens / row.rounds
        assert row.prompts == (12 if row.source == "all" else 6)
        if row.method == "autoregressive":
            assert (row.tau, row.low, row.high) == (1.0, 1.0, 1.0)
        else:
            assert row.low <= row.tau <= row.high


def test_slots_and_histogram_count_every_round(drafter):
    section = report(drafter).replay
    assert set(section.slots) == {"chain", "tree@8"}
    assert sum(section.emitted["chain"]) == 120
    assert section.emitted["chain"][1:3] == [40, 80]
    assert section.slots["chain"].unconditional == pytest.approx([80 / 120, 0, 0])
    assert section.slots["tree@8"].conditional == pytest.approx([80 / 120, 0.5, 0.0])


def test_sampling_in_16_bit_is_shown_but_not_judged(drafter):
    result = report(drafter, with_live=True, dtype="bfloat16")
    assert not result.lossless  # greedy: one difference is beyond the bound
    warm = result.live[0].model_copy(update={"temperature": 0.7})
    sampled = result.model_copy(update={"live": [warm]})
    assert sampled.lossless and "beyond rounding" not in to_markdown(sampled)
    exact = settings(dtype="float32")
    assert not sampled.model_copy(update={"settings": exact}).lossless


def test_peak_memory_is_shown_where_it_was_measured(drafter):
    assert "peak, GB" not in to_markdown(report(drafter, with_live=True))
    found = live()
    sizes = {"p1": 3 * 10**9}
    speed = [i.model_copy(update={"peak_bytes": sizes.get(i.sample_id, 2)}) for i in found.speed]
    measured = found.model_copy(update={"speed": speed})
    result = build_report(1, settings(), drafter, CONFIG, replay(), measured)
    assert {row.peak_gb for row in result.live[0].speed} == {3.0}
    assert "prefill, ms | peak, GB |" in to_markdown(result) and "| 3.0 |" in to_markdown(result)


def test_speed_is_relative_to_the_baseline_of_the_same_run(drafter):
    section = report(drafter, with_live=True).live[0]
    rows = {row.method: row for row in section.speed}
    assert rows["autoregressive"].tokens_per_second == pytest.approx(100)
    assert rows["autoregressive"].ratio == 1.0
    assert rows["chain"].ratio == pytest.approx(2 * 6 / 7)
    assert rows["chain"].stage_ms["verify"] == pytest.approx(10)


def test_differences_are_counted_and_those_beyond_rounding_are_named(drafter):
    """(fault kind 77)"""
    result = report(drafter, with_live=True)
    row = result.live[0].lossless[0]
    assert (row.identical, row.responses, row.near_ties, row.unexplained) == (2, 4, 1, 1)
    text = to_markdown(result)
    assert "p0@7 (0.01 / 0.05), p1@7 (0.1 / 0.05)" in text
    assert row.tokens == 4 * 12 and "| chain | 2/4 | 2 in 48 | 1 | 1 |" in text
    assert "4 x eps x |best logit|" in text
    assert not result.lossless
    assert "chain: 1 of 4 responses differ from the target's own output beyond rounding" in text


def test_replay_and_live_are_compared_on_the_replayed_prompts(drafter):
    gap = report(drafter, with_live=True).live[0].gaps[0]
    assert (gap.method, gap.prompts, gap.live, gap.replay, gap.gap) == ("chain", 3, 2.0, 2.0, 0.0)


def test_a_report_reads_back_as_it_was(drafter, tmp_path):
    written = publish_report(tmp_path, report(drafter, with_live=True))
    assert read_report(report_path(tmp_path, 100)) == written
    assert (tmp_path / "step-000100.md").read_text().startswith("# Acceptance report, step 100")
    values = json.loads((tmp_path / "step-000100.json").read_text())
    assert values["schema_version"] == 1
    assert values["settings"]["template_kwargs"] == {"enable_thinking": True}


def test_improvement_is_claimed_only_if_the_paired_interval_excludes_zero(drafter):
    """(fault kind 80)"""
    old = report(drafter, 100)
    verdicts = {
        gain: {(c.method, c.verdict) for c in compare(report(drafter, 200, gain), old, "previous")}
        for gain in (0, 3)
    }
    assert verdicts[0] == {(m, "no clear difference") for m in ("chain", "tree@8")}
    assert verdicts[3] == {(m, "improved") for m in ("chain", "tree@8")}
    assert {c.verdict for c in compare(old, report(drafter, 200, 3), "best")} == {"worse"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("template_hash", "other"),
        ("template_kwargs", {"enable_thinking": False}),
        ("temperatures", [0.0, 1.0]),
        ("max_new_tokens", 17),
        ("table_hash", "other"),
        ("dtype", "bfloat16"),
        ("target_fingerprint", "other"),
        ("tokenizer_hash", "other"),
    ],
)
def test_unlike_settings_are_refused_by_name(drafter, field, value):
    """(fault kind 79)"""
    old, new = report(drafter, 100), report(drafter, 200, **{field: value})
    with pytest.raises(RecipeError, match=rf"steps 200 and 100.*unlike settings.*{field}: "):
        compare(new, old, "previous")


def test_all_differing_fields_are_named_at_once(drafter):
    new = report(drafter, 200, dtype="bfloat16", max_new_tokens=17)
    with pytest.raises(RecipeError, match=r"dtype: 'bfloat16', not 'float32'.*max_new_tokens: 17"):
        compare(new, report(drafter), "previous")


def test_another_recipe_or_store_codec_may_be_compared(drafter):
    new = report(drafter, 200, recipe_hash="other", codec="fp32", store_hash="x", taps=[2])
    assert compare(new, report(drafter), "previous")


def test_history_holds_the_previous_the_best_and_the_curve(drafter, tmp_path):
    for step, gain in [(100, 1), (200, 5), (300, 2)]:
        publish_report(tmp_path, report(drafter, step, gain))
    last = publish_report(tmp_path, report(drafter, 400, 3))
    assert {(c.against, c.step) for c in last.comparisons} == {("previous", 300), ("best", 200)}
    assert [point.step for point in last.curve] == [100, 200, 300, 400]
    taus = [point.tau["chain"] for point in last.curve]
    assert taus == pytest.approx([1 + (80 + 12 * gain) / 120 for gain in (1, 5, 2, 3)])
    assert list(report_steps(tmp_path)) == [100, 200, 300, 400]
    assert "tau over training" in to_markdown(last)


def test_evaluating_a_checkpoint_again_compares_with_earlier_steps_only(drafter, tmp_path):
    for step in (100, 200, 100):
        last = publish_report(tmp_path, report(drafter, step))
    assert last.comparisons == [] and [point.step for point in last.curve] == [100]


def test_unlike_and_unreadable_reports_are_left_out_of_history_and_named(drafter, tmp_path):
    """(fault kind 79)"""
    publish_report(tmp_path, report(drafter, 100, max_new_tokens=17))
    publish_report(tmp_path, report(drafter, 200))
    report_path(tmp_path, 250).write_text('{"schema_version": 99}')
    report_path(tmp_path, 260).write_text("{")
    last = publish_report(tmp_path, report(drafter, 300))
    assert [c.step for c in last.comparisons] == [200, 200]
    notes = "\n".join(last.notes)
    assert "step 100: max_new_tokens: 256, not 17" in notes
    assert "schema version 99" in notes and "step 260" in notes


def test_reports_on_other_prompts_are_not_compared(drafter):
    other = report(drafter)
    section = other.replay.model_copy(update={"per_prompt": {"chain": {"elsewhere": (10, 5)}}})
    with pytest.raises(DraftTrainError, match="share no prompt"):
        compare(report(drafter, 200), other.model_copy(update={"replay": section}), "previous")


def test_a_single_prompt_gets_no_interval_and_no_verdict(drafter):
    """(fault kind 80)"""
    reports = [
        build_report(step, settings(), drafter, CONFIG, replay(gain, prompts=1))
        for step, gain in [(100, 0), (200, 4)]
    ]
    assert reports[0].replay.overall("chain").low is None
    last = with_history(reports[1], reports[:1])
    assert {c.verdict for c in last.comparisons} == {"no clear difference"}


def test_nothing_measured_is_an_error(drafter):
    with pytest.raises(DraftTrainError, match="nothing was measured"):
        build_report(1, settings(), drafter, CONFIG, ReplayResult(block_size=4), None)


def test_the_terminal_shows_the_overview(drafter):
    console = Console(record=True, width=160, file=io.StringIO())
    console.print(to_terminal(with_history(report(drafter, 200, 3, True), [report(drafter)])))
    text = console.export_text()
    for part in ("bonus token", "accepted", "tree@8", "improved", "previous (step 100)", "tokens/s",
                 "near-tie flips", "Replay against live"):  # fmt: skip
        assert part in text, part


def test_markdown_tables_have_equal_numbers_of_cells(drafter):
    text = to_markdown(with_history(report(drafter, 200, 3, True), [report(drafter)]))
    tables = [block.split("\n") for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) >= 12
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table if line}) == 1
