"""A PyTorch training loop that tells an event bus what it does, and does what it is asked.

Everything it publishes, and when, is in `eventbus.events` and `trainer.loop`.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _missing:
    if _missing.name != "torch":
        raise
    raise ImportError('trainer needs PyTorch, which is not installed: pip install "trainbus[train]"') from _missing

from trainer.callback import Callback
from trainer.checkpoint import ModelCheckpoint
from trainer.departure import RankFailedError
from trainer.early_stopping import EarlyStopping
from trainer.job import FitResult
from trainer.progress import ProgressBar
from trainer.trainer import Trainer

__all__ = ["Callback", "EarlyStopping", "FitResult", "ModelCheckpoint", "ProgressBar", "RankFailedError", "Trainer"]
