"""What bounds the bytes of a run: free space, quota, and a limit given by hand."""

import shutil
from pathlib import Path

import pytest

from drafttrain.plan import space
from drafttrain.plan.space import limits_of

GB = 10**9


@pytest.fixture
def quota(tmp_path, monkeypatch):
    """A ``quota`` command that prints given lines for the file system of ``tmp_path``."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def install(*lines: str, code: int = 0) -> None:
        device = space._device_of(tmp_path)
        text = "\n".join(line.format(device=device) for line in lines)
        script = tmp_path / "quota"
        script.write_text(
            f"#!/bin/sh\n[ \"$1\" = -ugw ] || exit 9\ncat <<'X'\n{text}\nX\nexit {code}\n"
        )
        script.chmod(0o755)

    return install


def names(limits) -> dict[str, int]:
    return {limit.name: limit.bytes for limit in limits}


def test_free_space_of_a_folder_that_does_not_exist_yet(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    (limit,) = limits_of(tmp_path / "a" / "b", None)
    assert limit.name.endswith(str(tmp_path))
    assert limit.bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


def test_what_the_folder_holds_counts_toward_space(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"x" * 300)
    limits = limits_of(tmp_path, 1000)
    assert limits[0].name == "left of --space" and limits[0].bytes == 700
    assert names(limits_of(tmp_path, 100))["left of --space"] == 0


HEAD = ("Disk quotas for user u (uid 7):", "  Filesystem  blocks  quota  limit  grace  files")


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        (["{device} 400 1000 2000  9 0 0"], 600),
        (["{device} 400 0 2000  9 0 0"], 1600),
        (["{device} 1400* 1000 2000 6days 9 0 0"], 0),
        (["{device} 400 0 0  9 0 0"], None),
        (["/dev/other 400 1000 2000  9 0 0"], None),
        (["{device} 400 1000 2000 9 0 0", "Disk quotas for group g:", "{device} 400 500 0 9"], 100),
        (["none"], None),
    ],
)
def test_the_quota_of_this_file_system_counts(tmp_path, quota, lines, left):
    """Soft limits too: a long run outlasts the grace period. Blocks are 1024 bytes."""
    quota(*HEAD, *lines, code=1)
    found = names(limits_of(tmp_path, None)).get("left of your quota")
    assert found == (None if left is None else left * 1024)


def test_a_quota_command_that_hangs_or_breaks_is_no_limit(tmp_path, quota, monkeypatch):
    monkeypatch.setattr(space, "_QUOTA_TIMEOUT_S", 0.2)
    script = Path(tmp_path / "quota")
    for text in ("#!/bin/sh\nexec sleep 30\n", "#!/no/such/shell\n"):
        script.write_text(text)
        script.chmod(0o755)
        assert "left of your quota" not in names(limits_of(tmp_path, None))
