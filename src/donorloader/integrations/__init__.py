"""Batches and data modules as other packages take them: LIVI, Lightning. None of these is needed to import this."""

from .collect import collect_cells
from .data_module import DonorDataModule, LIVIDataModule
from .livi import LIVIBatches
from .progress import CellsPerSecond

__all__ = ["CellsPerSecond", "DonorDataModule", "LIVIBatches", "LIVIDataModule", "collect_cells"]
