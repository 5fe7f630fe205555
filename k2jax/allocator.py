"""Memory reuse by the C library, the largest single cost of a small training step on a CPU."""

import ctypes
import sys

_MMAP_MAX, _TRIM_THRESHOLD, _ARENA_MAX = -4, -1, -8  # parameters of glibc's mallopt(3)


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory instead of returning it to the kernel; True where it applies (Linux with glibc).

    XLA on a CPU allocates its buffers anew at every call. By default glibc maps each large one from the kernel and unmaps it
    after, so every page is faulted in and zeroed again. Call before jax allocates; the process keeps its peak until it ends.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return False
    return all([mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, -1), mallopt(_ARENA_MAX, 1)])
