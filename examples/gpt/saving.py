"""Checkpoints of a run: saved on the way and when it is asked to stop, and continued."""

import argparse
import contextlib
from collections.abc import Callable, Iterator

import lioncub_jax as lc
from gpt.meshes import Layout
from gpt.training import Run

Stops = Callable[[lc.training.StepState, int, bool], bool]  # (state, step, is the last) -> stop now
# A context of a function: step -> was any process asked to stop.
Asks = Callable[[], contextlib.AbstractContextManager[Callable[[int], bool]]]


class Refused(ValueError):
    """Checkpoints that do not fit what was asked."""


@contextlib.contextmanager
def opened(args: argparse.Namespace, layout: Layout) -> Iterator[lc.Checkpoints | None]:
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
        yield checkpoints


def resumed(run: Run, checkpoints: lc.Checkpoints | None, steps: int) -> Run:
    """The run as it was saved last, on the mesh of now; as it is, if it never was."""
    if checkpoints is None or not checkpoints.steps():
        return run
    try:
        restored = checkpoints.restore(run.state)
    except ValueError as error:
        raise Refused(f"--resume: {error}") from None
    if restored.step >= steps:
        raise Refused(
            f"--resume: {restored.step} steps are done and --steps is {steps}: nothing is left to do"
        )
    # With the step's number the seed is all that the text's stream depends on.
    return run._replace(state=restored.state, seed=restored.data["seed"])


@contextlib.contextmanager
def during(run: Run, checkpoints: lc.Checkpoints | None, every: int, asks: Asks) -> Iterator[Stops]:
    """Saves every so many steps; when it is asked to stop at once, and then the run is to stop."""
    if checkpoints is None:
        yield lambda state, step, is_last: False
        return
    with asks() as stopping:

        def stops(state: lc.training.StepState, step: int, is_last: bool) -> bool:
            stop = stopping(step)
            if stop or is_last or step % every == 0:
                checkpoints.save(state, {"seed": run.seed}, wait=stop)
            return stop

        yield stops
