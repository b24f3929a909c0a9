"""How the cell side opens and is read: collection, AnnData, DonorData → batches, donor codes, obs. No genotypes."""

from ._obs import mask_of, select_cells, words_of
from ._open import is_donor_data, is_stored_donor_data, open_cells
from ._parts import stack_tensors
from ._read import RowReader
from ._source import CellSource
from ._stream import CellBatch, fill_dense, stream_cells, stream_dense, to_dense

__all__ = [
    "CellBatch",
    "CellSource",
    "RowReader",
    "fill_dense",
    "is_donor_data",
    "is_stored_donor_data",
    "mask_of",
    "open_cells",
    "select_cells",
    "stack_tensors",
    "stream_cells",
    "stream_dense",
    "to_dense",
    "words_of",
]
