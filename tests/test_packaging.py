"""What a wheel holds, and the links that let editors resolve the stage folders."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_stage_folders_are_linked_into_the_package():
    for name in ("data", "extract"):
        link = ROOT / "drafttrain" / name
        assert link.is_symlink() and link.readlink() == Path("..") / name


def test_the_wheel_installs_one_name(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(tmp_path)]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"drafttrain"}
    for module in ("data/store_reader.py", "extract/taps.py", "train.py", "acceptance/tree.py"):
        assert f"drafttrain/{module}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
