"""Messages of the command line: where they go, and what libraries may say beside them."""

import logging
import os

from rich.console import Console
from rich.logging import RichHandler

from drafttrain.data.progress import console

report_console = Console()
if not report_console.is_terminal:
    report_console.width = 110


def set_up_logging(rank: int = 0) -> None:
    """Our messages on rank 0, only warnings from other ranks and from libraries.

    On a terminal through rich, beside progress bars; in a log file one whole line per message.
    """
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("drafttrain").setLevel(logging.INFO if rank == 0 else logging.WARNING)


def quiet_libraries() -> None:
    """No progress bars and start-up notices of the libraries between ours."""
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # It warns where a spread target's weights are; load_target says it in full.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    if not torch.cuda.is_available():
        # Transformers imports DeepSpeed where it is installed, which warns if this is unset.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
