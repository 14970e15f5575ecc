"""The direction of imports, the size of files, and imports on a machine without a GPU."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import drafttrain

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path
    for folder in ("data", "extract", "drafttrain")
    for path in (ROOT / folder).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)
# Absolute packages of ours that a folder may import.
ALLOWED = {
    "data": (),
    "extract": ("drafttrain.data",),
    "drafttrain": ("drafttrain",),
}
# drafttrain/ is first on sys.path when train.py is the script: a name here would hide the library.
LIBRARIES = {"datasets", "evaluate", "torch", "transformers", "deepspeed", "click", "rich", "yaml"}


def imported(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= len(path.relative_to(ROOT).parts) - 1, f"{path} leaves its folder"
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    folder = path.relative_to(ROOT).parts[0]
    for name in imported(path):
        top = name.split(".")[0]
        assert top not in ("data", "extract"), f"{path}: import drafttrain.{name}"
        if top == "drafttrain":
            allowed = ALLOWED[folder]
            assert any(name == a or name.startswith(a + ".") for a in allowed), f"{path}: {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_small_and_init_files_empty(path):
    text = path.read_text()
    assert len(text.splitlines()) < 300
    if path.name == "__init__.py":
        assert text == ""
    else:
        assert ast.get_docstring(ast.parse(text)), f"{path} has no module docstring"


def test_no_module_hides_a_library():
    names = {path.stem for path in (ROOT / "drafttrain").iterdir()}
    assert not names & (set(sys.stdlib_module_names) | LIBRARIES)


def test_every_module_imports_without_a_gpu():
    """(fault kind 67)"""
    modules = [m.name for m in pkgutil.walk_packages(drafttrain.__path__, "drafttrain.")]
    assert len(modules) > 50
    for name in modules:
        importlib.import_module(name)


def test_help_and_recipes_need_no_heavy_library():
    """(fault kind 67)"""
    code = (
        "import sys; from drafttrain.cli import cli; import drafttrain.recipe\n"
        "try: cli(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "conversations -> data prepare" in done.stdout
