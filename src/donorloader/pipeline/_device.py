"""Copy batches to the training device while the loop is busy with the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["DeviceCopier"]


class DeviceCopier:
    """Copy a batch's tensors to a device; on CUDA through pinned memory, on a stream of its own.

    Parameters
    ----------
    device
        The device. On the CPU the same steps run, without pinning or streams.
    complete
        Adds to a batch that is on the device what is made there.
    """

    def __init__(self, device: torch.device, complete: Callable[[dict[str, Any]], None] | None = None):
        self._complete = complete
        if str(device) == "cuda":  # tensors name the device by number
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: tuple[Any, torch.Tensor] | None = None

    def start(self, batches: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Any]]:
        """Begin each batch's copy; runs on a lane.

        Yields
        ------
        The batch on the device, and the event that its copy is done, `None` on the CPU.
        """
        for batch in batches:
            if self._stream is None:
                staged, event = self._on_device(batch), None
            else:
                with torch.cuda.stream(self._stream):
                    staged, event = self._on_device(batch), self._stream.record_event()
            yield staged, event

    def finish(self, staged: Iterable[tuple[dict[str, Any], Any]]) -> Iterator[dict[str, Any]]:
        """Let the reader's stream wait for each copy before it uses the batch; runs on the reader's thread."""
        for batch, event in staged:
            if event is not None:
                current = torch.cuda.current_stream(self._device)
                current.wait_event(event)
                _record(batch, current)  # memory must not be reused before the reader's work is done
            yield batch

    def _on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        copied = self._copy(batch)
        if self._complete is not None:
            self._complete(copied)
        return copied

    def _copy(self, batch: dict[str, Any]) -> dict[str, Any]:
        copied: dict[str, Any] = {}
        for key, value in batch.items():
            if isinstance(value, dict):
                copied[key] = self._copy(value)
            elif not isinstance(value, torch.Tensor):
                copied[key] = value
            elif self._last is not None and self._last[0] is value:
                copied[key] = self._last[1]  # a table shared by the batches of a window is copied once
            else:
                copied[key] = self._to_device(value)
                if key == "donor_features":
                    self._last = (value, copied[key])
        return copied

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self._device:
            return tensor
        if tensor.layout == torch.sparse_csr:
            parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
            crow, col, values = map(self._to_device, parts)
            return torch.sparse_csr_tensor(crow, col, values, size=tensor.shape, check_invariants=False)
        if self._stream is not None:
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=self._stream is not None)


def _record(value: Any, stream: Any) -> None:
    if isinstance(value, dict):
        for part in value.values():
            _record(part, stream)
    elif not isinstance(value, torch.Tensor):
        return
    elif value.layout == torch.sparse_csr:
        for part in (value.crow_indices(), value.col_indices(), value.values()):
            part.record_stream(stream)
    else:
        value.record_stream(stream)
