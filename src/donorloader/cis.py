"""Variants by region: those near each gene, from the positions in `var` of the cells and of the genotypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from donorloader._ids import duplicates, shorten
from donorloader.genotypes import plain_chromosome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from donorloader.genotypes import Columns

__all__ = ["CisVariants", "CisWindow", "cis_window", "find_cis"]

# Names that tools give to where a gene is, in lower case.
_KNOWN_AS = {
    "chrom": ("chrom", "chromosome", "chr", "contig", "seqname", "seqnames", "chromosome_name"),
    "start": ("start", "gene_start", "start_position", "gene_start_bp"),
    "end": ("end", "gene_end", "end_position", "stop", "gene_end_bp"),
}


@dataclass(frozen=True)
class CisWindow:
    """A choice of variants by the genes that they are near; made by :func:`cis_window`."""

    genes: tuple[str, ...] | None
    bp: int
    positions: pd.DataFrame | None = None


@dataclass(frozen=True)
class CisVariants:
    """The variants that a :class:`CisWindow` chooses.

    Attributes
    ----------
    columns
        Their positions in the store, in order of chromosome and position.
    slices
        Per gene, its variants among the chosen ones; empty where no variant is near.
    mask
        (n_genes, n_variants) int8 CSR, 1 where the variant is in the window of the gene. A row for each gene of X,
        without entries for genes that were not asked for.
    """

    columns: Columns
    slices: dict[str, slice]
    mask: sp.csr_array


def cis_window(
    genes: Sequence[str] | None = None, bp: int = 1_000_000, *, positions: pd.DataFrame | None = None
) -> CisWindow:
    """Choose the variants near genes: ``DonorLoader(..., variants=cis_window(genes))``.

    Parameters
    ----------
    genes
        Names of genes, as in `var_names` of the cells. Default: all that have a position.
    bp
        How far from a gene: a variant at `pos` is near if ``start - bp <= pos <= end + bp`` on the same chromosome;
        1 Mb, as in most eQTL studies. Chromosomes are compared without a leading ``chr``, and ``M`` is ``MT``. Unit:
        base pairs.
    positions
        Where genes are: a table indexed by gene with columns ``chrom``, ``start``, ``end``. Default: `var` of the
        cells.

    Returns
    -------
    What a loader takes as `variants`. The loader then has `cis_mask`, the genes × variants matrix, and `cis_slices`,
    each gene's variants.

    Raises
    ------
    TypeError, ValueError
        If `genes` is a text or names a gene twice, or `bp` is no number from 0.
    """
    if isinstance(genes, str):
        raise TypeError(f"genes must be a list of names, got the text {genes!r}; use [{genes!r}].")
    if isinstance(bp, bool) or not isinstance(bp, int | np.integer) or bp < 0:
        raise ValueError(f"bp must be a whole number of base pairs from 0, got {bp!r}.")
    names = None if genes is None else tuple(str(gene) for gene in genes)
    if names is not None and (not names or duplicates(np.array(names, dtype=object))):
        what = "is empty" if not names else f"repeats {shorten(duplicates(np.array(names, dtype=object)))}"
        raise ValueError(f"genes must name each gene once, but {what}.")
    return CisWindow(names, int(bp), positions)


def find_cis(window: CisWindow, cells_var: pd.DataFrame, genotypes_var: pd.DataFrame) -> CisVariants:
    """The variants of a window.

    Parameters
    ----------
    window
        What to choose.
    cells_var
        Genes of X, in its order.
    genotypes_var
        Variants of the store, with `chrom` and `pos`.

    Raises
    ------
    KeyError
        If positions of genes or variants are absent, or a gene is unknown or has no position.
    ValueError
        If no variant is near any gene, or a gene starts after its end.
    """
    genes = _gene_positions(window, cells_var)
    variants = _variant_positions(genotypes_var)
    chosen = np.zeros(len(genotypes_var), dtype=bool)
    near: dict[str, tuple[int, int]] = {}  # bounds in the sorted variants
    order = np.lexsort((variants["pos"].to_numpy(), variants["chrom"].to_numpy()))
    chroms, pos = variants["chrom"].to_numpy()[order], variants["pos"].to_numpy()[order]
    for gene in genes.itertuples():
        first, stop = np.searchsorted(chroms, gene.chrom, "left"), np.searchsorted(chroms, gene.chrom, "right")
        low = first + np.searchsorted(pos[first:stop], gene.start - window.bp, "left")
        high = first + np.searchsorted(pos[first:stop], gene.end + window.bp, "right")
        near[str(gene.Index)] = (int(low), int(high))
        chosen[order[low:high]] = True
    kept = chosen[order]
    if not kept.any():
        raise ValueError(
            f"No variant lies within {window.bp:,} bp of any of the {len(genes):,} genes. Their chromosomes are "
            f"{shorten(sorted(set(genes['chrom'])))}, those of the variants {shorten(sorted(set(chroms)))}: are "
            "positions of the same genome build?"
        )
    before = np.concatenate([[0], np.cumsum(kept)])  # chosen variants before each sorted one
    slices = {gene: slice(int(before[low]), int(before[high])) for gene, (low, high) in near.items()}
    columns = order[kept]
    row_of = {str(name): row for row, name in enumerate(cells_var.index)}
    rows = np.concatenate([np.full(part.stop - part.start, row_of[gene]) for gene, part in slices.items()])
    at = np.concatenate([np.arange(part.start, part.stop) for part in slices.values()])
    mask = sp.csr_array(
        (np.ones(rows.size, dtype=np.int8), (rows, at)), shape=(len(cells_var), columns.size), dtype=np.int8
    )
    if (np.diff(columns) == 1).all():
        return CisVariants(slice(int(columns[0]), int(columns[-1]) + 1), slices, mask)
    return CisVariants(columns.astype(np.int64), slices, mask)


def _gene_positions(window: CisWindow, cells_var: pd.DataFrame) -> pd.DataFrame:
    table = cells_var if window.positions is None else window.positions
    where = "var of the cells" if window.positions is None else "the positions"
    by_name = {str(column).lower(): column for column in reversed(table.columns)}
    found = {
        ours: next((by_name[name] for name in names if name in by_name), None) for ours, names in _KNOWN_AS.items()
    }
    if absent := [ours for ours, column in found.items() if column is None]:
        raise KeyError(
            f"cis_window needs where genes are, but {where} has no column {shorten(absent)}; its columns are "
            f"{shorten(table.columns, 12)}. Add them before preparing, or give positions=…, a table with chrom, start, "
            "end."
        )
    genes = pd.DataFrame(
        {
            "chrom": _chromosomes(table[found["chrom"]]),
            "start": pd.to_numeric(table[found["start"]], errors="coerce").to_numpy(dtype=np.float64),
            "end": pd.to_numeric(table[found["end"]], errors="coerce").to_numpy(dtype=np.float64),
        },
        index=table.index.astype(str),
    )
    placed = genes[genes["start"].notna() & genes["end"].notna() & (genes["chrom"] != "")]
    if window.genes is not None:
        placed = placed[placed.index.isin(window.genes)]
    if (turned := placed.index[placed["start"] > placed["end"]]).size:
        raise ValueError(
            f"A gene starts where it ends or before, on either strand, but {shorten(turned)} of {where} start after "
            "their ends. Exchange the two."
        )
    known = set(cells_var.index.astype(str))
    if window.genes is None:
        placed = placed[placed.index.isin(known)]
        if placed.empty:
            raise ValueError(f"No gene of the cells has a position in {where}.")
        return placed[~placed.index.duplicated()]
    if unknown := [gene for gene in window.genes if gene not in known]:
        raise KeyError(f"The cells have no genes named {shorten(unknown)}. Their names look like {shorten(known)}.")
    if lost := [gene for gene in window.genes if gene not in placed.index]:
        raise KeyError(f"The genes {shorten(lost)} have no position in {where}. Leave them out, or give positions=….")
    return placed[~placed.index.duplicated()].loc[list(window.genes)]


def _variant_positions(var: pd.DataFrame) -> pd.DataFrame:
    if absent := [name for name in ("chrom", "pos") if name not in var]:
        raise KeyError(
            f"cis_window needs where variants are, but var of the genotypes has no column {shorten(absent)}; its "
            f"columns are {shorten(var.columns, 12)}."
        )
    return pd.DataFrame({"chrom": _chromosomes(var["chrom"]), "pos": pd.to_numeric(var["pos"]).to_numpy()})


def _chromosomes(column: pd.Series) -> NDArray[np.object_]:
    """Plain names of chromosomes, of which there are few; empty where there is none."""
    codes, names = pd.factorize(column)
    plain = [plain_chromosome(_plain_number(name)) for name in names]
    return np.array([*plain, ""], dtype=object)[codes]


def _plain_number(name: Any) -> Any:
    """1.0, as tables with gaps hold chromosome 1, is 1."""
    return int(name) if isinstance(name, float) and name.is_integer() else name
