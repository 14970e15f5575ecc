"""Where a target's files are: the recipe's ``target.path`` -> a local folder, without hanging.

A local folder is used as it is. A hub id is looked up in the local cache first; only then is the
hub asked, with a time limit, so a machine without network gets an answer at once.
"""

import os
from pathlib import Path

import httpx
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from drafttrain.data.errors import TargetError

from .config import TargetConfig

_HUB_TIMEOUT_S = 10
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_GGUF_REMEDY = (
    "drafttrain runs dense Transformers models: load the GGUF file once with"
    " AutoModelForCausalLM.from_pretrained(folder, gguf_file=...,"
    " quantization_config=GgufConfig(dequantize=True)), save_pretrained() it into a folder with its"
    " tokenizer, and give that folder"
)


def resolve_folder(config: TargetConfig) -> tuple[Path, str | None]:
    """Find the target's folder.

    Returns:
        The folder, and the hub commit it came from (None for a local folder).

    Raises:
        TargetError: it is missing, not a folder, of a format that cannot be used, or not to be had.
    """
    text = config.path
    path = Path(text).expanduser()
    if path.suffix.lower() == ".gguf":
        raise TargetError(
            f"target.path: '{text}' is a GGUF file, which cannot be used. {_GGUF_REMEDY}"
        )
    if path.is_dir():
        if config.revision is not None:
            raise TargetError(
                f"target.revision: '{text}' is a local folder, a revision needs a hub id; remove"
                " target.revision"
            )
        return _checked(path, text), None
    if path.exists():
        raise TargetError(
            f"target.path: '{text}' is a file; give the folder that holds config.json"
        )
    if _looks_like_a_path(text):
        raise TargetError(
            f"target.path: the folder '{text}' does not exist (looked in {path.absolute()})"
        )
    return _from_hub(text, config.revision)


def _looks_like_a_path(text: str) -> bool:
    """Everything but ``name`` and ``owner/name``; those too when the owner is a folder here."""
    parts = text.split("/")
    outside = text.startswith((".", "~", "/")) or (os.sep != "/" and os.sep in text)
    return (
        outside or len(parts) > 2 or not all(parts) or (len(parts) == 2 and Path(parts[0]).is_dir())
    )


def _checked(folder: Path, text: str) -> Path:
    if not (folder / "config.json").is_file():
        if any(folder.glob("*.gguf")):
            raise TargetError(f"target.path: '{text}' holds only GGUF files. {_GGUF_REMEDY}")
        raise TargetError(
            f"target.path: '{text}' has no config.json; give the folder of a Transformers model"
        )
    return folder


def _from_hub(repo: str, revision: str | None) -> tuple[Path, str]:
    try:
        cached = Path(snapshot_download(repo, revision=revision, local_files_only=True))
        if (cached / "config.json").is_file():
            return cached, cached.name
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as exc:
        raise TargetError(
            f"target.path: '{repo}' is neither a folder nor a hub id ({exc})"
        ) from None
    try:
        commit = HfApi().model_info(repo, revision=revision, timeout=_HUB_TIMEOUT_S).sha
        folder = Path(snapshot_download(repo, revision=commit, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, httpx.HTTPError, OSError) as exc:
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
        raise TargetError(
            f"target.path: '{repo}' is not a folder here, not in the local hub cache, and the hub"
            f" did not give it ({type(exc).__name__}: {reason}): check the name, or download it"
            " where there is network and give the folder"
        ) from None
    return _checked(folder, repo), folder.name
