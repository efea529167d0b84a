"""Machines by name: workers, links and memory of hardware that people have, from their vendors' pages.

Rates are what vendors state or follow from it, each way: half of what they state for both ways. Programs
reach less. Latencies are assumptions, for no vendor states any: 1 us between chips of a TPU slice, 5 us
over NVLink, 20 us between nodes whose cards read a GPU's memory, 50 us over TCP and data centre networks.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from lioncub_jax.tools.plan.evidence import check_one_of
from lioncub_jax.tools.plan.model import Cluster, Link


class NamedCluster(NamedTuple):
    """Hardware that has a name.

    Attributes:
      about: what it is, in words.
      cluster: workers, links and memory.
      source: the vendor's pages that the rates are from, and what was made of them.
    """

    about: str
    cluster: Cluster
    source: str


_CHIPS, _NVLINK, _CARDS, _TCP = 1e-6, 5e-6, 20e-6, 50e-6  # seconds; assumed


def _slice(sides: tuple[int, ...], port: float) -> Cluster:
    """A mesh or torus of chips, each with a port of so many bits per second to every neighbor.

    Collectives along rings are as fast as the ports of a corner. In an all-to-all every chip sends half of
    what it has through the middle of the longest side, whose links are few.
    """
    chips, ways = math.prod(sides), 2 if min(sides) >= 4 else 1  # smaller ones do not wrap around
    corner = len(sides) * ways * port
    middle = chips / max(sides) * ways * port
    through_middle = middle * (chips - 1) / (chips / 2) ** 2
    share = min(1.0, through_middle / corner)
    return Cluster(chips, Link(corner, _CHIPS), all_to_all_share=share)


def _named(about: str, cluster: Cluster, gbytes: float, source: str) -> NamedCluster:
    """With its memory in GB/s, as vendors have it."""
    cluster = dataclasses.replace(cluster, memory_bandwidth=gbytes * 8e9)
    return NamedCluster(about, cluster, source)


def _nodes(count: int, rate: float, inside: float) -> Cluster:
    """Nodes of eight GPUs: a worker is a node, whose cards are one link."""
    return Cluster(count, Link(rate, _CARDS), 8, Link(inside, _NVLINK))


_MESH = "Without wrap-around a corner has one port a side; an all-to-all is bound by the middle."
_V5E = (
    "https://cloud.google.com/tpu/docs/v5e: 400 GB/s both ways = 1600 Gbit/s each way a chip, by 4 ports; "
    "HBM 819 GB/s (newer editions: 800)."
)
_V5P = (
    "https://cloud.google.com/tpu/docs/v5p: 1200 GB/s both ways = 4800 Gbit/s each way a chip, by 6 ports "
    "(3D torus; below 4x4x4 no wrap-around); HBM 2765 GB/s."
)
_V6E = (
    "https://cloud.google.com/tpu/docs/v6e: 800 GB/s both ways = 3200 Gbit/s each way a chip, by 4 ports "
    "(older editions: 3584); HBM 1640 GB/s (newer editions: 1600)."
)
_H100 = (
    "https://www.nvidia.com/en-us/data-center/h100: H100 SXM, NVLink 900 GB/s both ways = 3600 Gbit/s each "
    "way, HBM3 3.35 TB/s."
)
_4090 = "NVIDIA Ada GPU Architecture whitepaper, v2.01: GeForce RTX 4090, GDDR6X 1008 GB/s."

CLUSTERS: Mapping[str, NamedCluster] = {
    "v5e-8": _named(
        "8 chips of TPU v5e, a mesh of 2x4", _slice((2, 4), 400e9),
        819, f"{_V5E} {_MESH} No wrap-around is assumed.",
    ),
    "v5e-256": _named(
        "256 chips of TPU v5e, a torus of 16x16", _slice((16, 16), 400e9),
        819, f"{_V5E} The middle carries 1.6 TB/s, as that page says.",
    ),
    "v5e-4x256": _named(
        "4 slices of v5e-256 over the data centre's network",
        Cluster(4, Link(6400e9, _TCP), 256, Link(1600e9, _CHIPS)),
        819, f"{_V5E} Data centre network: 6.4 Tbit/s a pod.",
    ),
    "v5p-8": _named(
        "8 chips of TPU v5p, a mesh of 2x2x2 (Google names it by its 16 cores: v5p-16)",
        _slice((2, 2, 2), 800e9), 2765, f"{_V5P} {_MESH}",
    ),
    "v5p-1024": _named(
        "1,024 chips of TPU v5p, a torus of 8x8x16 (Google's v5p-2048)",
        _slice((8, 8, 16), 800e9), 2765, _V5P,
    ),
    "v6e-8": _named(
        "8 chips of TPU v6e, a mesh of 2x4", _slice((2, 4), 800e9),
        1640, f"{_V6E} {_MESH} No wrap-around is assumed.",
    ),
    "h100-8": _named(
        "one node of 8 H100 SXM; a worker is a GPU", Cluster(8, Link(3600e9, _NVLINK)),
        3350, _H100,
    ),
    "h100-64": _named(
        "8 nodes of 8 H100 SXM, DGX H100 or AWS p5.48xlarge; a worker is a node", _nodes(8, 3200e9, 3600e9),
        3350,
        f"{_H100} Cards: https://docs.nvidia.com/dgx-basepod, 8 ConnectX-7 of 400 Gbit/s a node.",
    ),
    "a3-mega-64": _named(
        "8 nodes of 8 H100 SXM, Google a3-megagpu-8g; a worker is a node",
        _nodes(8, 1600e9, 3600e9), 3350,
        f"{_H100} Cards: https://cloud.google.com/compute/docs/gpus/gpu-network-bandwidth, 1800 Gbit/s a "
        "node by 9 cards, of which the 8 of the GPUs count, 200 Gbit/s each.",
    ),
    "p4d-64": _named(
        "8 nodes of 8 A100 of 40 GB, AWS p4d.24xlarge; a worker is a node",
        _nodes(8, 400e9, 2400e9), 1555,
        "https://www.nvidia.com/en-us/data-center/a100: A100 SXM 40 GB, NVLink 600 GB/s both ways = 2400 "
        "Gbit/s each way, HBM2 1555 GB/s. Cards: https://aws.amazon.com/ec2/instance-types/p4, EFA of 400 "
        "Gbit/s a node.",
    ),
    "8xh100-ethernet": _named(
        "8 machines of one H100 PCIe each, on Ethernet of 100 Gbit/s",
        Cluster(8, Link(100e9, _TCP)), 2000,
        "NVIDIA H100 PCIe product brief, PB-11133-001: HBM2e more than 2000 GB/s. The card is assumed: "
        "100GBASE, IEEE 802.3.",
    ),
    "8x4090-10g": _named(
        "8 machines of one GeForce RTX 4090 each, on Ethernet of 10 Gbit/s",
        Cluster(8, Link(10e9, _TCP)), 1008, f"{_4090} 10GBASE-T, IEEE 802.3.",
    ),
}  # fmt: skip


def cluster_named(name: str) -> NamedCluster:
    """The hardware of that name.

    Args:
      name: a key of ``CLUSTERS``.

    Returns:
      A ``NamedCluster``.

    Raises:
      ValueError: if there is none.

    Example:
      >>> cluster_named("8x4090-10g").cluster.link.bandwidth
      10000000000.0
    """
    check_one_of("cluster", name, CLUSTERS)
    return CLUSTERS[name]
