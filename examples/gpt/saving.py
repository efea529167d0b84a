"""Checkpoints of a run: saved on the way and when it is asked to stop, and continued."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import lioncub_jax as lc
from gpt.meshes import Layout
from gpt.training import Run
from lioncub_jax.tools.run import Snapshots, memory_folder

Stops = Callable[[lc.StepState, int, bool], bool]  # (state, step, is the last) -> stop now


SNAPSHOT_EVERY = 5  # steps, under lioncub run


class Saved(NamedTuple):
    """Sources of a run that goes on."""

    checkpoints: lc.Checkpoints
    snapshots: Snapshots | None  # in memory, where lioncub run has given some


class Refused(ValueError):
    """Checkpoints that do not fit what was asked."""


@contextlib.contextmanager
def opened(args: argparse.Namespace, layout: Layout) -> Iterator[Saved | None]:
    """The checkpoints in ``--checkpoint``, or None; left when all of them are written."""
    if args.checkpoint is None:
        yield None
        return
    try:
        checkpoints = lc.Checkpoints(args.checkpoint, workers=layout.voters, keep=3)
    except ValueError as error:
        raise Refused(f"--checkpoint: {error}") from None
    with checkpoints:
        if checkpoints.steps() and not args.resume:
            raise Refused(
                f"--checkpoint {args.checkpoint} has one of step {checkpoints.steps()[-1]}: go on from "
                "there with --resume, or give another folder"
            )
        memory = memory_folder()
        if memory is None:
            yield Saved(checkpoints, None)
            return
        buddies = 100 if layout.workers > 1 else 0
        with Snapshots(
            checkpoints, memory / "snapshots", every=SNAPSHOT_EVERY, buddies=buddies
        ) as snapshots:
            if not args.resume:
                snapshots.clear()  # of a run before, that is not gone on with
            yield Saved(checkpoints, snapshots)


def resumed(run: Run, saved: Saved | None, steps: int) -> Run:
    """The run as it was saved last, on the mesh of now; as it is, if it never was."""
    if saved is None or not (saved.snapshots or saved.checkpoints.steps()):
        return run
    try:
        restored = (saved.snapshots or saved.checkpoints).restore(run.state)
    except ValueError as error:
        raise Refused(f"--resume: {error}") from None
    if restored is None:
        # The first may be the one that is needed.
        saved.snapshots.save(run.state, {"seed": run.seed})
        return run
    if restored.step >= steps:
        raise Refused(
            f"--resume: {restored.step} steps are done and --steps is {steps}: nothing is left to do"
        )
    # With the step's number the seed is all that the text's stream depends on.
    return run._replace(state=restored.state, seed=restored.data["seed"])


@contextlib.contextmanager
def during(run: Run, saved: Saved | None, every: int) -> Iterator[Stops]:
    """Saves every so many steps; after SIGTERM at once, and then the run is to stop."""
    if saved is None:
        yield lambda state, step, is_last: False
        return
    with lc.stop_on_sigterm() as stopping:

        def stops(state: lc.StepState, step: int, is_last: bool) -> bool:
            stop = stopping(step)
            if saved.snapshots:
                saved.snapshots(state, {"seed": run.seed})
            if stop or is_last or step % every == 0:
                saved.checkpoints.save(state, {"seed": run.seed}, wait=stop)
            return stop

        yield stops
