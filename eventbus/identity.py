"""Who publishes: the run, the process of a distributed run, and how often the run was restarted."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

__all__ = ["find_attempt", "find_rank", "find_run"]


def find_run(environ: Mapping[str, str] = os.environ) -> str:
    """The run id that the launcher gave, else a readable new one, e.g. ``20261130-155912-a3f1``."""
    given = environ.get("TRAINBUS_RUN")
    elastic = environ.get("TORCHELASTIC_RUN_ID")
    slurm = environ.get("SLURM_JOB_ID")
    if given:
        return given
    if elastic and elastic != "none":
        return elastic
    if slurm:
        task = environ.get("SLURM_ARRAY_TASK_ID")
        return f"{environ.get('SLURM_ARRAY_JOB_ID', slurm)}_{task}" if task else slurm
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def find_rank(environ: Mapping[str, str] = os.environ) -> int:
    """The rank that the launcher gave, else 0. A lone ``RANK`` or ``SLURM_PROCID`` without a world does not count."""
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if _number(environ.get(world)) > 1 and environ.get(rank, "").isdigit():
            return int(environ[rank])
    for rank in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if environ.get(rank, "").isdigit():
            return int(environ[rank])
    return 0


def find_attempt(environ: Mapping[str, str] = os.environ) -> int:
    """How often the launcher restarted this run."""
    return max(_number(environ.get("SLURM_RESTART_COUNT")), _number(environ.get("TORCHELASTIC_RESTART_COUNT")))


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
