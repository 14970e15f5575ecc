"""Verbs: what the exit code says."""

from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from drafttrain.acceptance import checkpoints, render
from drafttrain.cli import cli


@pytest.mark.parametrize(("lossless", "code"), [(True, 0), (False, 1)])
def test_eval_fails_when_decoding_changed_what_the_target_says(
    monkeypatch, tmp_path, lossless, code
):
    """(fault kind 77)"""
    report = SimpleNamespace(lossless=lossless)
    monkeypatch.setattr(checkpoints, "evaluate_checkpoint", lambda *given: report)
    monkeypatch.setattr(render, "to_terminal", lambda given: "the report")
    (tmp_path / "config.json").write_text("{}")
    arguments = ["eval", "-r", "recipes/quickstart.yaml", f"output={tmp_path}"]
    done = CliRunner().invoke(cli, [*arguments, "--checkpoint", str(tmp_path)])
    assert done.exit_code == code, done.output
