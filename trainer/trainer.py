"""`Trainer`: what a training is made of, and what can be asked of it. The loop itself is in `trainer.loop`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from eventbus.batches import positive
from eventbus.bus import EventBus
from eventbus.events import Log, ParamsUpdate
from eventbus.fitness import Mode
from eventbus.lifecycle import Plan
from eventbus.signals import StopSignals, signals_of
from trainer import export, loop, prediction, saving, validation
from trainer.attributes import Attributes
from trainer.callbacks import Callbacks
from trainer.delivery import Delivery
from trainer.devices import choose_device, compiled, unwrapped
from trainer.fitting import fraction, make_run, positive_number
from trainer.job import FitResult, Job, check_counts, check_needs_val_loader, result_of
from trainer.mishaps import OnNan, OnOom, check_ranks
from trainer.randomness import deterministic as deterministic_algorithms
from trainer.randomness import seed_everything
from trainer.ranks import Ranks
from trainer.schedule import schedule_of
from trainer.settings import one_of, settings_of
from trainer.state import find_checkpoint, place_in
from trainer.steps import Precision, Steps
from trainer.warmup import Warmup
from trainer.weights import WeightAverage, weights_in

if TYPE_CHECKING:
    from trainer.callback import Callback

__all__ = ["Trainer"]

Loss = Callable[[nn.Module, Any], torch.Tensor | Mapping[str, Any]]


class Trainer(Steps, Callbacks, Attributes):
    """Train a model and tell a bus what happens; `eventbus.events` has every hook in its place.

    ``loss(model, batch)`` returns a scalar tensor, or a mapping with one as ``"loss"`` and further metrics. Instead
    of an optimizer or scheduler, a function that makes one from the parameters or the optimizer will do.

    - `device`: "auto" is a GPU where there is one. The batch is moved there with every tensor in it.
    - `run`: the name of the run; None = the bus's. In a distributed run it is that of rank 0.
    - `save_dir`: where ``last.pt`` and ``best.pt`` go; ``{run}`` and ``{rank}`` are filled in, None writes nothing.
    - `monitor`, `mode`: what fitness is taken from ("val_loss" is ``val/loss``); see `eventbus.fitness.Fitness`.
    - `accumulate`: batches per optimizer update. `clip_norm`: the largest gradient norm.
    - `warmup`: updates over which the learning rates rise in a line to what is planned, by whatever scheduler.
    - `precision`: "fp32", or "bf16" or "fp16" where that is safe (`torch.autocast`); "fp16" brings a scaler.
    - `ema`: the decay of an average of the weights (0.999), which is validated, tested, predicted with and exported.
    - `compile`: `torch.compile` the model. For its options, give a model that is compiled already.
    - `deterministic`: only algorithms that give the same numbers each time, during `fit`; also give a `seed`.
    - `log_every`: steps between two `on_log`. `scheduler_every`: "epoch" or "step".
    - `signals`: those that end the training cleanly, as "interrupted" (``"SIGTERM"``); none unless asked.
    - `on_nan`: what becomes of a loss or gradient norm that is not finite: "ignore", "skip" the batch, "stop" the run,
      "raise". All but "ignore" wait for the GPU in every batch. (A scaler skips updates itself, whatever this says.)
    - `on_oom`: when memory does not suffice for a batch: "raise", "skip" it, or "retry" it once after freeing some.
    - `on_callback_error`: "isolate", or "raise" to end the training with the callback's exception.
    - `flush_timeout`: how long the end of `fit` waits for subscribers, in seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        *,
        bus: EventBus | None = None,
        scheduler: Any = None,
        scheduler_every: Literal["epoch", "step"] = "epoch",
        scaler: torch.amp.GradScaler | None = None,
        device: str | torch.device = "auto",
        run: str | None = None,
        save_dir: str | os.PathLike[str] | None = "runs/{run}",
        callbacks: Iterable[Callback] = (),
        seed: int | None = None,
        monitor: str | None = None,
        mode: Mode = "auto",
        accumulate: int = 1,
        clip_norm: float | None = None,
        log_every: int = 50,
        warmup: int = 0,
        precision: Precision = "fp32",
        ema: float | None = None,
        compile: bool = False,
        deterministic: bool = False,
        on_nan: OnNan = "ignore",
        on_oom: OnOom = "raise",
        on_callback_error: Literal["isolate", "raise"] = "isolate",
        signals: Iterable[str | int] = (),
        flush_timeout: float = 10.0,
    ) -> None:
        self.model = compiled(model) if compile else model
        self.loss_fn = loss
        self.optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(model.parameters())
        self.scheduler, self.schedule = schedule_of(scheduler, self.optimizer, scheduler_every)
        self.device = choose_device(device)
        self.precision = one_of("precision", precision, get_args(Precision))
        self.scaler = torch.amp.GradScaler(self.device.type) if scaler is None and precision == "fp16" else scaler
        self.ema = self.average = None if ema is None else WeightAverage(model, fraction("ema", ema))
        self.warmup = positive("warmup", warmup) if warmup else 0
        self.warming = Warmup(self.optimizer, self.warmup) if self.warmup else None
        self.seed, self.deterministic = seed, deterministic
        self.accumulate = positive("accumulate", accumulate)
        self.clip_norm = positive_number("clip_norm", clip_norm)
        self.log_every = positive("log_every", log_every)
        self.signals = signals_of(signals)
        self.on_nan = one_of("on_nan", on_nan, get_args(OnNan))
        self.on_oom = one_of("on_oom", on_oom, get_args(OnOom))
        self.monitor, self.mode = monitor, mode
        self._join(bus, run, flush_timeout)
        check_ranks(self.on_oom, self.ranks)
        self.save_dir = _filled_in(save_dir, self.run, self.rank)
        self._fits = 0
        self._set_up_callbacks(callbacks, on_callback_error)
        self._begin(Plan())

    # ------------------------------------------------------------------------------------------ what can be asked

    def fit(
        self,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None = None,
        *,
        epochs: int | None = None,
        max_steps: int | None = None,
        validate_every: int | None = None,
        save_every: int | None = None,
        test_loader: Iterable[Any] | None = None,
        final_validation: bool = False,
        sanity_batches: int = 0,
        resume: str | os.PathLike[str] | None = None,
    ) -> FitResult:
        """Train for `epochs` epochs or `max_steps` updates, whichever comes first; at least one must be given.

        `validate_every` and `save_every` count epochs (steps where only `max_steps` is given); None means every
        epoch, and the end always counts. The best model (``best.pt``, else the last weights) is evaluated at the end
        on the `test_loader`, and with `final_validation` on the `val_loader` (phases "test" and "final").
        `sanity_batches` of the `val_loader` are tried before the first epoch (phase "sanity"); nothing is left of
        them. Raises what the model, the loaders or a raising callback raise, and `RankFailedError` where another
        process of the run failed.

        `resume` is a checkpoint, or "auto" for this run's ``last.pt`` when there is one. The run goes on right where
        that was taken, in the middle of an epoch too: on the CPU its weights are bit for bit those of a run that was
        never interrupted. For that the batches done in this epoch are read again and thrown away, unless the loader
        has a ``state_dict`` of its own. `on_train_epoch_start` is told again; batches, steps and the epoch's means go
        on. Random state of your own (a ``numpy.random.Generator`` in a dataset) belongs into the `state_dict` of a
        callback; that in ``persistent_workers``, or in workers of a loader with a ``state_dict``, starts anew.

        A run that is done, or that `EarlyStopping` stopped, trains nothing and says so, unless more `epochs` or
        `max_steps` are asked for than before; one that somebody else stopped goes on.
        """
        if self.progress.inbox is not None:
            raise RuntimeError("This trainer is training already; in a callback, train with another one.")
        self._join_late()
        check_ranks(self.on_oom, self.ranks)
        check_counts(epochs=epochs, max_steps=max_steps, validate_every=validate_every, save_every=save_every)
        is_val_monitored = {f"monitor={self.monitor!r}": self.monitor is not None and self.monitor.startswith("val")}
        check_needs_val_loader(
            val_loader, sanity_batches=sanity_batches, final_validation=final_validation, **is_val_monitored
        )
        with self.ranks.together():
            found = find_checkpoint(resume, self.last)
            place = place_in(found[1])
            self.ranks.check_same("the checkpoint to go on from", place, "Let all of them see the same file.")
        job = Job(
            train_loader, val_loader, test_loader, validate_every, save_every, sanity_batches, final_validation, *found
        )
        attempt = self._fits if job.checkpoint is None else max(self._fits, int(job.checkpoint["attempt"]) + 1)
        self._begin(Plan(epochs=epochs, max_steps=max_steps, attempt=attempt), job)
        self.train_loader, self.valid_loader, self.test_loader = train_loader, val_loader, test_loader
        self._fits += 1
        self._train(job)
        return result_of(self)

    def validate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Evaluate on a loader (phase "standalone"), in every process of the run; returns the metrics by bare name."""
        self._join_late()
        self.model.to(self.device)
        with self._delivery.session(), self.ranks.together(), self.progress.apart():
            return validation.validate(self, loader, phase="standalone")

    def predict(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the outputs of each batch; nothing is read from the loader before it is asked for.

        `on_predict_end` comes when the loader is at its end, and when the reader leaves: by a ``break``, by an
        exception, or by dropping or closing the iterator.
        """
        self.model.to(self.device)
        with self._delivery.session():
            yield from prediction.predict(self, loader)

    def export(
        self,
        format: str,
        path: str | os.PathLike[str],
        *,
        example: Any = None,
        quantize: Literal["dynamic"] | None = None,
        **options: Any,
    ) -> Path:
        """Write the model as "weights" (a state dict), "torchscript", "pt2" (`torch.export`) or "onnx".

        All but "weights" trace it with `example`: the input of one call, or a tuple of its arguments. "dynamic"
        quantisation, for "weights" and "torchscript", makes linear and recurrent layers compute in 8 bits on the CPU.
        `options` go to the function of torch that does it: `dynamic_shapes` for batches of any size, say. What was
        at `path` stays whole until the export has succeeded.
        """
        arguments = example if example is None or isinstance(example, tuple) else (example,)
        with self._delivery.session():
            return export.export(self, export.ExportJob(format, Path(path), arguments, quantize, options))

    def save_model(self, path: str | os.PathLike[str]) -> bool:
        """Write a checkpoint to a path of one's own; False when that failed, which `on_checkpoint_failed` tells."""
        with self._delivery.session():
            return not saving.save_to(self, Path(path)).error

    def load_weights(self, weights: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        """Load a state dict, or the model of a checkpoint file, and tell it by `on_params_update`.

        Of a checkpoint with averaged weights it is these, which were validated. An average of this trainer begins anew.
        """
        read: Any = weights
        if not isinstance(weights, Mapping):
            read = torch.load(weights, map_location="cpu", weights_only=True)
        unwrapped(self.model).load_state_dict(weights_in(read))
        if self.average is not None:
            self.average.forget()
        self.params_updated("weights loaded")

    def params_updated(self, reason: str) -> None:
        """Tell that parameters changed outside an optimizer step (`on_params_update`): an EMA swap, a freeze."""
        with self._delivery.session():
            self.progress.publish(ParamsUpdate, epoch=self.epoch, step=self.step, reason=reason)

    def log(self, **values: Any) -> None:
        """Tell values of one's own (`on_log`)."""
        with self._delivery.session():
            self.progress.publish(Log, epoch=self.epoch, step=self.step, values=values)

    # ------------------------------------------------------------------------------------------ what the loop asks

    def prepare(self) -> None:
        """Everything that has to be done before the first batch, but for a checkpoint."""
        if self.seed is not None:
            seed_everything(self.seed)
        self.model.to(self.device)
        if self.average is not None:
            self.average.module.to(self.device)
        if self.deterministic and self.seed is None:
            self.logger.warning("deterministic=True without seed=: the random numbers are not the same each time.")
        if not self.model.training:  # else its parts are in the modes they are meant to be in
            self.model.train()
        self.optimizer.zero_grad()

    def planned_rates(self) -> AbstractContextManager[None]:
        """While it lasts the learning rates are those that a warm-up leads to."""
        return nullcontext() if self.warming is None else self.warming.planning()

    @property
    def watches_rates(self) -> bool:
        """Whether a learning rate that changes in a batch was changed by a callback."""
        return self.schedule != "step" and (self.warming is None or self.warming.is_over)

    def found(self) -> dict[str, Any]:
        """What set-up found, for `on_pretrain_routine_end`."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return {"parameters": parameters, "device": str(self.device), "world_size": self.world_size}

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Name what the run is doing; after an error the name stays, for `on_exception`."""
        former, self.progress.phase = self.progress.phase, phase
        yield
        self.progress.phase = former

    @property
    def is_busy(self) -> bool:
        """Whether the trainer is doing something right now."""
        return self._delivery.is_busy

    # -------------------------------------------------------------------------------------------------- inside

    def _begin(self, plan: Plan, job: Job | None = None) -> None:
        self.args = SimpleNamespace(**settings_of(self, plan))
        self.progress = make_run(self, plan, job)

    def _join(self, bus: EventBus | None, run: str | None, flush_timeout: float) -> None:
        self.ranks = Ranks()
        self.bus = bus if bus is not None else EventBus(run=run)
        self.run = self.ranks.gather(run if run is not None else self.bus.run)[0]
        self._take_rank()
        self._delivery = Delivery(self.bus, is_own=bus is None, timeout_s=flush_timeout)

    def _take_rank(self) -> None:
        if not self.ranks.is_alone:
            self.bus.run, self.bus.rank = self.run, self.ranks.rank

    def _join_late(self) -> None:
        """Take part in a process group that was made after this trainer, as in a process that it was sent to."""
        if self.ranks.is_current:
            return
        self.ranks = Ranks()
        runs = self.ranks.gather(self.run)
        if len(set(runs)) > 1:
            raise RuntimeError(
                "torch.distributed was initialised after this trainer was made, so that its processes have different "
                f"runs: {', '.join(runs)}. Initialise it first, or give all of them the same run=."
            )
        self._take_rank()
        self._begin(Plan())

    def _train(self, job: Job) -> None:
        # The signals outlast the delivery: a second SIGTERM must not cut off what the first one lets end.
        signals = StopSignals(self.signals, self.progress.interrupt, self._is_interrupted)
        with (
            signals,
            self._delivery.session(is_training=True),
            self.ranks.together(),
            deterministic_algorithms(self.deterministic),
        ):
            try:
                loop.fit(self, job)
                self.progress.hold()  # for a `save_model` afterwards
            finally:
                self.batch = None  # it may be large, and on the GPU
                self.train_loader = self.valid_loader = self.test_loader = None
                self.progress.let_go()

    def _is_interrupted(self) -> bool:
        return self.progress.reason == "interrupted"


def _filled_in(save_dir: str | os.PathLike[str] | None, run: str, rank: int) -> Path | None:
    if save_dir is None:
        return None
    return Path(os.fspath(save_dir).replace("{run}", run).replace("{rank}", str(rank)))
