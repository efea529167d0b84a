"""Holders of a state's values: which copies of them differ, and what a checkpoint keeps of each."""

import enum


class Holder(enum.StrEnum):
    """Holders of the values of a field of a state.

    A state class declares them by a method ``holders() -> dict[field, Holder]``. Other fields have those of
    their place, see `exchange.holders`, and in a checkpoint those of their sharding.
    """

    ALL = "all"  # one value, the same everywhere
    WORKER = "worker"  # each worker its own
    FRONT = "front"  # likewise, by its place in front of an exchange
    FEEDBACK = "feedback"  # each worker its own error; their mean over the workers must be kept
    OWNER = "owner"  # the owner of each chunk of a bucket its own
    MEASURED = "measured"  # one value, the same everywhere, which the next measurement replaces
