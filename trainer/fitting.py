"""A run of the trainer: the progress that `eventbus` keeps, and what only the trainer knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from eventbus.batches import setter
from eventbus.fitness import Fitness
from eventbus.progress import Progress
from eventbus.request import Request
from trainer import lockstep, saving
from trainer.place import Next, Place, go_to, place_of
from trainer.randomness import generators_of, set_rng_state
from trainer.reading import keeps_its_place
from trainer.schedule import rescale

if TYPE_CHECKING:
    import torch

    from eventbus.fitness import Means
    from eventbus.lifecycle import Plan
    from trainer.job import Job
    from trainer.ranks import Ranks
    from trainer.trainer import Trainer

__all__ = ["Fitting", "fraction", "make_run", "positive_number"]


class Fitting(Progress):
    """The progress of a trainer, agreed on by all processes of the run."""

    ranks: Ranks
    #: Writes a checkpoint and returns its path; raises `Refused`.
    saver: Callable[[], str]
    #: Told the old and the new learning rates after a request.
    on_rates_set: Callable[[tuple[float, ...], tuple[float, ...]], None]
    #: Backward passes since the gradients were last zeroed.
    pending = 0
    #: Whether this batch led to an update.
    has_updated = False
    #: Whether the run is stopped for numbers that are not finite: its parameters are not worth keeping.
    has_diverged = False
    #: The last epoch in which a batch that went wrong was warned of.
    warned_epoch: int | None = None
    #: Whether there is a validation to wait for before an epoch is complete.
    has_validation = False
    #: Whether it was said that the loaders of the processes differ.
    is_unevenness_told = False
    #: What the loop does next, for a run that goes on from a checkpoint taken now.
    next: Next = "epoch"
    #: Where such a run goes on instead, while what is being done now would be done again.
    held: Place | None = None
    #: Where the epoch that begins next goes on: that of the checkpoint, for the first one.
    place: Place | None = None
    #: The random numbers with which the reading of the epoch began.
    epoch_rng: Mapping[str, Any] | None = None
    #: Generators of the loaders' own.
    generators: Sequence[torch.Generator] = ()
    #: The loader, if it keeps its own place, and whether it is being read.
    stateful_loader: Any = None
    is_reading = False
    #: What it said last.
    read_state: Any = None
    #: Whether there was a batch since ``last.pt`` was written.
    is_unsaved = False
    #: Whether the plan was extended since the checkpoint, so that what had ended the run does not end it again.
    wants_more = False

    @property
    def counts_in_steps(self) -> bool:
        """Whether `validate_every` and `save_every` count steps: when the run is as long as `max_steps` says."""
        return self.epochs is None

    @property
    def is_last_epoch(self) -> bool:
        """Whether nothing is planned after this epoch."""
        return self.reached_max_steps or (self.epochs is not None and self.epoch + 1 >= self.epochs)

    @property
    def resume_epoch(self) -> int:
        """The epoch in which a run goes on from here."""
        if not self.begun_epochs:
            return self.start_epoch
        return self.epoch + 1 if self.next == "epoch" else self.epoch

    @property
    def has_end_ahead(self) -> bool:
        """Whether a resumed run has made all its steps, but a stop had kept it from the validation at its end."""
        return self.place is not None and self.place.next == "validation"

    def begin_epoch(self) -> None:
        """Begin the next epoch, or the rest of the one that a checkpoint was taken in."""
        place, self.held = self.place, None
        if place is not None and place.next == "epoch":
            set_rng_state(place.rng, self.generators)
        super().begin_epoch()
        if place is not None and place.next != "epoch":
            set_rng_state(place.rng, self.generators)
        self.is_validated = not self.has_validation

    def take_up(self) -> None:
        """Put the epoch where it was, when it is the first after a resume."""
        self.next, self.epoch_rng, self.is_reading = "batch", None, False
        place, self.place = self.place, None
        if place is not None and place.next != "epoch":
            go_to(self, place)

    def take_place(self) -> Place:
        """Where a run goes on that is resumed from a checkpoint taken now."""
        if self.place is not None:  # no epoch has begun yet
            return self.place
        return self.held or place_of(self)

    def hold(self) -> None:
        """Let checkpoints say that the run is here, until the next batch or epoch: what comes would be done again."""
        self.held = self.held or place_of(self)

    def leave_epoch(self) -> None:
        """Say that the epoch is behind; after `max_steps`, that its rest is still ahead of who asks for more."""
        if not self.is_partial:
            self.go("epoch")
        elif self.held is not None and not self.is_stopped:
            self.next = "batch"
            self.held = replace(self.held, next="batch")

    def go(self, next: Next) -> None:
        """Say what the loop does next; everything before that is done."""
        self.next, self.held = next, None

    def loader_state(self) -> Any:
        """The place that the loader keeps itself, if it does."""
        if self.stateful_loader is None:
            return None
        if self.is_reading:
            self.read_state = self.stateful_loader.state_dict()
        return self.read_state

    def let_go(self) -> None:
        """Keep no loader after the run: garbage collection would wait seconds for the workers of one in a cycle."""
        self.settings.clear()  # some of them are of the job, which has the loaders
        self.stateful_loader, self.generators = None, ()

    def start_batch(self, batch: Any) -> None:
        """Begin a batch that was read from the loader."""
        self.has_updated = False
        self.is_unsaved = True
        self.go("schedule")
        super().start_batch(batch)

    def length(self, loader: Any) -> int | None:
        """How many batches of an epoch every process has."""
        return lockstep.common_length(self, loader) if not self.is_alone else super().length(loader)

    def read_in_step(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield what a loader gives, for as long as every process has a batch."""
        batches = super().read_in_step(loader)
        return batches if self.is_alone else lockstep.read_in_step(self, batches)

    def share(self, requests: list[Request]) -> list[Request]:
        """The requests made in any process; as a rule there is none, which costs one small collective."""
        return super().share(requests) if self.ranks.any(bool(requests)) else requests

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave the epoch's metrics alone, whatever a validation and its hooks add to them."""
        own, self.metrics = self.metrics, dict(self.metrics)
        try:
            yield
        finally:
            self.metrics = own

    def averaged(self, means: Means, numbers: dict[str, float], *, weight: float) -> dict[str, float]:
        """Means, and numbers that are this process's own, over all processes; `weight` is its share in the numbers."""
        if self.is_alone:
            return means.means() | numbers
        own = {name: (value * weight, weight) for name, value in numbers.items()}
        merged = self.merge(means.sums() | own)
        return {name: total / samples for name, (total, samples) in merged.items() if samples}

    def save(self) -> str:
        """Write a checkpoint and return its path; raises `Refused` with the reason when there is none."""
        return self.saver()

    def rates_set(self, old: tuple[float, ...], new: tuple[float, ...]) -> None:
        """Told after a request has set the learning rates."""
        self.on_rates_set(old, new)


def positive_number(name: str, value: Any) -> float | None:
    """A number above 0, or None for none; raises `ValueError` otherwise."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a number above 0 or None, not {value!r}")
    return float(value)


def fraction(name: str, value: Any) -> float:
    """A number between 0 and 1; raises `ValueError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ValueError(f"{name} must be a number between 0 and 1, not {value!r}")
    return float(value)


def make_run(trainer: Trainer, plan: Plan, job: Job | None) -> Fitting:
    """The run of a trainer: of a job, or an idle one for what is done outside of a training."""
    plan = replace(plan, run=trainer.run, rank=trainer.rank, config=vars(trainer.args))
    fitness = Fitness(trainer.monitor, trainer.mode)
    run = Fitting(trainer.bus, plan, optimizer=trainer.optimizer, fitness=fitness, log_every=trainer.log_every)
    run.ranks = trainer.ranks
    run.gather = None if trainer.ranks.is_alone else trainer.ranks.gather
    run.accumulate = trainer.accumulate
    run.saver = partial(saving.save_now, trainer)
    run.on_rates_set = partial(rescale, trainer.scheduler)
    run.settings["clip_norm"] = setter(trainer, "clip_norm", positive_number)
    if job is not None:
        run.has_validation = job.val_loader is not None
        run.generators = generators_of(job.train_loader, job.val_loader)
        run.stateful_loader = job.train_loader if keeps_its_place(job.train_loader) else None
        run.settings |= {name: setter(job, name) for name in ("save_every", "validate_every")}
    return run
