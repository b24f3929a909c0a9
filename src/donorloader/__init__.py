"""donorloader: stream single cells and the genotypes of their donors, joined, at the speed of the cells alone."""

from importlib.metadata import PackageNotFoundError, version

from .attach import attach_donor_features
from .bag_dataset import BagDataset, collate_bags
from .bag_tensors import bag_reduce, collect_bags, nested_bags, pad_bags, to_torchmil
from .bags import BagLoader
from .cis import cis_window
from .dataloader import dataloader
from .genotypes import GenotypeStore, open_genotypes
from .integrations import CellsPerSecond, DonorDataModule, LIVIBatches, LIVIDataModule, collect_cells
from .loader import DonorLoader
from .prepare import prepare
from .samplers import BagSampler, DonorSampler, SubsetSampler
from .selections import CellSelection, DonorSelection, Splits
from .splits import split_cells, split_donors
from .study import Study, open_study

try:
    __version__ = version("donorloader")
except PackageNotFoundError:  # imported from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "BagDataset",
    "BagLoader",
    "BagSampler",
    "CellSelection",
    "CellsPerSecond",
    "DonorDataModule",
    "DonorLoader",
    "DonorSampler",
    "DonorSelection",
    "GenotypeStore",
    "LIVIBatches",
    "LIVIDataModule",
    "Splits",
    "Study",
    "SubsetSampler",
    "attach_donor_features",
    "bag_reduce",
    "cis_window",
    "collate_bags",
    "collect_bags",
    "collect_cells",
    "dataloader",
    "nested_bags",
    "open_genotypes",
    "open_study",
    "pad_bags",
    "prepare",
    "split_cells",
    "split_donors",
    "to_torchmil",
]
