"""The random numbers of a run: seeded, saved with it, and resumed."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["deterministic", "generators_of", "rng_state", "seed_everything", "set_rng_state", "undisturbed"]


def seed_everything(seed: int) -> None:
    """Seed Python, torch with its devices, and numpy where it is imported."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@contextmanager
def deterministic(is_wanted: bool) -> Iterator[None]:
    """While it lasts torch uses only algorithms that give the same numbers each time, or raises where it has none."""
    if not is_wanted:
        yield
        return
    cudnn = torch.backends.cudnn
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn_was = cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        cudnn.deterministic, cudnn.benchmark = cudnn_was


@contextmanager
def undisturbed(loader: Any) -> Iterator[None]:
    """Afterwards every random number is what it would have been without what was done, and read from `loader`."""
    generators = generators_of(loader)
    state = rng_state(generators)
    try:
        yield
    finally:
        if getattr(loader, "persistent_workers", False):
            loader._iterator = None  # its workers were seeded: it would not draw their seed when it is really read
        set_rng_state(state, generators)


def generators_of(*loaders: Any) -> list[torch.Generator]:
    """The generators that loaders and their samplers were given, each once."""
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        batch_sampler = getattr(loader, "batch_sampler", None)
        for owner in (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())


def rng_state(generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """The state of every generator of this process and of those given, in types that load without running code."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": (version, torch.tensor(internal), gauss), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    if generators:
        state["given"] = [generator.get_state() for generator in generators]
    return state


def set_rng_state(state: Mapping[str, Any], generators: Sequence[torch.Generator] = ()) -> None:
    """Go on where `rng_state` was taken; generators that are not here are left out."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(map(int, internal)), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, [int(key) for key in keys], *rest))
    for generator, given in zip(generators, state.get("given", ()), strict=False):
        generator.set_state(given)
