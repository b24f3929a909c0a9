"""Kernels for models of counts: whether each cell's donor has an allele, and dense counts with their sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import scipy.sparse as sp
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from donorloader._vectors import LARGE, WIDTH, address_of, finish_writes, store_vectors, vector_of
from donorloader.cells import fill_dense

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from donorloader._buffers import BufferPool

__all__ = [
    "count_missing",
    "dense_counts",
    "dense_counts_by_torch",
    "not_a_count",
    "presence",
    "presence_by_torch",
]


def presence(
    genotypes: NDArray[Any], rows: NDArray[np.int64], fill: NDArray[np.float32], pool: BufferPool
) -> NDArray[np.float32]:
    """Presence of the counted allele in each cell.

    Parameters
    ----------
    genotypes
        (n_donors, n_variants) counts or dosages; negative or NaN where missing. A dosage is taken for the count next to
        it.
    rows
        (n_cells,) int64 row of each cell's donor.
    fill
        (n_variants,) float32, what a missing call becomes.
    pool
        Lends the result's memory.

    Returns
    -------
    (n_cells, n_variants) float32: 1 where the count is above 0, 0 where it is 0.
    """
    out: NDArray[np.float32] = pool.empty((rows.size, genotypes.shape[1]), np.float32)
    if genotypes.dtype not in (np.int8, np.float32):  # compiled for these two: others are rare
        genotypes = genotypes.astype(np.float32)
    fill_in = _presence_past_cache if out.nbytes >= LARGE else _presence
    fill_in(np.ascontiguousarray(genotypes), rows, np.ascontiguousarray(fill), out)
    return out


def presence_by_torch(genotypes: torch.Tensor, rows: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
    """The same as :func:`presence` where the genotypes are, which is the way on a GPU."""
    carries = torch.where(genotypes >= 0, (genotypes >= 0.5).float(), fill.to(genotypes.device))
    return carries[rows]


def count_missing(genotypes: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per variant, how many donors have no call, and how many have the counted allele."""
    missing, present = (np.zeros(genotypes.shape[1], dtype=np.int64) for _ in range(2))
    for row in genotypes:
        called = row >= 0  # not so for NaN
        missing += ~called
        present += called & (row >= 0.5)
    return missing, present


def dense_counts(X: Any, pool: BufferPool) -> tuple[NDArray[np.float32], NDArray[np.float32], int]:
    """Dense counts, their sums, and the first cell with a value that is no count.

    Parameters
    ----------
    X
        (n_cells, n_genes) scipy CSR, numpy array, or a CPU tensor of either form.
    pool
        Lends the result's memory.

    Returns
    -------
    x
        (n_cells, n_genes) float32; `X` itself where it is that already.
    sums
        (n_cells, 1) float32.
    bad
        The first cell with a negative or non-integer value, -1 if there is none.
    """
    sparse = X.layout == torch.sparse_csr if isinstance(X, torch.Tensor) else sp.issparse(X)
    sums = np.empty((X.shape[0], 1), dtype=np.float32)
    x: NDArray[np.float32]
    if sparse:
        x = pool.empty(tuple(X.shape), np.float32)
        if isinstance(X, torch.Tensor):
            data, indices, indptr = X.values().numpy(), X.col_indices().numpy(), X.crow_indices().numpy()
        else:
            data, indices, indptr = X.data, X.indices, X.indptr
        fill_dense(data, indices, indptr, x)
        return x, sums, int(_sum(data, indptr, sums))
    array = X.numpy() if isinstance(X, torch.Tensor) else X
    if array.dtype == np.float32 and array.flags.c_contiguous:
        x = array
    else:
        x = pool.empty(array.shape, np.float32)
        x[...] = array
    return x, sums, int(_sum(x.reshape(-1), np.arange(len(x) + 1) * x.shape[1], sums))


def dense_counts_by_torch(X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense counts and their sums where X is, which is the way on a GPU; values are not looked at."""
    x = (X if X.layout == torch.strided else X.to_dense()).float()
    return x, x.sum(dim=1, keepdim=True)


def not_a_count(values: NDArray[Any]) -> Any:
    """A value that is negative or not whole, or `None`."""
    if values.dtype.kind == "f":
        wrong = values[~((values >= 0) & (values < np.inf) & (values == np.floor(values)))]
    else:
        wrong = values[values < 0]
    return wrong[0].item() if wrong.size else None


@numba.njit(nogil=True, cache=True)
def _presence(genotypes, rows, fill, out):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    for i in range(rows.size):
        _presence_of(genotypes, rows[i], fill, out, i, 0, out.shape[1])


@numba.njit(nogil=True)
def _presence_of(genotypes, row, fill, out, i, first, stop):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """Write some columns of row `i`."""
    one, zero = np.float32(1), np.float32(0)
    for j in range(first, stop):
        value, missing = genotypes[row, j], fill[j]  # both, or each would be a branch
        out[i, j] = one if value >= 0.5 else (zero if value >= 0 else missing)


# Values of one vector of float32.
_ROUND = WIDTH // 4


def _generate_presence(
    _context: Any, to: Any, genotypes: Any, first: Any, fill: Any, number: Any
) -> Any:  # pragma: no cover, compiled
    """As `_presence_of`, of `number` × `_ROUND` calls from the `first` of all on, and past the caches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, genotypes, first, fill, number = arguments
        pointer = context.make_array(signature.args[1])(context, builder, genotypes).data
        calls = builder.ptrtoint(builder.gep(pointer, [first]), to.type)
        bits, floats = vector_of(32), ir.VectorType(ir.FloatType(), _ROUND)
        zero, one = bits([0] * _ROUND), builder.bitcast(floats([1.0] * _ROUND), bits)

        def load(address: Any, kind: Any) -> Any:
            value = builder.load(builder.inttoptr(address, ir.VectorType(kind, _ROUND).as_pointer()))
            value.align = 1
            return value

        def vectors(index: Any) -> list[Any]:
            at = builder.mul(index, index.type(_ROUND))
            missing = load(builder.add(fill, builder.mul(at, at.type(4))), ir.IntType(32))
            if signature.args[1].dtype == types.int8:
                call = builder.sext(load(builder.add(calls, at), ir.IntType(8)), bits)
                called, carries = builder.icmp_signed(">=", call, zero), builder.icmp_signed(">", call, zero)
            else:
                call = load(builder.add(calls, builder.mul(at, at.type(4))), ir.FloatType())
                called = builder.fcmp_ordered(">=", call, floats([0.0] * _ROUND))
                carries = builder.fcmp_ordered(">=", call, floats([0.5] * _ROUND))
            return [builder.select(called, builder.select(carries, one, zero), missing)]

        store_vectors(builder, to, number, vectors, past_cache=True)
        return context.get_dummy_value()

    return types.void(types.int64, genotypes, types.int64, types.int64, types.int64), generate


_write_presence: Any = intrinsic(_generate_presence)


@numba.njit(nogil=True, cache=True)
def _presence_past_cache(genotypes, rows, fill, out):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """As `_presence`, into a large array."""
    m = out.shape[1]
    for i in range(rows.size):
        to, row = address_of(out) + 4 * m * i, rows[i]
        head = min(m, -to % WIDTH // 4)
        number = (m - head) // _ROUND
        tail = head + number * _ROUND
        _presence_of(genotypes, row, fill, out, i, 0, head)
        _write_presence(to + 4 * head, genotypes, row * m + head, address_of(fill) + 4 * head, number)
        _presence_of(genotypes, row, fill, out, i, tail, m)
    finish_writes()


@numba.njit(nogil=True, cache=True)
def _sum(values, indptr, sums):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """Sums of the stretches of `values` between `indptr`, and the first with a value that is no count, else -1."""
    bad = -1
    for i in range(sums.shape[0]):
        total = 0.0
        wrong = False
        for k in range(indptr[i], indptr[i + 1]):
            value = values[k]
            total += value
            wrong |= not (value >= 0 and value == np.floor(value))
        wrong |= not total < np.inf
        sums[i, 0] = total
        if wrong and bad < 0:
            bad = i
    return bad
