"""Raw files to prepare a study from, and what must be in it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
from bed_reader import to_bed
from scipy import sparse

import donorloader as dl
from _data import SIZES, cell_table, donor_ids, open_collection, x_values

if TYPE_CHECKING:
    from pathlib import Path

SIZE = SIZES[3]


def read_cells(collection: Path) -> ad.AnnData:
    """All cells of a collection, in its order."""
    return ad.concat([ad.io.read_elem(group) for group in open_collection(collection)], merge="same")


def dense(matrix: object) -> np.ndarray:
    return matrix.toarray() if sparse.issparse(matrix) else np.asarray(matrix)


def written(adatas: list[ad.AnnData], folder: Path, kind: str) -> list:
    """The AnnData as sources of one kind."""
    if kind == "memory":
        return adatas
    paths = [folder / f"run{i}.{kind}" for i in range(len(adatas))]
    for adata, path in zip(adatas, paths, strict=True):
        adata.write_h5ad(path) if kind == "h5ad" else adata.write_zarr(path)
    return paths


def panel(folder: Path, n_variants: int = 30, **changes: object) -> tuple[Path, np.ndarray]:
    """A PLINK file set of the donors and two more, with missing calls; and its calls."""
    ids = [*donor_ids()[::-1], "extra0", "extra1"]
    rng = np.random.default_rng(3)
    calls = rng.integers(0, 3, (len(ids), n_variants)).astype(np.int8)
    calls[rng.random(calls.shape) < 0.1] = -127
    properties = {
        "fid": ["0"] * len(ids),
        "iid": ids,
        "sid": [f"rs{i}" for i in range(n_variants)],
        "chromosome": ["1"] * (n_variants - 2) + ["X", "X"],
        "bp_position": np.arange(n_variants) * 10 + 5,
        "allele_1": list("ACGT" * n_variants)[:n_variants],
        "allele_2": list("CGTA" * n_variants)[:n_variants],
    }
    to_bed(folder / "panel.bed", calls, properties={**properties, **changes})
    return folder / "panel.bed", calls


def fingerprint(path: Path) -> dict[str, str]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def assert_same_cells(collection: Path, columns: tuple[str, ...] = ("donor_id", "cell_type", "run")) -> ad.AnnData:
    """Each cell of the data is there once, with its own values and annotation."""
    cells = read_cells(collection)
    rows = cells.obs["row"].to_numpy()
    assert sorted(rows) == list(range(sum(SIZE)))
    np.testing.assert_array_equal(dense(cells.X), x_values(sum(SIZE))[rows])
    expected = cell_table(SIZE, donor_ids()).iloc[rows]
    assert list(cells.obs_names) == list(expected.index)
    for column in columns:
        assert cells.obs[column].astype(str).tolist() == expected[column].tolist()
    return cells


def read_genotypes(path: Path) -> ad.AnnData:
    """A store of genotypes with its values as X, however they are stored."""
    store = dl.open_genotypes(path)
    values = store.read(np.arange(store.ids.size), slice(0, store.n_variants))
    return ad.AnnData(values, obs=store.obs(), var=store.var())
