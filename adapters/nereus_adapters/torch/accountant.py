"""Accountant: how many bytes of model state a seat holds, now and at most."""

from __future__ import annotations

import torch


class Accountant:
    """Counts the storage of state tensors as they are taken and let go.

    A measured number, not an estimate: every place in a seat that creates or drops state storage
    tells the accountant its bytes, and `Seat.measured_bytes` counts the storages themselves.
    """

    def __init__(self) -> None:
        self.resident_bytes = 0
        self.peak_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count storage that now exists."""
        self.resident_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def drop(self, num_bytes: int) -> None:
        """Count storage that is gone."""
        self.resident_bytes -= num_bytes

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate a tensor and count it."""
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self.take(tensor.nbytes)
        return tensor

    def reset_peak(self) -> None:
        """Start a new window of observation."""
        self.peak_bytes = self.resident_bytes
