"""Whether the MPI library takes addresses of GPU memory."""

from __future__ import annotations

import ctypes

MAIN, DEVICE, AUTO = "main", "device", "auto"  # the memory MPI is given: `system.mpi_memory`
CUDA = 0  # MPIX_GPU_SUPPORT_CUDA of MPICH


def cuda_aware() -> bool:
    """Return what the library says of itself, as Open MPI and MPICH can; False where it says nothing."""
    from mpi4py import MPI

    library, supported = ctypes.CDLL(MPI.__file__), ctypes.c_int(0)
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):  # MPICH
        failed = library.MPIX_GPU_query_support(CUDA, ctypes.byref(supported))
        return not failed and bool(supported.value)
    return False
