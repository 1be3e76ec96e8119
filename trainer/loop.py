"""The loop: every hook of `eventbus.events` in its place, and nothing else.

::

    on_pretrain_routine_start
        on_checkpoint_load                            # resume=
    on_pretrain_routine_end
    on_train_start
    validation, phase "sanity"                        # sanity_batches=
    for each epoch:
        on_train_epoch_start
        for each batch:
            on_train_batch_start
            forward and backward
            on_after_backward                         # unless the batch is skipped
            when a group of `accumulate` batches is complete:
                on_before_optimizer_step
                optimizer_step                        # unless the update is skipped
                on_before_zero_grad
            on_train_batch_end                        # status "ok", "skipped" or "retried"
            on_log                                    # every log_every= steps
            on_lr_change                              # a callback changed one, or the warm-up is over
            on_control                                # whatever was asked for
            validation, phase "fit", and best.pt      # every validate_every= steps
            on_model_save | on_checkpoint_failed      # every save_every= steps
        on_lr_change                                  # the scheduler changed one
        on_train_epoch_end
        validation, phase "fit":
            on_params_update                          # ema=: the averaged weights are in
            on_val_start
            for each batch:
                on_val_batch_start
                on_val_image_end                      # per sample, when somebody listens
                on_val_batch_end
                on_control
            on_val_end
            on_params_update                          # and out
        on_lr_change                                  # a scheduler that follows a metric
        on_fit_epoch_end
        on_model_save | on_checkpoint_failed          # best.pt, then last.pt
        on_control
    on_params_update                                  # the weights of best.pt are in
    validation, phases "final" and "test"             # final_validation=, test_loader=
    on_params_update                                  # and out
    on_exception
    on_train_end
    teardown

Outside of it: in `trainer.prediction` ``on_predict_start``, ``on_predict_batch_start``, ``on_predict_postprocess_end``,
``on_predict_batch_end``, ``on_predict_end``; in `trainer.export` ``on_export_start``, ``on_export_end``; and what the
bus tells about itself: ``on_subscriber_error``, ``on_subscriber_disabled``, ``on_events_dropped``.

How a run ends, and what then becomes of the batch and the epoch it was in; a test reads this table::

    way to end                | last batch | epoch   | validated | last.pt | best tested | then
    --------------------------|------------|---------|-----------|---------|-------------|------------------------
    all epochs                | ok         | whole   | yes       | written | yes         | completed
    max_steps                 | ok         | partial | yes       | written | yes         | completed
    trainer.stop              | ok         | partial | no        | written | yes         | on_control, stopped
    control.stop              | ok         | partial | no        | written | yes         | on_control, stopped
    EarlyStopping             | ok         | whole   | yes       | written | yes         | on_control, stopped
    one of signals=           | ok         | partial | no        | written | no          | on_control, interrupted
    on_nan="stop"             | skipped    | partial | no        | kept    | yes         | on_control, stopped
    on_nan="raise"            | skipped    | partial | no        | kept    | no          | on_exception, failed
    memory does not suffice   | skipped    | partial | no        | kept    | no          | on_exception, failed
    exception in the model    | skipped    | partial | no        | kept    | no          | on_exception, failed
    exception in the loss     | skipped    | partial | no        | kept    | no          | on_exception, failed
    exception in the loader   | ok         | partial | no        | kept    | no          | on_exception, failed
    exception in validation   | ok         | partial | no        | kept    | no          | on_exception, failed
    a hook that raises        | skipped    | partial | no        | kept    | no          | on_exception, failed
    Ctrl-C                    | skipped    | partial | no        | kept    | no          | on_exception, interrupted

Always: an end for every start, answers to requests that wait, one `on_train_end` with that reason, one `teardown`;
then the bus is flushed, and the original exception leaves `Trainer.fit`. A stop that is asked for during the last
hooks of an epoch (`on_fit_epoch_end`, as `EarlyStopping` does) finds the epoch complete. The final and the test
validation are no part of an epoch: `on_fit_epoch_end` does not fire again.

The processes of a distributed run end alike, at the same step. Where one has an exception, the others end as by one of
their own, `RankFailedError` (`trainer.departure`).

A batch that nothing comes of ends with status="skipped", and its metrics are in no mean: when `training_step` returns
None, when the loss is not finite (on_nan="skip"; neither `on_after_backward` nor an update) or the gradients are not
(`on_before_optimizer_step` and `on_before_zero_grad` fire, `optimizer_step` does not), and when memory did not suffice
(on_oom="skip"). One that succeeded the second time (on_oom="retry") ends with status="retried".
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from eventbus import events
from eventbus.rates import rates_of
from trainer import state
from trainer.devices import move
from trainer.job import say_that_nothing_was_left
from trainer.mishaps import is_usable, with_memory
from trainer.outcome import read_step
from trainer.randomness import undisturbed
from trainer.reading import Reading
from trainer.schedule import plateau_metric
from trainer.validation import evaluate, validate
from trainer.weights import best_weights

if TYPE_CHECKING:
    from trainer.checkpoint import Saved
    from trainer.job import Job
    from trainer.trainer import Trainer

__all__ = ["fit", "save", "tell_saved"]


def fit(trainer: Trainer, job: Job) -> None:
    """Train as `job` says; raises what the model, the loader or a raising hook raises, after the terminal events."""
    with trainer.progress as run, trainer.ranks.leaving():
        set_up(trainer, job)
        run.ready(batches=run.length(job.train_loader), **trainer.found())
        try_validation(trainer, job)
        for _ in run.iterate_epochs():
            train(trainer, job)
            validate_epoch(trainer, job)
            step_scheduler(trainer, "validation")
            run.leave_epoch()
            run.end_epoch()
            save(trainer, is_due=job.saves_epoch(run), is_judged=True)
        if job.saves_end(run):
            save(trainer, is_due=True)
        if job.checkpoint_path is not None and not run.begun_epochs:
            say_that_nothing_was_left(run)
        evaluate_best(trainer, job)


def set_up(trainer: Trainer, job: Job) -> None:
    """Put the model on its device, and the run where it was when the checkpoint was written."""
    run = trainer.progress
    trainer.prepare()
    if job.checkpoint is not None:
        state.restore(trainer, job.checkpoint)
        job.checkpoint = None  # as large as the model
        run.publish(events.CheckpointLoad, path=str(job.checkpoint_path), epoch=run.start_epoch, step=run.step)
    if trainer.warming is not None:
        trainer.warming.begin(run.step)
    run.watches_rates = trainer.watches_rates


def train(trainer: Trainer, job: Job) -> None:
    """The training part of one epoch, or what a resumed run finds left of it."""
    run = trainer.progress
    if run.next != "validation":
        train_batches(trainer, job)
        step_scheduler(trainer, "epoch")
        if not run.is_partial or run.reached_max_steps:
            run.go("validation")
    run.hold()
    trainer.optimizer.zero_grad()
    run.pending = 0
    run.end_training()


def train_batches(trainer: Trainer, job: Job) -> None:
    """Every batch of an epoch, with what is due by steps in between."""
    run = trainer.progress
    finish_batch(trainer, job)  # of a run that was resumed in between
    reading = Reading(job.train_loader, run)
    for batch in run.iterate(reading, trainer.accumulate):
        train_batch(trainer, batch)
        run.end_batch()
        finish_batch(trainer, job)
    run.is_partial |= run.next != "batch"
    if not run.is_partial:
        reading.finish()
    if not run.seen and not run.is_stopped:
        raise ValueError(
            f"The train_loader gave no batch in epoch {run.epoch}. If it is a generator, it can be read only once: "
            "give a DataLoader, a list, or an object whose __iter__ starts anew."
        )
    if run.pending and not run.is_stopped:
        update(trainer)  # a loader that does not know its length: that its last group is smaller is only known now
        run.go("schedule")
        finish_batch(trainer, job)


def finish_batch(trainer: Trainer, job: Job) -> None:
    """What follows a batch: the schedule, a validation and a checkpoint that are due by steps."""
    run = trainer.progress
    if run.next == "schedule":
        run.tell_averages()  # told with the end of the batch already, unless a hook at that end took a checkpoint
        step_scheduler(trainer, "step")
        run.go("checks")
    if run.next == "checks":
        if job.validates_step(run) and not validate_between_batches(trainer, job):
            return  # cut short by a stop: a resumed run does it again
        run.go("batch")
        if job.saves_step(run):
            save(trainer, is_due=True)


def train_batch(trainer: Trainer, batch: Any) -> None:
    """Forward, backward, and an update when its group is complete."""
    run = trainer.progress
    if with_memory(trainer, partial(learn, trainer, batch)):
        run.pending += 1
        run.tell(events.AfterBackward)
    else:
        run.status = "skipped"
    if run.is_update_due and run.pending:
        update(trainer)


def learn(trainer: Trainer, batch: Any) -> bool:
    """Forward and backward; False when there is nothing to learn from this batch."""
    trainer.batch = move(batch, trainer.device)
    with trainer.casting():
        result = trainer.training_step(trainer.batch)
    outcome = None if result is None else read_step(result)
    trainer.progress.batch_metrics = {} if outcome is None else outcome.metrics
    if not is_usable(trainer, None if outcome is None else outcome.loss, "loss") or outcome is None:
        return False
    trainer.backward(outcome.loss if trainer.accumulate == 1 else outcome.loss / trainer.accumulate)
    return True


def update(trainer: Trainer) -> None:
    """One optimizer update from the gradients of a group of batches; not from gradients that are not finite."""
    run = trainer.progress
    is_scaled = trainer.scaler is not None and trainer.scaler.is_enabled()  # a scaler skips such updates by itself
    wants_norm = run.bus.hears(events.OptimizerStep) or (trainer.on_nan != "ignore" and not is_scaled)
    grad_norm = trainer.finish_gradients(run.pending, wants_norm=wants_norm)
    is_good = is_scaled or is_usable(trainer, grad_norm, "gradient norm")
    run.tell(events.BeforeOptimizerStep)
    if is_good and trainer.optimizer_step():
        run.step += 1
        run.has_updated = True
        if trainer.average is not None:
            trainer.average.update_parameters(trainer.model)
        run.tell(events.OptimizerStep, lr=rates_of(trainer.optimizer), grad_norm=grad_norm)
    else:
        run.status = "skipped"
    run.tell(events.BeforeZeroGrad)
    trainer.optimizer.zero_grad()
    run.pending = 0


def step_scheduler(trainer: Trainer, moment: str) -> None:
    """Step the scheduler if this is its moment: a "step", or the end of an "epoch" or of its "validation"."""
    run, is_its_moment = trainer.progress, trainer.schedule == moment
    if is_its_moment and moment == "validation" and run.is_validated and not run.is_partial:
        value = plateau_metric(run.fitness.names, run.metrics)
        if value is not None:
            with trainer.planned_rates():
                trainer.scheduler.step(value)
    if is_its_moment and moment != "validation" and (run.has_updated if moment == "step" else not run.is_partial):
        with trainer.planned_rates():
            trainer.scheduler.step()
    if moment == "step" and run.has_updated:
        warm_up(trainer)
    if moment != "step":
        run.tell_rates("schedule")


def warm_up(trainer: Trainer) -> None:
    """Raise the rates after an update of the warm-up; the whole of it is told as one change, at its end."""
    run, warming = trainer.progress, trainer.warming
    if warming is not None and warming.step():
        run.tell_rates("schedule")
        run.watches_rates = trainer.watches_rates


def validate_epoch(trainer: Trainer, job: Job) -> None:
    """The validation that belongs to an epoch; a stop leaves the epoch without it, and so cut short."""
    run = trainer.progress
    if not job.validates_epoch(run):
        return
    metrics = {} if run.is_stopped else validate(trainer, job.val_loader or (), phase="fit")
    run.is_validated = bool(metrics)
    run.is_partial |= run.is_stopped


def validate_between_batches(trainer: Trainer, job: Job) -> bool:
    """A validation that is due by steps: it may find a new best, and leaves the epoch's own metrics alone.

    False when a stop cut it short.
    """
    run = trainer.progress
    run.hold()
    with run.apart():
        is_whole = bool(validate(trainer, job.val_loader or (), phase="fit"))
        metrics = run.metrics
    if is_whole:
        run.go("batch")
        run.fitness.judge(metrics, validated=True)
        run.best_fitness = run.fitness.best
        save(trainer, is_judged=True)
    return is_whole


def try_validation(trainer: Trainer, job: Job) -> None:
    """A few batches before the first epoch, to see that validation works; nothing is left of it."""
    if job.sanity_batches and not trainer.progress.is_done:
        with undisturbed(job.val_loader), trainer.progress.apart():
            validate(trainer, islice(job.val_loader or (), job.sanity_batches), phase="sanity")


def evaluate_best(trainer: Trainer, job: Job) -> None:
    """After the last epoch, unless a signal cut it short: the best model, once, on what was given for it."""
    run, loaders = trainer.progress, dict(job.last_loaders())
    if loaders and not run.is_interrupted:
        with best_weights(trainer):
            for phase, loader in loaders.items():
                evaluate(trainer, loader, phase=phase)


def save(trainer: Trainer, *, is_due: bool = False, is_judged: bool = False) -> list[Saved]:
    """Write the checkpoints that are due, and ``best.pt`` when the model was just judged and is the best.

    Every process takes part, since each has a place of its own, and the first one writes.
    """
    if not trainer.checkpoints:
        return []
    run = trainer.progress
    places = None if run.is_alone else run.ranks.gather(run.take_place())
    run.is_unsaved &= not is_due
    if trainer.rank != 0:
        return []
    take_state = partial(state.collect, trainer, places)
    with trainer.doing("save"):
        written = [
            saved
            for checkpoint in trainer.checkpoints
            for saved in checkpoint.save(trainer, take_state, is_due=is_due, is_judged=is_judged)
        ]
        for saved in written:
            tell_saved(trainer, saved)
    return written


def tell_saved(trainer: Trainer, saved: Saved) -> None:
    """Say that a file is on disk, or that it could not be written."""
    run, fitness = trainer.progress, saved.fitness
    if saved.error:
        run.publish(events.CheckpointFailed, path=str(saved.path), error=saved.error)
        return
    run.publish(
        events.ModelSave,
        path=str(saved.path),
        epoch=run.epoch,
        epochs=run.epochs,
        step=run.step,
        is_best=saved.is_best,
        fitness=fitness.current,
        previous_best=fitness.previous_best,
        monitor=fitness.monitor,
        value=fitness.value(run.metrics),
        bytes=saved.size_bytes,
    )
