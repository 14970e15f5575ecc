"""Training from a whole store, a rolling one and the target itself: same batches, same losses."""

import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from drafttrain.data.store_format import read_meta
from drafttrain.data.store_reader import FeatureStore

from .conftest import ENVIRONMENT, drafttrain, kill_group
from .runs import copy_run, start_rank, start_ranks, trace

pytestmark = pytest.mark.xdist_group("training")

EPOCHS = 5.0
BUDGET = 160_000
ROLLING = (
    "extract.features=rolling",
    f"extract.budget={BUDGET}B",
    "extract.shard_tokens=32",
    "extract.final_hidden=false",
    "extract.claim_expiry_s=2",
)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def whole(extracted, tmp_path_factory) -> Path:
    """The reference: trained from the finished store."""
    recipe = copy_run(extracted, tmp_path_factory.mktemp("whole"), epochs=EPOCHS)
    finish(start_rank(recipe))
    return recipe


def assert_same_run(found: list[tuple], wanted: list[tuple]) -> None:
    """Step, learning rate and samples are equal, losses and gradient norms to rounding."""
    assert [(m[0], m[2], m[4]) for m in found] == [(m[0], m[2], m[4]) for m in wanted]
    assert [m[1] for m in found] == pytest.approx([m[1] for m in wanted], rel=2e-5)
    assert [m[3] for m in found] == pytest.approx([m[3] for m in wanted], rel=2e-3)


def run_without_store(extracted: Path, folder: Path) -> Path:
    """A run whose training states do not exist yet."""
    recipe = copy_run(extracted, folder, epochs=EPOCHS)
    shutil.rmtree(folder / "run" / "store" / "train")
    return recipe


def start_extraction(recipe: Path) -> subprocess.Popen:
    command = "from drafttrain.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", command, "extract", "--recipe", str(recipe), *ROLLING],
        env=ENVIRONMENT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class Usage(threading.Thread):
    """Samples the bytes of all files in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.sizes, self.ended = folder, [], threading.Event()
        self.start()

    def run(self) -> None:
        while not self.ended.wait(0.005):
            total = 0
            for path in self.folder.glob("*"):
                try:
                    total += path.stat().st_size
                except FileNotFoundError:
                    continue
            self.sizes.append(total)

    def largest(self) -> int:
        self.ended.set()
        self.join()
        assert len(self.sizes) > 100
        return max(self.sizes)


def steps_done(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def wait_for(condition, process: subprocess.Popen) -> None:
    while not condition():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)


def test_the_target_in_the_training_process_gives_the_losses_of_its_store(
    whole, extracted, tmp_path
):
    recipe = run_without_store(extracted, tmp_path)
    finish(start_rank(recipe, "extract.features=online"))
    assert_same_run(trace(recipe), trace(whole))
    assert not (tmp_path / "run" / "store" / "train").exists()


def test_two_ranks_without_a_store_follow_the_trace_of_one_with(whole, extracted, tmp_path):
    """Online, then rolling: each rank reads its own part, and shards stay until both have."""
    for name, overrides in (("online", ("extract.features=online",)), ("rolling", ROLLING)):
        (tmp_path / name).mkdir()
        recipe = run_without_store(extracted, tmp_path / name)
        extraction = None
        if name == "rolling":
            shutil.rmtree(tmp_path / name / "run" / "store" / "eval")
            extraction = start_extraction(recipe)
            store = tmp_path / name / "run" / "store" / "train"
            wait_for(lambda store=store: any(store.glob("shard-*.json")), extraction)
        for process in start_ranks(recipe, *overrides, world=2):
            finish(process)
        if extraction is not None:
            finish(extraction)
        assert_same_run(trace(recipe), trace(whole))


def test_rolling_with_both_sides_killed_follows_the_trace_within_its_budget(
    whole, extracted, tmp_path
):
    """The whole stream would take more than ten times the budget."""
    recipe, run = run_without_store(extracted, tmp_path), tmp_path / "run"
    folder, rng = run / "store" / "train", random.Random(0)
    shutil.rmtree(run / "store" / "eval")  # it has the settings of the other run
    extraction = start_extraction(recipe)
    usage = Usage(folder)
    wait_for(lambda: any(folder.glob("shard-*.json")), extraction)
    meta = read_meta(folder)
    assert meta.num_tokens * meta.bytes_per_token() > 10 * BUDGET
    for target_step in (8, 26):
        training = start_rank(recipe, *ROLLING)
        wait_for(lambda step=target_step: steps_done(run) >= step, training)
        time.sleep(rng.uniform(0, 0.3))
        for process in (training, extraction):
            kill_group(process)
            process.stdout.close()
        assert any(folder.glob("*.claim")) or any(folder.glob("shard-*"))
        extraction = start_extraction(recipe)
    training = start_rank(recipe, *ROLLING)
    output = finish(training)
    assert "continuing from" in output
    finish(extraction)
    assert usage.largest() <= BUDGET
    assert_same_run(trace(recipe), trace(whole))
    assert not any(folder.glob("shard-*"))


def test_rolling_is_refused_where_it_cannot_work(extracted, tmp_path):
    recipe = run_without_store(extracted, tmp_path)
    done = drafttrain("train", "--recipe", str(recipe), *ROLLING)
    assert done.returncode == 2 and "nothing was extracted yet" in done.stderr
    small = [*ROLLING[:1], "extract.budget=40KB", *ROLLING[2:]]
    done = drafttrain("extract", "--recipe", str(recipe), *small)
    assert done.returncode == 2 and "extract.budget 40.0 KB is too small" in done.stderr
    assert not (tmp_path / "run" / "store" / "train").exists()
    done = drafttrain("extract", "--worker", "0/2", "--recipe", str(recipe), *ROLLING)
    assert done.returncode == 2 and "--worker splits a whole store" in done.stderr


def test_two_runs_share_stores_that_lie_elsewhere(extracted, tmp_path):
    """``extract.store``: the finished store of one run is another run's."""
    shared = Path(yaml.safe_load(extracted.read_text())["output"]) / "store"
    recipe = run_without_store(extracted, tmp_path)
    shutil.rmtree(tmp_path / "run" / "store")
    done = drafttrain("extract", "--recipe", str(recipe), f"extract.store={shared}")
    assert done.returncode == 0, done.stderr
    finish(start_rank(recipe, f"extract.store={shared}", "train.epochs=0.2"))
    assert FeatureStore(shared / "train").meta.order_seed is None
    assert steps_done(tmp_path / "run") == 2
