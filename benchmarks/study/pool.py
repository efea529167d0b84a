"""Runs in several processes, of one core each; rows are written as they come."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# One thread each: small programs gain nothing from a second core.
FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
AT_ONCE = 8  # runs of one program that a process takes before its rows are written


def run_all(
    groups: Iterable[list[Any]], run: Callable[[list[Any]], report.Rows], jobs: int, save: Path
) -> report.Rows:
    """Runs groups of which each is of one program, in parts; what ``run`` returns is kept in a file."""
    chunks = [group[i : i + AT_ONCE] for group in groups for i in range(0, len(group), AT_ONCE)]
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    columns = TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    found: report.Rows = []
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    with pool, Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("runs", total=sum(map(len, chunks)))
        for done in as_completed([pool.submit(run, chunk) for chunk in chunks]):
            report.append(save, done.result())
            found += done.result()
            progress.advance(bar, len(done.result()))
    return found
