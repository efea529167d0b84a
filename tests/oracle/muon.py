"""Muon at the owner on one page, in the manner of `lion`: workers are a leading array axis.

* **Units.** A leaf that is matrices by its dimension numbers is taken apart: its batch axes first, then
  those of the rows, then those of the columns, and each matrix ``[m, n]`` begins a row of the buffer. All
  other leaves are units as they are, and Adam's.
* **Momentum** of a matrix ``mu = b mu + (1-b) g`` has Nesterov's look ahead, as Adam's has:
  ``c = b mu / (1 - b**(t+2)) + (1-b) g / (1 - b**(t+1))`` in the step after ``t`` others.
* **Orthogonal.** ``X = c / (|c| + eps)`` with the Frobenius norm, and then five times, with ``A = X X^T``
  of the side that is not longer, ``X = 3.4445 X - 4.775 A X + 2.0315 A A X``. The update is
  ``0.2 sqrt(max(m, n)) X``.
* **Adam** of the rest: ``c / (sqrt(nu / (1 - b2**(t+1))) + eps)``, ``nu = b2 nu + (1-b2) g g``.
* All else is `lion.at_owner`.

Sources: Jordan et al. (Muon, 2024); the scale is that of Liu et al. (arXiv 2502.16982).
"""

import itertools
import math

import jax
import jax.numpy as jnp
import optax

from oracle.coding import buffer_of, error_feedback, midrise, product
from oracle.lion import Simulator, at_owner

NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315


def muon_at_owner(numbers, beta=0.95, b1=0.9, b2=0.999, eps=1e-8, codes=None, reply=2):
    """Directions of ``owner_muon``.

    Args:
      numbers: a function of the parameters to ``optax.contrib.MuonDimensionNumbers``; None for Adam's.
      beta: of the momentum of matrices.
      b1: of Adam's momentum.
      b2: of Adam's second moment.
      eps: added to norms, and to roots.
      codes: of gradients.
      reply: bits of a code on the way back.
    """
    codes = codes or error_feedback(midrise(3))

    def of(params):
        units = Units(params, numbers)
        return units, at_owner(directions(units, beta, b1, b2, eps), codes, reply)

    def init(params, workers):
        units, simulator = of(params)
        return simulator.init(units.of(params), workers)

    def update(grads, state, params=None, abstain=None, **how):
        units, simulator = of(jax.tree.map(lambda g: g[0], grads))
        u, state = simulator.update(jax.vmap(units.of)(grads), state, None, abstain, **how)
        return units.joined(u), state

    return Simulator(init, update)


class Units:
    """A tree as a list of matrices, and of leaves that are none."""

    def __init__(self, params, numbers):
        self.leaves, self.tree = jax.tree.flatten(params)
        given = self.tree.flatten_up_to(numbers(params))
        self.axes = [split_axes(x.ndim, one) for x, one in zip(self.leaves, given, strict=True)]

    def of(self, tree):
        """The units of a tree like it."""
        units = []
        for x, axes in zip(jax.tree.leaves(tree), self.axes, strict=True):
            units += [x] if axes is None else [*apart(x, *axes)]
        return units

    def are_matrices(self):
        """For each unit whether it is a matrix."""
        found = []
        for x, axes in zip(self.leaves, self.axes, strict=True):
            found += [False] if axes is None else [True] * len(apart(x, *axes))
        return found

    def joined(self, units):
        """The tree of its units."""
        rest, leaves = iter(units), []
        for x, axes in zip(self.leaves, self.axes, strict=True):
            if axes is None:
                leaves.append(next(rest))
                continue
            order = [*itertools.chain(*axes)]
            whole = jnp.stack([next(rest) for _ in apart(x, *axes)])
            whole = whole.reshape([x.shape[axis] for axis in order])
            leaves.append(whole.transpose([order.index(axis) for axis in range(x.ndim)]))
        return self.tree.unflatten(leaves)


def split_axes(ndim, given):
    """The axes of the batch, of the rows and of the columns of a leaf; None for one of Adam's."""
    if given is None:
        return None
    each = [(axes,) if isinstance(axes, int) else tuple(axes) for axes in given]
    rows, columns = ([axis % ndim for axis in axes] for axes in each)
    return [axis for axis in range(ndim) if axis not in (*rows, *columns)], rows, columns


def apart(x, batch, rows, columns):
    """A leaf as ``[matrices, m, n]``."""
    m, n = (math.prod(x.shape[axis] for axis in axes) for axes in (rows, columns))
    return x.transpose(*batch, *rows, *columns).reshape(-1, m, n)


def directions(units, beta, b1, b2, eps):
    """A transform of the rows of all units, as `lion.at_owner` runs it."""
    are_matrices = units.are_matrices()
    like = [jnp.zeros(x.shape) for x in jax.eval_shape(units.of, units.leaves)]
    buffer = buffer_of([x[None] for x in like])

    def rows(each):
        return buffer.join([x[None] for x in each])[0]

    b = rows([
        jnp.full(x.shape, beta if one else b1) for x, one in zip(like, are_matrices, strict=True)
    ])  # fmt: skip

    def init(zeros):
        return {"t": jnp.int32(0), "mu": zeros, "nu": zeros}

    def update(g, state, params=None):
        t = state["t"]
        mu, nu = b * state["mu"] + (1 - b) * g, b2 * state["nu"] + (1 - b2) * g * g
        c = b * mu / (1 - b ** (t + 2)) + (1 - b) * g / (1 - b ** (t + 1))
        adam = c / (jnp.sqrt(nu / (1 - b2 ** (t + 1))) + eps)
        each = zip(buffer.split(c, like), buffer.split(adam, like), are_matrices, strict=True)
        said = rows([muon(x, eps) if one else plain for x, plain, one in each])
        return said, {"t": t + 1, "mu": mu, "nu": nu}

    return optax.GradientTransformation(init, update)


def muon(c, eps):
    """The update of one matrix."""
    m, n = c.shape
    if m > n:
        return muon(c.T, eps).T
    x = c / (jnp.sqrt(jnp.sum(c * c)) + eps)
    one, three, five = NEWTON_SCHULZ
    for _ in range(5):
        a = product("ij,kj->ik", x, x)
        x = one * x + product("ik,kj->ij", three * a + five * product("ik,kj->ij", a, a), x)
    return 0.2 * max(m, n) ** 0.5 * x
