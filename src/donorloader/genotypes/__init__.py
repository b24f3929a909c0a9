"""Donor-keyed rows: readers, the store, and the rows of each batch. Knows no cells."""

from ._device_rows import DeviceRows, may_lie_on_device
from ._encoding import Encoding, MissingCalls, make_encoder
from ._rows import Columns, GenotypeRows
from ._selection import plain_chromosome
from ._store import GenotypeStore, open_genotypes
from ._stream import GenotypeBatch, plan_windows, stream_genotypes
from ._table import DonorTable, ReadCounts
from ._variants import resolve_variants

__all__ = [
    "Columns",
    "DeviceRows",
    "DonorTable",
    "Encoding",
    "GenotypeBatch",
    "GenotypeRows",
    "GenotypeStore",
    "MissingCalls",
    "ReadCounts",
    "make_encoder",
    "may_lie_on_device",
    "open_genotypes",
    "plain_chromosome",
    "plan_windows",
    "resolve_variants",
    "stream_genotypes",
]
