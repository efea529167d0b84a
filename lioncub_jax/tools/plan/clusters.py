"""Machines by name: workers, links and memory of hardware that people have, from their vendors' pages.

`clusters.json` has the rates that vendors state or that follow from them, each way: half of what they state
for both ways. Links are ``[bits per second, seconds, kind]``. Latencies are assumed, for no vendor states
any: 1 us between chips of a TPU slice, 5 us over NVLink, 20 us between nodes whose cards read a GPU's
memory, 50 us over TCP and data centre networks.
"""

import functools
from typing import NamedTuple

from lioncub_jax.tools.plan.evidence import check_one_of, rows_of
from lioncub_jax.tools.plan.model import Cluster, Link


class NamedCluster(NamedTuple):
    """Hardware that has a name.

    Attributes:
      about: what it is, in words.
      cluster: workers, links and memory.
      source: the vendor's pages that the rates are from, and how they follow.
    """

    about: str
    cluster: Cluster
    source: str


@functools.cache
def clusters() -> dict[str, NamedCluster]:
    """Reads all machines that have a name.

    Example:
      >>> clusters()["v5e-8"].cluster.num_workers
      8
    """
    named = {}
    for name, row in rows_of("clusters.json").items():
        about, source = row.pop("about"), row.pop("source")
        link, inside = Link(*row.pop("link")), row.pop("inside", None)
        cluster = Cluster(link=link, inside=Link(*inside) if inside else None, **row)
        named[name] = NamedCluster(about, cluster, source)
    return named


def cluster_named(name: str) -> NamedCluster:
    """Finds the machines of that name.

    Raises:
      ValueError: if there are none.

    Example:
      >>> cluster_named("8x4090-10g").about
      '8 machines of one GeForce RTX 4090 each, on Ethernet of 10 Gbit/s'
    """
    check_one_of("cluster", name, clusters())
    return clusters()[name]
