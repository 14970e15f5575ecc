"""The verbs around training, as a user types them."""

import json

import pytest
import yaml

from . import tiny
from .conftest import drafttrain


def test_regenerated_responses_become_a_greedy_source(target, tmp_path):
    """Prompts -> the target's own answers -> sample tables, by the command line alone."""
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    tiny.make_conversations(prompts, 6, 3)
    recipe = tiny.make_recipe(
        tmp_path,
        target,
        data={
            "eval": [{"path": str(answers), "name": "own"}],
            "regenerate": {
                "prompts": str(prompts),
                "output": str(answers),
                "batch_size": 4,
                "max_new_tokens": 12,
            },
        },
    )
    for _ in range(2):  # the second run finds everything done
        done = drafttrain("data", "regenerate", "-r", str(recipe))
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(rows) == 6 and all(row["response_ids"] for row in rows)
    done = drafttrain("data", "prepare", "-r", str(recipe))
    assert done.returncode == 0, done.stderr
    assert "eval own: 6 samples" in done.stderr and "6 greedy" in done.stderr
    sampled = drafttrain("data", "regenerate", "-r", str(recipe), "data.regenerate.temperature=1")
    assert sampled.returncode == 2 and "temperature" in sampled.stderr  # never mixed in one file


def test_check_prints_the_resolved_recipe(extracted):
    done = drafttrain("check", "-r", str(extracted), "train.lr=1e-3")
    values = yaml.safe_load(done.stdout)
    assert values["train"]["lr"] == 1e-3 and values["train"]["clip"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "run `drafttrain data prepare` first"),
        (["extract"], "run `drafttrain data prepare` first"),
        (["train"], "run `drafttrain extract`"),
        (["eval"], "run `drafttrain train` first"),
        (["data", "regenerate"], "data.regenerate.prompts"),
    ],
)
def test_a_stage_without_the_one_before_says_which(target, tmp_path, arguments, message):
    recipe = tiny.make_recipe(tmp_path, target)
    done = drafttrain(*arguments, "--recipe", str(recipe))
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
