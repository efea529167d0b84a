"""How every benchmark ends: one JSON object as its last line, kept in a file if asked."""

import argparse
import datetime
import json
import pathlib
import platform
import sys
from typing import Any

import flax
import jax
import optax


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    out = argparse.ArgumentParser(description=doc.splitlines()[0])
    out.add_argument("--save", type=pathlib.Path, help="append the JSON line to this file")
    return out


def finish(summary: dict[str, Any], save: pathlib.Path | None) -> None:
    """Prints the summary as the last line and appends it, with command, versions and date."""
    line = json.dumps(summary | provenance())
    if save:
        save.parent.mkdir(parents=True, exist_ok=True)
        with save.open("a") as file:
            file.write(line + "\n")
    print(line)


def provenance() -> dict[str, Any]:
    """What is needed to repeat a row."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "device": jax.devices()[0].device_kind,
        "processor": platform.machine(),
    }
