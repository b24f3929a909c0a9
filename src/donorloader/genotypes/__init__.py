"""Donor-keyed rows: readers, the store, and the rows of each batch. Knows no cells."""

from ._rows import GenotypeRows
from ._store import GenotypeStore, open_genotypes
from ._stream import GenotypeBatch, plan_windows, stream_genotypes
from ._table import DonorTable
from ._variants import resolve_variants

__all__ = [
    "DonorTable",
    "GenotypeBatch",
    "GenotypeRows",
    "GenotypeStore",
    "open_genotypes",
    "plan_windows",
    "resolve_variants",
    "stream_genotypes",
]
