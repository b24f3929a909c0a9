"""A loader in torch's DataLoader: without workers, as it is meant, or with workers that share each epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

if TYPE_CHECKING:
    from collections.abc import Iterator

    from donorloader._stream_loader import StreamLoader

__all__ = ["dataloader"]


def dataloader(
    loader: StreamLoader,
    num_workers: int = 0,
    *,
    multiprocessing_context: Literal["spawn", "forkserver"] = "spawn",
    persistent_workers: bool = True,
    prefetch_factor: int = 2,
) -> DataLoader[dict[str, Any]]:
    """Put a loader into torch's :class:`~torch.utils.data.DataLoader`.

    A loader reads ahead on threads of its own and needs no workers: 0 is the default, and the advice. Workers each
    open the stores again, take seconds to start, and send every batch from process to process.

    Parameters
    ----------
    loader
        A :class:`DonorLoader` or :class:`BagLoader`.
    num_workers
        Worker processes, which share each epoch as ranks do: worker i of n on rank r of W has the share of rank
        ``r * n + i`` of ``W * n``.
    multiprocessing_context
        How workers start: ``"spawn"``, or ``"forkserver"``, which starts them sooner where the server is told to import
        donorloader first (:func:`multiprocessing.set_forkserver_preload`). ``"fork"`` is refused, as zarr's threads do
        not survive it.
    persistent_workers
        Whether workers live on from epoch to epoch.
    prefetch_factor
        Batches that each worker sends ahead.

    Raises
    ------
    ValueError, TypeError
        If workers are to fork, or the loader cannot be sent to them: it is over objects in memory, has a
        `batch_sampler` or a device, or is about to resume in the middle of an epoch.

    Examples
    --------
    >>> batches = dataloader(DonorLoader("study/"))  # doctest: +SKIP
    """
    if num_workers == 0:
        return DataLoader(loader, batch_size=None, num_workers=0)
    if multiprocessing_context not in ("spawn", "forkserver"):
        raise ValueError(
            f"Workers must be started by 'spawn' or 'forkserver', got {multiprocessing_context!r}: zarr's threads do "
            "not survive a fork."
        )
    loader.check_workers(num_workers)
    return _WorkerLoader(
        _Shares(loader, num_workers),
        batch_size=None,
        num_workers=num_workers,
        multiprocessing_context=multiprocessing_context,
        persistent_workers=persistent_workers,
        prefetch_factor=prefetch_factor,
    )


class _Shares(IterableDataset[dict[str, Any]]):
    """In a worker: its share of the epoch that the main process says."""

    def __init__(self, loader: StreamLoader, num_workers: int):
        super().__init__()
        self.loader, self._num_workers = loader, num_workers
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers that live on see it change

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        if info is None:
            raise RuntimeError("Shares of workers are iterated in workers only.")
        return self.loader.iterate_share(int(self.epoch), info.id, info.num_workers)

    def __len__(self) -> int:
        return self.loader.worker_batches(self._num_workers)


class _WorkerLoader(DataLoader[dict[str, Any]]):
    """Counts epochs here, where the loader itself is not iterated."""

    dataset: _Shares

    def __iter__(self) -> Any:
        self.dataset.epoch.fill_(self.dataset.loader.begin_elsewhere())
        return super().__iter__()
