"""Variants in blocks → rows of donors: a file of genotypes turned by way of a scratch file, in bounded memory."""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from ._scratch import PER_BYTE, MoreThanTwoCopiesError, Scratch, ScratchRows
from ._selection import Filter
from ._unpacking import unpack
from .readers import PackedReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from pathlib import Path
    from typing import Self

    import pandas as pd
    from numpy.typing import NDArray

    from ._rows import Columns
    from ._selection import Selection
    from .readers import VariantBlock, VariantReader

__all__ = ["TransposedRows", "transpose"]

# Of the memory that is granted: blocks of variants that are read at a time, of which there are up to three copies (as
# the library reads them, as the filter looks at them, those that pass).
_BLOCK_PART = 0.1
# Larger blocks are not read faster. [Unit: byte]
_BLOCK_BYTES = 16 * 2**20


class TransposedRows:
    """Donor rows of a file of genotypes, see :class:`GenotypeRows`. Made by :func:`transpose`.

    Attributes
    ----------
    packed
        Rows at two bits a call, uint8, by their numbers: ``packed[rows]``; `None` for dosages and larger counts.
    notes
        What was found and left out on the way, a sentence each.
    """

    def __init__(
        self,
        ids: NDArray[np.object_],
        obs: pd.DataFrame,
        var: pd.DataFrame,
        scratch: Scratch,
        *,
        packed: bool,
        notes: list[str],
    ) -> None:
        self.ids = ids
        self.n_variants = len(var)
        self.dtype = np.dtype(np.int8) if packed else scratch.array.dtype
        self._array: NDArray[Any] | None = scratch.array
        self.packed: ScratchRows | None = ScratchRows(scratch) if packed else None
        self.notes = notes
        self._scratch = scratch
        self._obs, self._var = obs, var

    def read(self, rows: NDArray[np.int64], columns: Columns) -> NDArray[Any]:
        """C-contiguous (len(rows), n_columns) values, see :class:`GenotypeRows`."""
        if self._array is None:
            raise ValueError("These rows are closed: their scratch file is gone.")
        rows = np.asarray(rows, dtype=np.int64)
        if isinstance(columns, slice):
            columns = slice(*columns.indices(self.n_variants))
        if self.packed is None:
            block: NDArray[Any] = self._array[rows][:, columns]
            self._scratch.forget_pages()
            return np.ascontiguousarray(block)
        calls = unpack(self._array, columns, rows)
        self._scratch.forget_pages()
        return calls

    def names(self, columns: Columns) -> NDArray[np.object_]:
        """Names of variants: the index of `var()`."""
        return np.asarray(self._var.index.to_numpy(dtype=object)[columns], dtype=object)

    def var(self) -> pd.DataFrame:
        """Variants that were kept: `chrom`, `pos`, `a0`, `a1`, `counted`, `id`."""
        return self._var

    def obs(self) -> pd.DataFrame:
        """Donors that were kept."""
        return self._obs

    def close(self) -> None:
        """Remove the scratch file; reading then raises. May be called again."""
        self._array = self.packed = None
        self._scratch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def transpose(
    reader: VariantReader,
    scratch: Path,
    *,
    samples: NDArray[np.int64],
    selection: Selection,
    memory: int,
    on_variants: Callable[[int], None] | None = None,
) -> TransposedRows:
    """Read the chosen variants of a file once, block by block, and keep them by donor.

    Calls of up to two copies are kept at two bits each, so that what has to be turned is a quarter of the matrix;
    dosages, and calls of more copies, as they are.

    Parameters
    ----------
    reader
        The file.
    scratch
        A file to make if the turned matrix does not fit its part of the memory. It is removed when the rows are closed.
    samples
        (n_donors,) positions of the donors to keep, ascending: frequencies are computed over these.
    selection
        Which variants to keep.
    memory
        What blocks and scratch may take together. [Unit: byte]
    on_variants
        Called with the number of variants just read.

    Returns
    -------
    Rows that are to be closed.

    Raises
    ------
    KeyError, ValueError
        If the selection names what is not there or leaves nothing, or the file cannot be read.
    """
    var = reader.var()
    chosen, notes = selection.choose_variants(var, reader.path)
    plain = reader.dtype.kind == "f"
    while True:
        turn = _Turn(reader, samples, selection, memory)
        try:
            store = Scratch(scratch, samples.size, chosen.size, None if not plain else reader.dtype, memory)
            try:
                kept = turn.run(chosen, store, on_variants)
            except BaseException:
                store.close()
                raise
        except MoreThanTwoCopiesError:
            plain, on_variants = True, None  # again, into a byte a call; the bar has been there
            continue
        break
    if not kept.size:
        store.close()
        raise ValueError(
            f"The filters leave none of the variants of {str(reader.path)!r}. {' '.join(turn.filter.notes)} "
            "Loosen maf or max_missing."
        )
    store.narrow(kept.size)
    notes += [*reader.notes, *turn.filter.notes]
    if kept.size < len(var):
        var = var.iloc[kept]
        for column in var.columns[var.dtypes == "category"]:
            var = var.assign(**{column: var[column].cat.remove_unused_categories()})
    obs = reader.obs().iloc[samples]
    return TransposedRows(reader.ids[samples], obs, var, store, packed=not plain, notes=notes)


class _Turn:
    """One pass over the file."""

    def __init__(self, reader: VariantReader, samples: NDArray[np.int64], selection: Selection, memory: int) -> None:
        self.reader, self.samples = reader, samples
        self.filter = Filter(selection)
        everything = self.filter.idle and samples.size == len(reader.ids)
        self._packed = reader if everything and isinstance(reader, PackedReader) else None
        row_bytes = samples.size * reader.dtype.itemsize
        granted = int(_BLOCK_PART * memory)
        if granted < PER_BYTE * row_bytes:
            raise ValueError(
                f"The memory budget is too small for these genotypes: calls of {samples.size:,} donors need "
                f"{int(PER_BYTE * row_bytes / _BLOCK_PART):,} bytes, and {max(memory, 0):,} are left. "
                "Give more memory."
            )
        fitting = max(PER_BYTE, min(_BLOCK_BYTES, granted // max(1, reader.parallel)) // row_bytes)
        # whole bytes of what the file keeps together; where these do not fit, what fits
        step = next(n for n in (math.lcm(reader.granule, PER_BYTE), reader.granule, PER_BYTE) if n <= fitting)
        self.block_variants = fitting // step * step

    def run(
        self, chosen: NDArray[np.int64], store: Scratch, on_variants: Callable[[int], None] | None
    ) -> NDArray[np.int64]:
        """Fill the store; positions of the variants that pass the filter."""
        kept: list[NDArray[np.int64]] = []
        done = 0  # variants in the store
        rest: NDArray[Any] | None = None  # passed, but too few to fill a byte
        pieces = [chosen[i : i + self.block_variants] for i in range(0, chosen.size, self.block_variants)]
        for number, (variants, block) in enumerate(zip(pieces, self._read_ahead(pieces), strict=True), start=1):
            values = block.values
            if not self.filter.idle:
                passes = self.filter.passes(block)
                values, passed = values[passes], variants[passes]
            else:
                passed = variants
            kept.append(passed)
            if rest is not None and rest.size:
                values = np.concatenate([rest, values])
            whole = len(values) if number == len(pieces) or not store.packed else len(values) // PER_BYTE * PER_BYTE
            store.write(done, values[:whole], packed=block.packed)
            done += whole
            rest = values[whole:].copy()
            del block, values
            if on_variants is not None:
                on_variants(len(variants))
        return np.concatenate(kept)

    def _read_ahead(self, pieces: list[NDArray[np.int64]]) -> Iterator[VariantBlock]:
        """Blocks in order, the next ones being read while one is turned: both let go of Python's lock."""
        if not self.reader.parallel:
            yield from map(self._read, pieces)
            return
        ahead: deque[Future[VariantBlock]] = deque()
        with ThreadPoolExecutor(self.reader.parallel, thread_name_prefix="donorloader-genotypes") as pool:
            try:
                for variants in pieces:
                    ahead.append(pool.submit(self._read, variants))
                    if len(ahead) > self.reader.parallel:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for block in ahead:
                    block.cancel()

    def _read(self, variants: NDArray[np.int64]) -> VariantBlock:
        first, stop = int(variants[0]), int(variants[-1]) + 1
        if self._packed is not None and stop - first == variants.size:
            return self._packed.read_packed(first, stop)
        return self.reader.read_block(variants, self.samples)
