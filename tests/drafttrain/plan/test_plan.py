"""The plan's arithmetic, and what it refuses."""

import json

import pytest
from rich.console import Console

from drafttrain.data.codec import CODECS
from drafttrain.data.errors import DataError, StoreError
from drafttrain.data.samples import make_sample, read_table, write_table
from drafttrain.extract.target import load_target
from drafttrain.extract.worker import extract
from drafttrain.plan.plan import Plan, make_plan
from drafttrain.plan.render import to_terminal
from drafttrain.plan.space import Limit
from drafttrain.plan.stage_plan import Rate, StagePlan

from .factory import EVAL, TRAIN, make_run


def shown(plan) -> str:
    console = Console(width=110, force_terminal=False)
    with console.capture() as capture:
        console.print(to_terminal(plan))
    return capture.get()


def stages_of(plan) -> dict:
    return {stage.name: stage for stage in plan.stages}


def test_hours_are_tokens_over_the_rate(tmp_path):
    recipe = make_run(tmp_path)
    rates = {"extract": Rate(0.5, "given"), "train": Rate(2.0, "given"), "live": Rate(4, "given")}
    stages = stages_of(make_plan(recipe, rates, devices=4, space=None))
    train = stages["extract train"]
    assert train.tokens == train.tokens_left == sum(TRAIN)
    assert train.gpu_hours == sum(TRAIN) / 0.5 / 3600
    assert train.wall_hours == sum(TRAIN) / 0.5 / 3600 / 4
    assert stages["extract eval"].gpu_hours == sum(EVAL) / 0.5 / 3600
    # Two epochs of 24 samples are 12 steps of 4: every sample twice.
    assert stages["train"].tokens == 2 * sum(TRAIN)
    assert stages["train"].gpu_hours == 2 * sum(TRAIN) / 2.0 / 3600
    # One prompt, four methods (baseline, chain, two trees), ten tokens; one process.
    assert stages["live"].tokens == 40
    assert stages["live"].gpu_hours == stages["live"].wall_hours == 40 / 4 / 3600


def test_a_rate_that_nobody_gave_is_unknown_not_invented(tmp_path):
    plan = make_plan(make_run(tmp_path), {"train": Rate(0.1, "given")}, 1, None)
    stages = stages_of(plan)
    assert stages["extract train"].gpu_hours is stages["extract train"].wall_hours is None
    text = shown(plan)
    assert "unknown times: give --extract-rate, --live-rate" in text
    assert "≥ 4.25" in text and "0.1 given" in text  # 2 * 765 tokens at 0.1 a second
    plan.write(tmp_path / "plan.json")
    values = json.loads((tmp_path / "plan.json").read_text())
    by_name = {stage["name"]: stage for stage in values["stages"]}
    assert by_name["extract train"]["gpu_hours"] is None
    assert by_name["train"]["rate"] == {"tokens_per_s": 0.1, "source": "given"}
    assert values["bytes_left"] == plan.bytes_left and values["fits"]


def test_replay_counts_greedy_text_after_every_checkpoint(tmp_path):
    recipe = make_run(tmp_path)
    table = read_table(recipe.table("eval"))
    greedy = make_sample([1, 2, 3, 4], [0, 0, 1, 1], source="g", mode="tool", greedy=True)
    write_table(recipe.table("eval"), [*table, greedy], dict(table.manifest))
    stages = stages_of(make_plan(recipe, {}, 1, None))
    assert stages["replay"].tokens == 3 * 4  # 12 steps, a checkpoint every 5 and at the end
    assert stages["live"].tokens == 80  # one prompt of each data set


def test_too_little_space_names_every_option_with_its_bytes(tmp_path):
    """(fault kind 34)"""
    recipe = make_run(tmp_path)
    free = make_plan(recipe, {}, 1, None)
    assert free.fits and not free.proposals
    used = free.stages[0].bytes_done
    enough = make_plan(recipe, {}, 1, free.bytes_left + used)
    assert enough.fits and enough.limits[0].bytes == free.bytes_left
    plan = make_plan(recipe, {}, 1, free.bytes_left + used - 1)
    with pytest.raises(StoreError) as caught:
        plan.refuse_if_too_large()
    text = str(caught.value)
    for name in set(CODECS) - {"fp32"}:
        assert f"extract.codec={name} (fits)" in text
    assert "extract.final_hidden=false (fits)" in text
    assert "extract.taps=2 (fits)" in text
    assert "23 of 24 training samples (data.train.N.limit) (fits)" in text
    assert "extract.features=rolling extract.budget=" in text
    assert "extract.features=online (fits)" in text
    assert "left of --space" in text


def planned_in(space: float, recipe, **extract):
    """The plan of a fresh run with other ``extract:`` values, in so many bytes."""
    changed = recipe.extract.model_copy(update=extract)
    return make_plan(recipe.model_copy(update={"extract": changed}), {}, 1, int(space))


@pytest.mark.parametrize("share", [0.4, 0.75, 0.95])
def test_a_proposed_setting_takes_the_bytes_that_were_named(tmp_path, share):
    """(fault kind 34)"""
    recipe = make_run(tmp_path)
    whole = make_plan(recipe, {}, 1, None)
    space = whole.stages[0].bytes_done + whole.bytes_left * share
    proposals = {p.change: p for p in planned_in(space, recipe).proposals}
    changes = {f"extract.codec={name}": {"codec": name} for name in CODECS if name != "fp32"}
    changes["extract.final_hidden=false"] = {"final_hidden": False}
    (taps,) = [int(c.split("=")[1]) for c in proposals if c.startswith("extract.taps=")]
    changes[f"extract.taps={taps}"] = {"taps": taps}
    for change, values in changes.items():
        plan = planned_in(space, recipe, **values)
        assert plan.bytes_left == proposals[change].bytes, change
        assert plan.fits == proposals[change].fits, change
    assert proposals[f"extract.taps={taps}"].fits or taps == 1
    assert not planned_in(space, recipe, taps=taps + 1).fits


@pytest.mark.parametrize("share", [0.4, 0.75, 0.95])
def test_as_many_samples_fit_as_are_proposed_and_not_one_more(tmp_path, share):
    """(fault kind 34)"""
    recipe = make_run(tmp_path)
    whole = make_plan(recipe, {}, 1, None)
    room = int(whole.bytes_left * share)
    proposals = planned_in(whole.stages[0].bytes_done + room, recipe).proposals
    (samples,) = [p for p in proposals if "samples" in p.change]
    table, count = read_table(recipe.table("train")), int(samples.change.split()[0])
    assert samples.fits and 1 <= count < len(table)
    for number in (count, count + 1):
        few = [table[i] for i in range(number)]
        write_table(recipe.table("train"), few, dict(table.manifest))
        needed = make_plan(recipe, {}, 1, None).bytes_left
        assert (needed <= room) == (number == count)
        assert (needed == samples.bytes) == (number == count)


def test_a_half_extracted_run_needs_only_the_rest(tmp_path):
    """(fault kind 34)"""
    recipe = make_run(tmp_path)
    fresh = make_plan(recipe, {}, 1, None)
    target = load_target(recipe.target)
    extract(target, recipe.extract, recipe.table("train"), recipe.store("train"))
    for path in sorted(recipe.store("train").glob("shard-*.json"))[1::2]:
        path.unlink()
    half = make_plan(recipe, {"extract": Rate(1.0, "given")}, 1, None)
    row = stages_of(half)["extract train"]
    assert 0 < row.tokens_left < row.tokens and row.gpu_hours == row.tokens_left / 3600
    assert row.bytes_done > 0 and half.bytes_left < fresh.bytes_left
    # As much as is missing is enough, although the whole would not fit.
    space = sum(p.stat().st_size for p in recipe.output.rglob("*") if p.is_file())
    assert make_plan(recipe, {}, 1, space + half.bytes_left).fits
    refused = make_plan(recipe, {}, 1, space + half.bytes_left - 1)
    assert not refused.fits
    # The old store's own bytes are free for one that starts anew.
    assert {p.change: p.fits for p in refused.proposals}["extract.codec=bf16"]


def test_without_sample_tables_the_plan_says_what_to_run(tmp_path):
    recipe = make_run(tmp_path)
    recipe.table("eval").unlink()
    with pytest.raises(DataError, match=r"eval\.parquet.*run `drafttrain data prepare` first"):
        make_plan(recipe, {}, 1, None)


def test_large_numbers_stay_on_the_screen():
    row = StagePlan(
        "extract train", 666_490_000, 666_490_000, 0, 41_000_000_000_000, 30_512,
        Rate(12_000, "probe"), 8,
    )  # fmt: skip
    unknown = StagePlan("train", 4_000_000_000, 4_000_000_000, 0, 10**14, 10**6)
    text = shown(Plan([row, row, row, unknown], [Limit("free", 10**15)], []))
    for cell in ("666.5 M", "41.0 TB", "30,512", "12,000 probe", "15.43", "1 h 55 min"):
        assert cell in text
    for cell in ("4.00 G", "100.0 TB", "223.0 TB", "1,091,536", "≥ 46.28", "≥ 5 h 47 min"):
        assert cell in text
    assert "…" not in text


def test_rolling_and_online_are_proposed_and_take_what_was_named(tmp_path):
    recipe = make_run(tmp_path, extract={"shard_tokens": 64})
    whole = make_plan(recipe, {}, 1, None)
    prepared = whole.stages[0].bytes_done
    # The store itself is smaller than what bounds reserve for tiny shards: take a larger one.
    budget = make_plan(recipe, {}, 1, None).bytes_left * 3
    rolling = {"features": "rolling", "budget": f"{budget}B"}
    plan = planned_in(10**9, recipe, **rolling)
    stages = stages_of(plan)
    assert stages["extract train"].bytes_left == budget
    assert stages["extract train"].tokens == 2 * sum(TRAIN)  # both epochs
    assert stages["extract eval"].tokens == sum(EVAL)
    with pytest.raises(StoreError, match=r"extract\.budget 1\.0 KB is too small"):
        planned_in(10**9, recipe, features="rolling", budget="1KB")
    online = planned_in(10**9, recipe, features="online")
    assert "extract train" not in stages_of(online)
    gone = whole.stages[1].bytes_left
    assert online.bytes_left == whole.bytes_left - gone
    (proposed,) = [
        p
        for p in planned_in(prepared + whole.bytes_left - 1, recipe).proposals
        if p.change == "extract.features=online"
    ]
    assert proposed.fits and proposed.bytes == online.bytes_left


def test_online_training_takes_the_time_of_target_and_drafter(tmp_path):
    recipe = make_run(tmp_path)
    online = recipe.model_copy(
        update={"extract": recipe.extract.model_copy(update={"features": "online"})}
    )
    rates = {"extract": Rate(2.0, "given"), "train": Rate(2.0, "given")}
    stages = stages_of(make_plan(online, rates, 1, None))
    assert stages["train"].gpu_hours == pytest.approx(2 * sum(TRAIN) / 1.0 / 3600)
    only = stages_of(make_plan(online, {"train": Rate(2.0, "given")}, 1, None))
    assert only["train"].gpu_hours is None
