"""Replicas that went wrong: detected by a checksum, named, and healed by the majority's copy.

Parameters and shared state are the same on all workers, by their types. A type knows nothing of a bit that
flips in memory or of a message that arrives wrong, and a replica that differs trains on unnoticed: its
votes are of another model. So now and then each device sums up what it holds (two words a leaf), all
compare, and who differs from the majority gets its copy.
"""

import warnings
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import wires
from lioncub_jax.exchange.checks import check_count
from lioncub_jax.mesh import axes, checksum
from lioncub_jax.mesh.hosts import from_key_words, key_words, part_of_device
from lioncub_jax.mesh.placement import Workers, check_workers
from lioncub_jax.mesh.specs import axes_in


class Difference(NamedTuple):
    """A replica that differs from the others.

    Attributes:
      leaf: its path in the state, such as ``.params['w']``.
      worker: its number.
      device: the device's id.
      step: steps done when it was detected; it went wrong after the check before.

    Example:
      See `Replicas`.
    """

    leaf: str
    worker: int
    device: int
    step: int

    def __str__(self) -> str:
        return f"{self.leaf} on worker {self.worker} (device {self.device}) after step {self.step}"


class ReplicasDiffer(RuntimeError):
    """Replicas differ and no majority says which is right; see `Replicas`."""


class ReplicaHealed(UserWarning):
    """A replica differed and was given the majority's copy; see `Replicas`."""


class Replicas:
    """Compares what must be the same on all workers, every so many steps, and heals who differs.

    A worker that differs keeps its own momentum and quantization errors. Until it is detected it votes with
    other parameters, and nothing else of it reaches the others.

    Args:
      workers: a `Workers`.
      every: compare at every K-th call. With 1 nothing wrong ever votes. One compare reads what a device
        holds once and sends two words a leaf.
      heal: give who differs the majority's copy and go on, though what it voted for since the last compare
        counted; False raises instead, so that the run goes back to a state of before and ends as if
        nothing had been. Save then where a compare was, right after it.

    Attributes:
      differences: every `Difference` so far, healed.

    Raises:
      TypeError: for workers that are none.
      ValueError: for ``every`` below 1, or a single replica.
      ValueError: when called, for a state that lies elsewhere.
      ReplicasDiffer: when called, where copies differ and none has more than half of them, with two
        workers always; with ``heal=False`` where they differ at all. What was trained since the last check
        is not to be trusted: go back to a checkpoint.

    Example:
      >>> import lioncub_jax as lc
      >>> def trained(step, state, batches, workers):
      ...     replicas = lc.audit.Replicas(workers, every=100)
      ...     for batch in batches:
      ...         state, metrics = step(replicas(state), batch)
      ...     return state

    Source: this library.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        every: int = 100,
        heal: bool = True,
    ):
        check_workers(workers)
        self._workers = workers
        check_count(f"every={every!r}", every, "a number of steps, 1 or more")
        if self._workers.num_gradients == 1:
            raise ValueError(
                "Replicas compares workers, and there is one: leave it out, or give a mesh of more"
            )
        self._every, self._heal, self._calls = every, heal, 0
        self.differences: list[Difference] = []

    def __call__(self, state: Any) -> Any:
        """Compares if it is time, and returns the state, healed."""
        self._calls += 1
        return state if self._calls % self._every else self.check(state)

    def check(self, state: Any) -> Any:
        """Compares now; as a call otherwise."""
        paths, tree = jax.tree_util.tree_flatten_with_path(state)
        leaves = {jax.tree_util.keystr(path): x for path, x in paths}
        shared = {path: key_words(x) for path, x in leaves.items() if self._is_shared(path, x)}
        for path, copies in checksum.copies(shared)().items():
            if (copies.sums == copies.sums[0]).all():
                continue
            step = int(getattr(state, "step", self._calls))
            wrong, source = self._compare(path, copies, step)
            differences = []
            for place in np.flatnonzero(wrong).tolist():
                device = int(copies.mesh.devices.flat[place].id)
                differences.append(Difference(path, self._worker(place), device, step))
            self.differences += differences
            if not self._heal:
                raise ReplicasDiffer(
                    f"a replica is wrong: {differences[0]}, and heal=False. {self._advice()}"
                )
            words = from_key_words(_copy_from(shared[path], source), leaves[path])
            leaves[path] = jax.device_put(words, leaves[path].sharding)
            for difference in differences:
                warnings.warn(
                    f"a replica was wrong and has the majority's copy now: {difference}. One flipped "
                    "bit is an accident; if this device comes up again, take it out",
                    ReplicaHealed,
                    stacklevel=3,
                )
        return jax.tree.unflatten(tree, leaves.values())

    def _is_shared(self, path: str, x: Any) -> bool:
        """True for a leaf that is the same on all workers."""
        sharding, mesh = getattr(x, "sharding", None), self._workers.mesh
        if isinstance(sharding, NamedSharding) and np.array_equal(
            sharding.mesh.devices, mesh.devices
        ):
            own = set(axes_in(sharding.spec)) & set(self._workers.axes)
            return x.size > 0 and not own
        raise ValueError(
            f"{path} is not on the mesh of the workers (it lies {sharding}): give the state that "
            "init_state or a training step returned"
        )

    def _compare(
        self, path: str, copies: checksum.Copies, step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compares copies: ``bool[devices]`` of wrong ones, and of one that is right for each shard."""
        wrong, source = np.zeros((2, copies.mesh.devices.size), bool)
        two_words = copies.sums.view(np.uint64)[..., 0]
        for words, devices in zip(two_words.T, copies.devices.T, strict=True):
            _, side, sizes = np.unique(words, return_inverse=True, return_counts=True)
            if 2 * sizes.max() <= len(words):
                sides = [sorted({self._worker(d) for d in devices[side == i]}) for i in set(side)]
                raise ReplicasDiffer(
                    f"replicas differ, and no majority says which is right: after step {step} {path} is "
                    f"the same on the workers of each list of {sorted(sides)}. {self._advice()}; with 3 or "
                    "more workers one that goes wrong is healed"
                )
            right = side == sizes.argmax()
            source[devices[right][0]] = True
            wrong[devices[~right]] = True
        return wrong, source

    def _advice(self) -> str:
        return (
            f"What was trained since the last check, at most {self._every} calls ago, is not to be "
            "trusted: go back to a state or a checkpoint of before (Checkpoints.restore)"
        )

    def _worker(self, device: int) -> int:
        """The number of the worker that a device, by its place in the mesh, belongs to."""
        mesh, axis = self._workers.mesh, axes.names(self._workers.axis)
        return part_of_device(mesh, axis)[mesh.devices.flat[device]]


def _copy_from(x: jax.Array, source: np.ndarray) -> jax.Array:
    """Copies each shard from its source."""
    mesh = checksum.untyped(x.sharding.mesh)  # type: ignore[attr-defined]
    spec = x.sharding.spec  # type: ignore[attr-defined]
    sharding = NamedSharding(mesh, spec)
    copied_over = tuple(n for n in mesh.axis_names if n not in axes_in(spec))

    def of_device(x: jax.Array, source: jax.Array) -> jax.Array:
        bits = wires.from_one(checksum.to_words(x), source[0], copied_over)
        return checksum.from_words(bits, x)

    specs = spec, P(mesh.axis_names)
    # Copies differ under one label: that is what is mended.
    run = jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
    plain = jax.device_put(x, sharding)
    with jax.set_mesh(mesh):  # whatever mesh the caller has set
        return jax.jit(run, out_shardings=sharding)(plain, source)
