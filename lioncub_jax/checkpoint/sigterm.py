"""A stop at a step of the run's own, when a cluster asks for it by SIGTERM."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

import jax

from lioncub_jax.exchange.checks import check_count
from lioncub_jax.mesh.hosts import any_process


@contextlib.contextmanager
def stop_on_sigterm(
    every: int = 10, *, signals: Sequence[int] = (signal.SIGTERM,)
) -> Iterator[Callable[[int], bool]]:
    """Lets a run end at a step of its own when it is asked to stop, as clusters do before they take over.

    Args:
      every: several processes ask each other at steps that are multiples of this. To ask, the host waits
        until the devices have done all steps given to them, so at every step the devices would idle
        while the host prepares the next; ``every`` steps must fit into the time between SIGTERM and
        the kill. A single process knows at once.
      signals: others in place of SIGTERM or beside it, such as SIGUSR1, which Open MPI passes on; after
        SIGTERM it kills at once.

    Returns:
      A context manager of ``stopping(step)``: whether SIGTERM has come, to any process. All get the
      same answer at the same step, so all must call it at every step. The handler of before is put back at
      the end of the context; where another process brought the stop, when the SIGTERM to this one, which
      changes nothing more, has come.

    Raises:
      ValueError: outside the main thread, where Python takes no signals, or ``every`` below 1.

    Enter it after `lioncub_jax.mesh.join`, which has a handler of its own.

    Example:
      >>> from lioncub_jax.checkpoint import stop_on_sigterm
      >>> with stop_on_sigterm() as stopping:
      ...     for step in range(3):
      ...         if stopping(step):
      ...             break
      >>> step
      2
    """
    check_count(f"every={every!r}", every)
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "stop_on_sigterm: Python takes signals in the main thread only; enter it there. Where a "
            "launcher runs the loop in a thread, ask the launcher: ray.train.get_preemption_info()"
        )
    asked = agreed = left = False

    def take(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        if left:
            put_back()

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def stopping(step: int) -> bool:
        nonlocal agreed
        if not agreed and (jax.process_count() == 1 or step % every == 0):
            agreed = any_process(asked)
        return agreed

    before = {number: signal.signal(number, take) for number in signals}
    try:
        yield stopping
    finally:
        left = True
        # Clusters do not signal all at once: this process may be asked while its last save is written.
        if asked or not agreed:
            put_back()
