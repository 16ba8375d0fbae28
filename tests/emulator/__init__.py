"""Runs the CUDA kernels on the CPU, to test and debug their logic without a GPU."""

from .runner import Emulated, EmulationError, Report, pointer

__all__ = ["Emulated", "EmulationError", "Report", "pointer"]
