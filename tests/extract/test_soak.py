"""One fault of every kind that the soak knows; ``tests/benchmarks/soak.py`` does hundreds."""

from rich.console import Console

from ..benchmarks import soak as soak_module


def test_ten_random_faults_leave_the_undisturbed_store(tmp_path, capsys):
    """(fault kinds 33, 34, 37)"""
    assert len(soak_module.KINDS) == 10
    assert soak_module.soak(10, 5, tmp_path, Console(width=110), mount=False)
    assert "10 faults in" in capsys.readouterr().out


def test_the_soak_sees_what_is_left_or_changed(tmp_path, capsys, monkeypatch):
    """A control: a fault after which no rerun mends the store."""

    def spoiled(run):
        (run.finished() / "shard-00002.parquet").write_bytes(b"other")
        run.compare(run.out)

    def littered(run):
        (run.finished() / "shard-00002.claim").write_text("left")
        run.compare(run.out)

    kinds = {"spoiled": (spoiled, False), "littered": (littered, False)}
    monkeypatch.setattr(soak_module, "KINDS", kinds)
    assert not soak_module.soak(2, 0, tmp_path, Console(width=110), mount=False)
    shown = capsys.readouterr().out
    assert "differs in shard-00002.parquet" in shown and "differs in shard-00002.claim" in shown
