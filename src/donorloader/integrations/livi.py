"""Batches for LIVI: dense counts, donor codes, size factors, covariates, and who carries the known cis variants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from ._livi_convert import LIVIConverter
from ._livi_inputs import check_counts, cis_matrix, donor_codes, look_for_missing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from donorloader.loader import DonorLoader

__all__ = ["LIVIBatches"]


class LIVIBatches:
    """The batches of a loader, as the model LIVI (Vagiaki et al.) takes them.

    Parameters
    ----------
    loader
        Cells, with genotypes if `known_cis` is given. ``densify`` need not be set: counts are made dense here, in the
        same step as their sums. If its ``device`` is a GPU, all of this is done there.
    covariates
        Columns of the cells' ``obs`` with the categorical nuisance covariates, in the order of the model's
        ``covariates_dims``.
    known_cis
        Which variant is a known cis-eQTL of which gene: a table of 0 and 1, variants (index) × genes (columns); or
        pairs of names of a variant and a gene. Its variants must be those of the loader; genes that it does not name
        have none. `None`: neither `known_cis` nor `GT_cells` is yielded, for a model with ``n_cis_snps=0``.
    missing
        What a missing call counts as in `GT_cells`: ``"error"``, nothing, they are refused; ``"absent"``, 0, the
        allele is absent, as LIVI's and cellink's own loaders take it; ``"mean"``, the share of carriers of the variant
        among the loader's donors with a call. How many there are is logged.
    size_factor
        Column of ``obs`` with the size factor of each cell. Default: the sum of its counts.
    donor_categories
        Ids of donors in order of the codes `y`, the loader's among them. Default: those of the loader, in order of its
        ``donors``. Give those of the training set to loaders of the same model.

    Attributes
    ----------
    donor_categories
        (n_donors,) ids of donors by code; the model's ``y_dim`` is their number.
    covariates_dims
        Number of categories of each covariate, as the model takes them; `None` without covariates.
    covariate_categories
        Per covariate, what its codes stand for: its categories in their order, or else its values, sorted.
    missing_calls
        Number of missing calls per variant, by name, over the loader's donors; `None` without `known_cis`.

    Raises
    ------
    ValueError
        If X holds anything but counts, as LIVI's likelihood is over counts (looked for at once in some cells of each
        dataset, and in every cell as it is read, but on a GPU); if variants, genes or donors do not fit; if calls are
        missing and `missing` is ``"error"``.
    KeyError
        If a column is not found.

    Notes
    -----
    A batch is a dict of tensors: ``x`` (n_cells, n_genes) float32 counts, ``y`` (n_cells,) int64 donor codes,
    ``size_factor`` (n_cells, 1) float32, ``covariates`` a list of (n_cells,) int64 codes, ``GT_cells``
    (n_cells, n_variants) float32, 1 where the donor of the cell has the counted allele, ``known_cis``
    (n_variants, n_genes) int64; and ``index`` (n_cells,) int64, the row of each cell, which the model does not look at.

    Examples
    --------
    >>> loader = DonorLoader("study/", variants=list(known_cis.index))  # doctest: +SKIP
    >>> batches = LIVIBatches(loader, covariates=["sex", "batch"], known_cis=known_cis)  # doctest: +SKIP
    >>> LIVI(x_dim=batches.n_genes, y_dim=batches.n_donors, ...)  # doctest: +SKIP
    """

    def __init__(
        self,
        loader: DonorLoader,
        *,
        covariates: Sequence[str] = (),
        known_cis: pd.DataFrame | Iterable[tuple[str, str]] | None = None,
        missing: Literal["error", "absent", "mean"] = "error",
        size_factor: str | None = None,
        donor_categories: Iterable[Any] | None = None,
    ):
        if isinstance(covariates, str):
            raise TypeError(f"covariates must be a list of names, got the text {covariates!r}; use [{covariates!r}].")
        if missing not in ("error", "absent", "mean"):
            raise ValueError(f"missing must be one of 'error', 'absent', 'mean', got {missing!r}.")
        self.loader = loader
        self._tables = tables = loader._tables
        self._used = tables.match.codes >= 0
        check_counts(tables.source)
        self.donor_categories, code_of = donor_codes(loader.donors, donor_categories)
        self.covariate_categories: dict[str, NDArray[np.object_]] = {}
        codes = [self._covariate(name) for name in covariates]
        self.covariates_dims = [c.size for c in self.covariate_categories.values()] if codes else None
        factors = None if size_factor is None else self._numbers(size_factor)
        self.known_cis: torch.Tensor | None = None
        self.missing_calls: pd.Series | None = None
        fill = None
        if known_cis is not None:
            if tables.table is None:
                raise ValueError(
                    "known_cis tells of genotypes, but the loader has none. Give it genotypes, or leave known_cis out."
                )
            encoder = tables.table.encoder
            if encoder.encoding is not None or encoder.missing is not None:
                raise ValueError(
                    f"LIVIBatches makes presence of counts itself, but the loader has genotype_encoding="
                    f"{encoder.encoding!r}, missing_calls={encoder.missing!r}. Leave these out, and use missing=… here."
                )
            names = tables.table.store.names(tables.table.columns)
            self.known_cis = cis_matrix(known_cis, names, loader.var_names)
            self.missing_calls, fill = look_for_missing(tables.table, names, missing)
        self._convert = LIVIConverter(
            code_of[tables.match.codes].astype(np.int32), codes, factors, self.known_cis, fill
        )

    @property
    def n_genes(self) -> int:
        """Number of genes: the model's ``x_dim``."""
        return int(self.loader.var_names.size)

    @property
    def n_donors(self) -> int:
        """Number of donor codes: the model's ``y_dim``."""
        return int(self.donor_categories.size)

    @property
    def n_cis_snps(self) -> int:
        """Number of variants of `GT_cells`: the model's ``n_cis_snps``; 0 without `known_cis`."""
        return 0 if self.known_cis is None else int(self.known_cis.shape[0])

    def __len__(self) -> int:
        """Number of batches of a pass."""
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begin a pass over the loader: its next epoch. Batches are made ahead of the loop, on a thread."""
        return self.loader.begin(self._convert)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the latest pass is, as :meth:`DonorLoader.state_dict` says it."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a state was saved: :meth:`DonorLoader.load_state_dict`."""
        self.loader.load_state_dict(state_dict)

    def close(self) -> None:
        """Close the loader."""
        self.loader.close()

    def convert(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One batch of the loader as LIVI takes it."""
        return self._convert(batch)

    def _covariate(self, name: str) -> NDArray[np.int32]:
        """(n_cells,) codes of a covariate, and its categories noted."""
        column = self._tables.source.column(name)
        if pd.api.types.is_float_dtype(column.dtype):
            raise TypeError(
                f"LIVI's covariates are categories, but {name!r} is of {column.dtype}. Bin it, or convert it to text."
            )
        if name in self.covariate_categories:
            raise ValueError(f"covariates must name each column once, but {name!r} comes again.")
        categorical = pd.Categorical(column)
        if missing := int((categorical.codes[self._used] < 0).sum()):
            raise ValueError(
                f"Every cell needs a value of the covariate {name!r}, but {missing:,} have none. Fill these in, or "
                "leave the cells out with cells_query=…"
            )
        self.covariate_categories[name] = np.asarray(categorical.categories, dtype=object)
        return categorical.codes.astype(np.int32)

    def _numbers(self, name: str) -> NDArray[np.float32]:
        column = self._tables.source.column(name)
        values = pd.to_numeric(column, errors="coerce").to_numpy(dtype=np.float32, na_value=np.nan)
        wrong = ~((values > 0) & (values < np.inf)) & self._used  # also NaN
        if wrong.any():
            raise ValueError(
                f"Size factors must be numbers above 0, but {name!r} is not in {int(wrong.sum()):,} cells, such as row "
                f"{int(np.argmax(wrong))} with {column.iloc[int(np.argmax(wrong))]!r}."
            )
        return values
