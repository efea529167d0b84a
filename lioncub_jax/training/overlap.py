"""Options of XLA with which votes travel while the backward pass goes on."""

from lioncub_jax.mesh.placement import Workers, check_workers

# Compiled for 8 H100 and v5e:2x4 and read, not run: docs/reports/accelerators.md says what each does.
_OPTIONS: dict[str, dict[str, bool | int | str]] = {
    "gpu": {
        # Puts what a collective waits for early, and what waits for it late.
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # Several under way at once; with one at a time all but the first wait for the end.
        "xla_gpu_experimental_parallel_collective_overlap_limit": 64,
        # Replies of several buckets stay apart; joined, they would wait for the last one.
        "xla_gpu_all_gather_combine_threshold_bytes": 1,
    },
    "tpu": {
        # Off by default. At most one is under way at a time.
        "xla_tpu_enable_async_all_to_all": "true",
        "xla_enable_async_all_gather": "true",
    },
    "cpu": {},  # its collectives are synchronous
}


def overlap_options(workers: Workers) -> dict[str, bool | int | str]:
    """Options for the compiler with which buckets travel while the backward pass goes on.

    For an optimizer with ``bucket_size``; with one bucket there is nothing to overlap. They change when
    something runs and not what it computes.

    Args:
      workers: a `Workers`; its mesh says the platform.

    Returns:
      Names and values, for ``make_train_step(...).compiled(options)``, or for ``compiler_options`` of
      ``jax.jit``; nothing for a CPU: its collectives are synchronous.

    Raises:
      TypeError: for no `Workers`.
      ValueError: for a platform that is none of "gpu", "tpu" and "cpu".

    Example:
      >>> import jax, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> lc.training.overlap_options(lc.Workers(mesh, "data"))
      {}

    Source: this library; the names are XLA's.
    """
    check_workers(workers)
    platform = workers.mesh.devices.flat[0].platform
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    if platform not in _OPTIONS:
        raise ValueError(f"a mesh of {platform!r}: options are known for {', '.join(_OPTIONS)}")
    return dict(_OPTIONS[platform])
