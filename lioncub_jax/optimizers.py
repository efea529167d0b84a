"""Optimizers whose workers exchange a few bits per parameter, with the arguments of optax.

Every method but the baseline in the last line is one call of `communicate`:

| optimizer | worker sends | owner | travels back |
|---|---|---|---|
| `distributed_lion` | sign of its own blend | counts | the majority, or the counts |
| `lion_cub` | 1 or p bits of its own blend | counts | the majority |
| `lion_cub(quantizer=integer(p))` | the paper's integer codes | counts | the exact sign, in 2 bits |
| the same, `wire=counts()` | as above | (all-reduce) | nothing: the sum is everywhere |
| `owner_lion` | p bits of its gradient | one global momentum, Lion | Lion's sign, exactly |
| `owner_adamw`, `owner(tx)` | p bits of its gradient | AdamW, or tx | the update, in q bits |
| `owner_muon` | p bits of its gradient | Muon, of whole matrices | the update, in q bits |
| `global_gradients(tx)` | its gradient, float32 | (all-reduce) | nothing: the mean is everywhere |

The parameters are cut into W chunks. The owner of a chunk is the worker that decides on it for all, as a
shard's owner in ZeRO-1. Each optimizer is a direction, then weight decay, then the learning rate, as in
optax: ``lion_cub`` has `scale_by_lion_cub` where ``optax.lion`` has ``optax.scale_by_lion``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import optax
from jax.typing import ArrayLike, DTypeLike

from lioncub_jax.exchange import checks, decide, matrices, momentum, quantize, wires
from lioncub_jax.exchange.checks import (
    check_betas,
    check_count,
    check_decay,
    check_eps,
    check_floating,
    check_kinds,
    check_rates,
)
from lioncub_jax.exchange.decide import Decision, ReplyCodec
from lioncub_jax.exchange.mapped import on_workers
from lioncub_jax.exchange.matrices import DimensionNumbers
from lioncub_jax.exchange.quantize import Quantizer
from lioncub_jax.exchange.sync import Schedule, sync_momentum
from lioncub_jax.exchange.transform import communicate
from lioncub_jax.exchange.wires import Wire
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.axes import AxisName
from lioncub_jax.mesh.placement import Workers, worker_axes
from lioncub_jax.mesh.specs import StateSpecs

# A tree of bools like the parameters, or a function of them to one; None for all leaves.
Mask: TypeAlias = optax.Params | Callable[[optax.Params], optax.Params] | None
NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315  # of Muon, as optax has them

# What is sent by default.
SIGN, FEEDBACK = quantize.sign(), quantize.error_feedback(quantize.midrise(3))
TWO_BITS, TWO_PHASE = decide.codes(2), wires.two_phase()


def lion_cub(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9, b2: ArrayLike = 0.99, mu_dtype: DTypeLike | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-3, mask: Mask = None,
    *,
    workers: AxisName | Workers | None,
    quantizer: Quantizer = SIGN, wire: Wire = TWO_PHASE,
    sync: Schedule | None = None, sync_where: Mask = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """Lion Cub: Lion whose workers vote with 1 or p bits of their own blend of gradient and momentum.

    For worker ``i`` with gradient ``g_i``, codes ``Q`` and the parameters ``p``::

        c_i  = b1 mu_i + (1 - b1) g_i
        u    = sign(sum_i Q(c_i))
        p    = p - learning_rate (u + weight_decay p)
        mu_i = b2 mu_i + (1 - b2) g_i            # every sync: mu_i = mean_i mu_i

    Args:
      learning_rate: a number or an optax schedule.
      b1: weight of the momentum in the vote, in [0, 1).
      b2: decay of the momentum, in [0, 1).
      mu_dtype: dtype of the momentum; None for that of the parameters.
      weight_decay: decoupled, times the learning rate.
      mask: the leaves that decay, a tree of bools or a function of the parameters.
      workers: a `Workers`, or the name of the axis (a tuple: axes) that your own ``shard_map`` or
        ``pmap`` binds. None for one device, where it is ``optax.lion``.
      quantizer: ``sign()`` (default), ``midrise(p)``, the paper's ``integer(p)``, or ``ternary()``.
      wire: ``two_phase()`` by default; ``counts()`` for the paper's all-reduce of ``integer(p)``.
      sync: when momenta are averaged, of `sync`; None (default) for never.
      sync_where: the leaves whose momenta are.
      bucket_size: see `communicate`.

    Returns:
      A transform whose ``update`` must run where the workers' axis is bound. It takes gradients that vary
      over the workers, and returns updates of the same shapes that are the same on all.

    Raises:
      ValueError: as `communicate`; for betas outside [0, 1), and rates and decays that are not finite.
      TypeError: for a component of the wrong kind, or a mask that is not of bools.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.lion_cub(1e-4, weight_decay=0.1, workers="data", sync=lc.sync.every(1000))

    References:
      Ishikawa et al., "Lion Cub" (arXiv 2411.16462); Chen et al., Lion (arXiv 2302.06675).
    """
    vote = scale_by_lion_cub(
        b1, b2, mu_dtype, workers=workers, quantizer=quantizer, wire=wire, bucket_size=bucket_size
    )  # fmt: skip
    return descending(_synced(vote, sync, sync_where, workers), learning_rate, weight_decay, mask)


def distributed_lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9, b2: ArrayLike = 0.99, mu_dtype: DTypeLike | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-3, mask: Mask = None,
    *,
    workers: AxisName | Workers | None,
    average: bool = False, wire: Wire = TWO_PHASE,
    sync: Schedule | None = None, sync_where: Mask = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """Distributed Lion: workers send signs; the update is their majority or their average.

    `lion_cub` with ``Q = sign``, and either of two updates of the n workers that vote::

        u = sign(sum_i sign(c_i))     # "MaVo", the majority vote: distributed_lion(lr)
        u = sum_i sign(c_i) / n       # "Avg": distributed_lion(lr, average=True)

    Arguments that are not named here are those of `lion_cub`, and so are the errors, and what is returned.

    Args:
      average: False for the majority (1 bit back), True for the mean of the signs over the votes cast (the
        planes of the count back).
      sync: the paper never syncs.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.distributed_lion(1e-4, workers="data", average=True)

    References:
      Liu et al., "Communication Efficient Distributed Training with Distributed Lion" (arXiv 2404.00438).
    """
    vote = scale_by_lion_cub(
        b1, b2, mu_dtype, workers=workers, wire=wire, bucket_size=bucket_size,
        decision=decide.average() if average else decide.majority(),
    )  # fmt: skip
    return descending(_synced(vote, sync, sync_where, workers), learning_rate, weight_decay, mask)


def scale_by_lion_cub(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    mu_dtype: DTypeLike | None = None,
    *,
    workers: AxisName | Workers | None,
    quantizer: Quantizer = SIGN,
    decision: Decision | None = None,
    wire: Wire = TWO_PHASE,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Directions of `lion_cub` and `distributed_lion`, where ``optax.scale_by_lion`` stands in a chain.

    `communicate` with ``momentum=momentum.blend(b1, b2, mu_dtype)``, so that
    ``decision=decide.average()`` makes it that of "Avg".

    Args:
      b1: as `lion_cub`.
      b2: as `lion_cub`.
      mu_dtype: as `lion_cub`.
      workers: as `lion_cub`.
      quantizer: as `lion_cub`.
      decision: of the owner, as `communicate`.
      wire: as `lion_cub`.
      bucket_size: as `lion_cub`.

    Returns:
      As `communicate`: ``u``, with neither weight decay nor a learning rate.

    Raises:
      ValueError, TypeError: as `communicate`.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> vote = lc.scale_by_lion_cub(0.9, 0.99, workers="data")
      >>> tx = optax.chain(vote, optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(1e-4))

    References:
      As `lion_cub`.
    """
    rule = momentum.blend(b1, b2, mu_dtype)
    return communicate(
        workers=workers, momentum=rule, quantizer=quantizer, decision=decision, wire=wire,
        bucket_size=bucket_size,
    )  # fmt: skip


def owner_lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9, b2: ArrayLike = 0.99, mu_dtype: DTypeLike | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-3, mask: Mask = None,
    *,
    workers: AxisName | Workers | None,
    quantizer: Quantizer = FEEDBACK, wire: Wire = TWO_PHASE,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """Lion with one momentum for all workers, each chunk of it at its owner: no drift, no sync.

    `owner` with ``optax.scale_by_lion(b1, b2)``, whose sign is the whole update: one exact bit comes back.
    A worker keeps d/W of momentum, or all of it if the wire is not ``sharded``; and with error feedback, as
    by default, an error of its own as large as the parameters, in bfloat16.

    Arguments that are not named here are those of `lion_cub`, and so are the errors.

    Args:
      mu_dtype: dtype of the one momentum; None for float32.
      quantizer: of gradients; ``error_feedback(midrise(3))`` by default; ``dense()`` for the exact mean.

    Returns:
      A transform whose ``update`` must run where the workers' axis is bound; so must ``init`` where
      ``workers`` is a name.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.owner_lion(1e-4, workers="data", quantizer=lc.quantize.midrise(4))

    References:
      This library; the optimizer is Lion (arXiv 2302.06675), its chunks are ZeRO-1's (arXiv 1910.02054).
    """
    check_betas(b1=b1, b2=b2)
    check_decay(b2, mu_dtype)
    direction = owner(
        _with_numbers(optax.scale_by_lion, b1, b2, mu_dtype), workers=workers, quantizer=quantizer,
        reply=decide.sign(), wire=wire, bucket_size=bucket_size,
    )  # fmt: skip
    return descending(direction, learning_rate, weight_decay, mask)


def owner_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9, b2: ArrayLike = 0.999, eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 1e-4, mask: Mask = None,
    *,
    workers: AxisName | Workers | None,
    quantizer: Quantizer = FEEDBACK, reply: ReplyCodec = TWO_BITS, wire: Wire = TWO_PHASE,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """AdamW with one pair of moments for all workers, each chunk of them at its owner.

    `owner` with ``optax.scale_by_adam(b1, b2, eps)``. A worker keeps moments of d/W parameters, in float32,
    or of all d if the wire is not ``sharded``, and the errors of its codes and replies. In a step in which
    no worker takes part, the moments and their counter stay.

    Args:
      learning_rate: a number or an optax schedule.
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the root of the second moment, above 0.
      weight_decay: decoupled, multiplied with the learning rate.
      mask: the leaves that decay, a tree of bools or a function of the parameters.
      workers: a `Workers`, or the name of the axis that your own ``shard_map`` or ``pmap`` binds. None for
        one device.
      quantizer: codes of gradients, ``error_feedback(midrise(3))`` by default, 3 bits.
      reply: codes of the update on its way back, ``decide.codes(2)`` by default, 2 bits.
      wire: the collectives that carry them, ``wires.two_phase()`` by default.
      bucket_size: elements after which a new bucket begins, so that exchanges overlap with the backward
        pass; see `communicate`. None for no limit.

    Returns:
      A transform whose ``update`` must run where the workers' axis is bound; so must ``init`` where
      ``workers`` is a name.

    Raises:
      ValueError, TypeError: as `owner` and `lion_cub`; for an ``eps`` that is 0 in float32.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.owner_adamw(1e-3, weight_decay=0.1, workers="data")

    References:
      This library; the optimizer is AdamW (arXiv 1711.05101), its chunks are ZeRO-1's (arXiv 1910.02054).
    """
    check_betas(b1=b1, b2=b2)
    check_eps(eps)
    direction = owner(
        _with_numbers(optax.scale_by_adam, b1, b2, eps), workers=workers, quantizer=quantizer,
        reply=reply, wire=wire, bucket_size=bucket_size,
    )  # fmt: skip
    return descending(direction, learning_rate, weight_decay, mask)


def owner_muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: Any = NEWTON_SCHULZ, ns_steps: int = 5,
    beta: ArrayLike = 0.95, eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0, weight_decay_mask: Mask = None,
    mu_dtype: DTypeLike | None = None,
    *,
    workers: AxisName | Workers | None,
    nesterov: bool = True, adaptive: bool = False, preconditioning: Any = "frobenius",
    adam_b1: ArrayLike = 0.9, adam_b2: ArrayLike = 0.999, adam_eps_root: ArrayLike = 0.0,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: DimensionNumbers = None,
    consistent_rms: ArrayLike | None = 0.2,
    quantizer: Quantizer = FEEDBACK, reply: ReplyCodec = TWO_BITS, wire: Wire = TWO_PHASE,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """Muon of the hidden matrices and AdamW of the rest, once for all workers: each matrix at one owner.

    With the mean ``g`` of what workers sent, the momentum ``mu`` of a matrix ``[m, n]`` in step t, and
    Newton-Schulz ``N``::

        mu = beta mu + (1 - beta) g
        c  = beta mu / (1 - beta^(t+1)) + (1 - beta) g / (1 - beta^t)
        u  = consistent_rms sqrt(max(m, n)) N(c / (|c| + eps))
        p  = p - learning_rate (u + weight_decay p)

    It is ``optax.contrib.scale_by_muon`` of whole matrices in float32, 1/W of all at each owner. Unlike
    there, ``consistent_rms`` is 0.2 by default, ``ns_coeffs`` are numbers, and ``adaptive`` scales each
    matrix by its own product. docs/explain/muon.md says which leaves it suits.

    Args:
      learning_rate: a number or an optax schedule.
      mu_dtype: of the first moments at rest; None for float32.
      workers: as `owner_adamw`. One alone is ``optax.contrib.muon``, to the last bits of float32.
      adam_learning_rate: of leaves that are no matrices; None for ``learning_rate``.
      muon_weight_dimension_numbers: ``optax.contrib.MuonDimensionNumbers`` in a tree (prefix) like the
        parameters, None for a leaf that is no matrix, or a function of the parameters. By default leaves
        of two dimensions.
      consistent_rms: root mean square of an update; None for ``sqrt(max(1, n / m))`` times its matrix.
      quantizer: ``error_feedback(midrise(3))`` by default.
      reply: ``decide.codes(2)`` by default.
      wire: ``wires.two_phase()``.

    All other arguments are those of ``optax.contrib.muon``.

    Returns:
      A transform whose ``update`` must run where the workers' axis is bound; so must ``init`` where
      ``workers`` is a name.

    Raises:
      ValueError, TypeError: as `owner`.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.owner_muon(0.01, weight_decay=0.1, workers="data")

    References:
      Jordan et al., Muon (2024); Liu et al. (arXiv 2502.16982).
    """
    check_betas(beta=beta, adam_b1=adam_b1, adam_b2=adam_b2)
    for b in (beta, adam_b1):
        check_decay(b, mu_dtype)
    check_eps(eps)
    check_count(f"ns_steps={ns_steps!r}", ns_steps)
    how = {
        "ns_steps": ns_steps, "mu_dtype": mu_dtype, "nesterov": nesterov, "adaptive": adaptive,
        "preconditioning": preconditioning,
    }  # fmt: skip
    adam = partial(optax.scale_by_adam, mu_dtype=mu_dtype, nesterov=nesterov)
    muon = partial(muon_of_matrix, **how)
    direction = owner(
        _with_numbers(muon, ns_coeffs, beta, eps, consistent_rms), workers=workers,
        rest=_with_numbers(adam, adam_b1, adam_b2, eps, adam_eps_root),
        dimension_numbers=muon_weight_dimension_numbers, quantizer=quantizer, reply=reply, wire=wire,
    )  # fmt: skip

    def labels(params: optax.Params) -> Any:
        each = matrices.matrices_of(muon_weight_dimension_numbers, params)
        return jax.tree.unflatten(jax.tree.structure(params), [bool(one.row_dims) for one in each])

    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    behind = {
        True: descending(optax.identity(), learning_rate, weight_decay, weight_decay_mask),
        False: descending(optax.identity(), rate, adam_weight_decay, None),
    }
    return optax.chain(direction, optax.partition(behind, labels))


def muon_of_matrix(
    ns_coeffs: Any = NEWTON_SCHULZ,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    consistent_rms: ArrayLike | None = 0.2,
    **how: Any,
) -> optax.GradientTransformation:
    """Muon of one matrix, scaled by its shape; ``how`` has the rest of ``optax.contrib.scale_by_muon``."""
    muon = optax.contrib.scale_by_muon(ns_coeffs, beta=beta, eps=eps, **how)

    def init(params: jax.Array) -> Any:  # coefficients are no state
        return muon.init(params)._replace(ns_coeffs=())

    def update(updates: jax.Array, state: Any, params: None = None) -> tuple[jax.Array, Any]:
        m, n = updates.shape
        u, state = muon.update(updates, state._replace(ns_coeffs=muon.init(updates).ns_coeffs))
        rms = consistent_rms
        scale = max(1, n / m) ** 0.5 if rms is None else rms * max(m, n) ** 0.5
        return u * scale, state._replace(ns_coeffs=())

    return optax.GradientTransformation(init, update)


def owner(
    tx: optax.GradientTransformation,
    *,
    workers: AxisName | Workers | None,
    rest: optax.GradientTransformation | None = None, dimension_numbers: DimensionNumbers = None,
    quantizer: Quantizer = FEEDBACK, reply: ReplyCodec = TWO_BITS, wire: Wire = TWO_PHASE,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """Any elementwise optax transform, once for all workers: each chunk of its state at one worker.

    It stands where ``tx`` stood in a chain. Worker ``i`` sends codes ``Q`` of its gradient; the owner
    of a chunk decodes, averages, runs ``tx``, and sends codes of its update to all::

        q_i  = Q(g_i + e_i);                e_i = g_i + e_i - dequantize(q_i)
        u, s = tx(mean_i dequantize(q_i), s)
        r    = R(u + f);                    f   = u + f - dequantize(r)

    The update on every worker is ``dequantize(r)``. Behind the mean, ``owner(optax.identity(), ...)``,
    any transform can stand. **With** ``rest`` an owner has whole matrices, and ``tx`` is given one
    ``[m, n]`` at a time; ``rest`` is elementwise, for all other leaves.

    Args:
      tx: such as ``optax.scale_by_adam()``. What mixes elements (a norm, a matrix) and what uses the
        parameters (weight decay) stands behind it in the chain.
      workers: as `lion_cub`.
      rest: the transform of what is no matrix, where ``tx`` is one of whole matrices; else None.
      dimension_numbers: then, which leaves are matrices, as `owner_muon`.
      quantizer: of gradients; ``error_feedback(midrise(3))`` by default; ``dense()`` for the exact mean.
      reply: codes of the update: ``decide.codes(2)`` by default; ``decide.sign()`` where ``tx`` ends in a
        sign, ``decide.values()`` for float32.
      wire: as `communicate`.
      bucket_size: as `communicate`.

    Returns:
      A transform whose ``update`` must run where the workers' axis is bound; so must ``init`` where
      ``workers`` is a name.

    Raises:
      ValueError: as `communicate`; when traced, for a ``tx`` that mixes elements, uses parameters or
        keeps arrays of another shape.
      TypeError: for a component of the wrong kind, or a ``tx`` that is no transform.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> tx = optax.chain(
      ...     lc.owner(optax.scale_by_adam(), workers="data"),
      ...     optax.add_decayed_weights(0.1),
      ...     optax.scale_by_learning_rate(1e-3),
      ... )

    References:
      This library; feedback both ways as dist-EF-blockSGD (Zheng et al., arXiv 1905.10936).
    """
    check_kinds(quantizer=(quantizer, Quantizer), reply=(reply, ReplyCodec))
    decision = decide.at_owner(tx, reply, rest=rest, dimension_numbers=dimension_numbers)
    return communicate(
        workers=workers, momentum=momentum.nothing(), quantizer=quantizer, wire=wire,
        decision=decision, bucket_size=bucket_size,
    )  # fmt: skip


def _with_numbers(
    make: Callable[..., optax.GradientTransformation], *numbers: ArrayLike | DTypeLike | None
) -> optax.GradientTransformation:
    """A transform whose numbers are leaves of it: a traced one in a closure fails on Explicit axes."""

    def init(numbers: Any, params: optax.Params) -> optax.OptState:
        return make(*numbers).init(params)

    def update(numbers: Any, *given: Any) -> Any:
        return make(*numbers).update(*given)

    pytree = jax.tree_util.Partial  # with the numbers as leaves
    return optax.GradientTransformation(pytree(init, numbers), pytree(update, numbers))


def _synced(
    vote: optax.GradientTransformationExtraArgs,
    sync: Schedule | None,
    where: Mask,
    workers: AxisName | Workers | None,
) -> optax.GradientTransformationExtraArgs:
    """Votes, and the syncs of their momentum."""
    if sync is None and where is not None:
        raise ValueError("sync_where is given without sync: give a schedule, such as every(100)")
    if sync is None:
        return vote
    # One device has nothing to sync. Its sync is built all the same, because that checks the arguments.
    synced = sync_momentum(vote, sync, checks.as_mask("sync_where", where), workers=workers)
    return vote if workers is None else synced


def descending(
    direction: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule,
    mask: Mask,
) -> optax.GradientTransformationExtraArgs:
    """``-lr (u + wd p)`` of a direction ``u``, the decay of the leaves in the mask only.

    Without decay ``update`` needs no parameters.
    """
    check_rates(learning_rate=learning_rate, weight_decay=weight_decay)
    decay, mask = optax.identity(), checks.decay_mask(mask)
    if not isinstance(weight_decay, (int, float)) or weight_decay:
        decay = optax.add_decayed_weights(weight_decay, mask)
    elif mask is not None:  # one that does not fit is an error here too
        decay = optax.masked(decay, mask)
    return optax.chain(direction, decay, optax.scale_by_learning_rate(learning_rate))


class GlobalState(NamedTuple):
    """State of a transform that sees averaged gradients; the same on every worker.

    Attributes:
      inner: the state of that transform.
      specs: how the parameters and this state lie on the mesh, where that is known; no array.
    """

    inner: optax.OptState
    specs: StateSpecs | tuple[()] = ()

    @property
    def exchanges(self) -> bool:
        """True: workers communicate in the transform of this state."""
        return True


def global_gradients(
    tx: optax.GradientTransformation,
    dtype: DTypeLike | None = None,
    *,
    workers: AxisName | Workers | None,
) -> optax.GradientTransformationExtraArgs:
    """Any optax transform on the mean of gradients, ``u, s = tx(mean_i g_i, s)``: the baseline.

    No worker can abstain: the mean is over all of them.

    Args:
      tx: such as ``optax.lion(1e-4)`` or ``optax.adamw(1e-3)``.
      dtype: of the all-reduce of real gradients, such as ``bfloat16`` (which XLA widens to float32 on
        CPU); None for float32, or a gradient's own dtype where that is wider. Complex ones travel as they
        are.
      workers: as `lion_cub`; of two levels both axes as a tuple, or the `Workers`.

    Returns:
      A transform with state ``GlobalState``.

    Raises:
      TypeError: for a ``tx`` that is no transform.
      ValueError: for a dtype that is not floating; when traced, for ``abstain``.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> tx = lc.global_gradients(optax.adamw(1e-3), workers="data")
    """
    axis, group = worker_axes(workers)
    everyone = (*axis, *group)
    if dtype is not None:
        check_floating("dtype", dtype)
    check_kinds(tx=(tx, optax.GradientTransformation))
    tx = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> GlobalState:
        for path, _ in jax.tree_util.tree_leaves_with_path(params):
            checks.check_trained(path)
        return GlobalState(tx.init(wires.agreed(params, everyone)))

    def update(
        updates: optax.Updates,
        state: GlobalState,
        params: optax.Params | None = None,
        *,
        abstain: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, GlobalState]:
        checks.check_abstain(abstain, extra)
        if abstain is not None:
            raise ValueError(
                "abstain is given, and global_gradients averages the gradients of all workers: leave it "
                "out, or give owner(tx), whose workers can abstain"
            )
        if not axis:
            checks.warn_if_on_several_devices(updates)
        else:
            axes.check_bound(everyone)
            checks.check_local(updates, everyone)
            updates = wires.mean_over_workers(updates, everyone, dtype)
        updates, inner = tx.update(updates, state.inner, params, **extra)
        return updates, state._replace(inner=inner)

    return on_workers(optax.GradientTransformationExtraArgs(init, update), workers)
