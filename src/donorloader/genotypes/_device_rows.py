"""Packed rows that lie on the training device, and are unpacked there by bit operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ._forms import PackedForm

if TYPE_CHECKING:
    from ._table import DonorTable

__all__ = ["DeviceRows", "may_lie_on_device"]

# Of the memory that is free on the device, rows may take this part: the model comes later.
_PART = 0.25


class DeviceRows:
    """The rows of all donors in use, packed, on a device.

    Parameters
    ----------
    table
        Of a packed store; its rows are read at the first use.
    device
        Where they are to lie.
    """

    def __init__(self, table: DonorTable, device: torch.device):
        if not isinstance(table.form, PackedForm):
            raise TypeError("Only packed rows lie on a device.")
        self._table, self._device = table, device
        self._columns = table.form.columns
        self._packed: torch.Tensor | None = None

    def gather(self, donors: torch.Tensor) -> torch.Tensor:
        """Rows of donor codes, as a batch brings them, without a step on the host.

        Parameters
        ----------
        donors
            (n,) int64 codes, on the device.
        """
        packed, values, absent = self._load()
        first, stop = self._columns.start // 4, -(-self._columns.stop // 4)
        part = packed[:, first:stop].index_select(0, donors)
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=self._device)
        codes = ((part[:, :, None] >> shifts) & 3).reshape(donors.numel(), -1)
        codes = codes[:, self._columns.start - 4 * first :][:, : self._table.n_variants]
        if self._table.encoder.encoding == "onehot":
            return (codes[:, :, None] == torch.arange(3, dtype=torch.uint8, device=self._device)).to(torch.int8)
        low = torch.where(codes == 1, values[1], values[0])
        high = torch.where(codes == 3, values[3], values[2])
        out = torch.where(codes > 1, high, low)
        if absent is not None:
            out[absent[donors]] = torch.nan
        return out

    def _load(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if self._packed is None:
            everyone = np.arange(self._table.rows.size)
            rows = np.zeros((everyone.size, self._table.form.width), dtype=np.uint8)
            self._table.read_into(rows, everyone, everyone)
            self._values = torch.from_numpy(self._table.encoder.values).to(self._device)
            absent = self._table.rows < 0
            self._absent = torch.from_numpy(absent).to(self._device) if absent.any() else None
            self._packed = torch.from_numpy(rows).to(self._device)
        return self._packed, self._values, self._absent


def may_lie_on_device(table: DonorTable, device: torch.device | None, wanted: bool | None) -> bool:
    """Whether rows are to lie on the device.

    Parameters
    ----------
    table
        The rows.
    device
        The training device, `None` if batches stay where they are.
    wanted
        Whether the user wants it; `None`: on CUDA, where they are packed and there is room.

    Raises
    ------
    ValueError
        If it is wanted and cannot be.
    """
    if wanted is False:
        return False
    reason = None
    if device is None:
        reason = "there is no device: give device=…"
    elif not isinstance(table.form, PackedForm):
        reason = "their store is not packed: prepare it with layout='packed'"
    elif table.encoder.missing == "error":
        reason = "missing_calls='error' looks for missing calls on the host"
    if wanted and reason is not None:
        raise ValueError(f"genotypes_on_device=True puts packed genotypes on the device, but {reason}.")
    if reason is not None or device is None:
        return False
    if wanted:
        return True
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return table.rows.size * table.form.width <= _PART * free
