"""Cells per second on Lightning's progress bar."""

from __future__ import annotations

import time
from typing import Any, Self

from ._lightning import make_with_lightning

__all__ = ["CellsPerSecond"]


class CellsPerSecond:
    """A Lightning callback that shows how many cells are trained on per second.

    Used as ``Trainer(callbacks=[CellsPerSecond()])``.

    Parameters
    ----------
    batches
        Batches that the speed is taken over. It is shown, and logged as ``cells/s``, once for each so many; in an epoch
        that has fewer, at its end.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """An instance that Lightning knows as its own."""
        made: Self = make_with_lightning(cls, "Callback")
        return made

    def __init__(self, batches: int = 10):
        super().__init__()
        if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
            raise ValueError(f"batches must be a whole number of at least 1, got {batches!r}.")
        self._every, self._shown = batches, False
        self._restart()

    def _restart(self) -> None:
        self._cells, self._batches, self._began = 0, 0, time.perf_counter()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count."""
        self._shown = False
        self._restart()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count, and show."""
        self._cells += int(batch["index"].shape[0])
        self._batches += 1
        if self._batches >= self._every or (trainer.is_last_batch and not self._shown):
            speed = self._cells / (time.perf_counter() - self._began)
            pl_module.log("cells/s", speed, prog_bar=True, on_step=True, on_epoch=False, batch_size=1)
            self._shown = True
            self._restart()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the time of validation out."""
        self._restart()
