"""Variants near genes, against a loop over all pairs."""

from __future__ import annotations

from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import donorloader as dl
from donorloader.cis import find_cis

GENES = [f"g{i}" for i in range(8)]


def genes_at(seed: int, *, prefix: str = "") -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    start = rng.integers(1, 1000, len(GENES))
    chrom = [f"{prefix}{c}" for c in rng.choice(["1", "2", "10", "X"], len(GENES))]
    return pd.DataFrame({"chrom": chrom, "start": start, "end": start + rng.integers(0, 50, len(GENES))}, index=GENES)


def variants_at(seed: int, n: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed + 1)
    return pd.DataFrame(
        {"chrom": pd.Categorical(rng.choice(["1", "2", "10", "X"], n)), "pos": rng.integers(1, 1100, n)},
        index=[f"v{i}" for i in range(n)],
    )


def near(gene: Any, variant: Any, bp: int) -> bool:
    same = gene.chrom.removeprefix("chr") == variant.chrom
    return bool(same and gene.start - bp <= variant.pos <= gene.end + bp)


@given(
    seed=st.integers(0, 999),
    n=st.integers(1, 60),
    bp=st.sampled_from([0, 20, 100, 5000]),
    prefix=st.sampled_from(["", "chr"]),
    some=st.booleans(),
    by_position=st.booleans(),
)
def test_is_every_pair_that_is_near(seed: int, n: int, bp: int, prefix: str, some: bool, by_position: bool) -> None:
    genes, variants = genes_at(seed, prefix=prefix), variants_at(seed, n)
    if by_position:
        variants = variants.sort_values(["chrom", "pos"])
    names = ["g3", "g6"] if some else GENES
    expected = np.array(
        [[g in names and near(genes.loc[g], v, bp) for v in variants.itertuples()] for g in GENES], dtype=bool
    )
    window = dl.cis_window(names if some else None, bp)
    if not expected.any():
        with pytest.raises(ValueError, match=rf"No variant lies within {bp:,} bp"):
            find_cis(window, genes, variants)
        return
    found = find_cis(window, genes, variants)
    columns = np.arange(n)[found.columns]
    assert set(columns) == set(np.flatnonzero(expected.any(axis=0)))
    np.testing.assert_array_equal(found.mask.toarray(), expected[:, columns])
    for gene in names:
        assert set(columns[found.slices[gene]]) == set(np.flatnonzero(expected[GENES.index(gene)]))


def test_through_a_loader() -> None:
    genes, variants = genes_at(3), variants_at(3, 50)
    donors = [f"d{i}" for i in range(5)]
    cells = ad.AnnData(np.ones((20, len(GENES)), np.float32), var=genes)
    cells.obs["donor_id"] = [donors[i % 5] for i in range(20)]
    calls = np.random.default_rng(0).integers(-1, 3, (5, 50), dtype=np.int8)
    genotypes = ad.AnnData(calls, obs=pd.DataFrame(index=donors), var=variants)
    with dl.DonorLoader(cells, genotypes, variants=dl.cis_window(bp=100)) as loader:
        [batch] = list(loader)
        expected = np.array([[near(g, v, 100) for v in variants.itertuples()] for g in genes.itertuples()])
        chosen = [int(name[1:]) for name in loader.variant_names]
        np.testing.assert_array_equal(loader.cis_mask.toarray(), expected[:, chosen])
        np.testing.assert_array_equal(batch["donor_features"].numpy(), calls[:, chosen])
        for gene, part in loader.cis_slices.items():
            names = loader.variant_names[part]
            assert set(names) == {v.Index for v in variants.itertuples() if near(genes.loc[gene], v, 100)}
    with dl.BagLoader(cells, genotypes, variants=dl.cis_window(["g1"], bp=10**6)) as bags:
        assert bags.cis_mask.shape == (len(GENES), len(bags.variant_names))
    with dl.DonorLoader(cells, genotypes) as loader:
        assert loader.cis_mask is None
        assert loader.cis_slices is None


def test_positions_beside_the_cells() -> None:
    genes, variants = genes_at(5), variants_at(5, 40)
    bare = genes[[]]
    renamed = genes.rename(columns={"chrom": "Chromosome", "start": "Start", "end": "End"}).iloc[::-1]
    for table in (genes, renamed):
        found = find_cis(dl.cis_window(bp=50, positions=table), bare, variants)
        np.testing.assert_array_equal(
            found.mask.toarray(), find_cis(dl.cis_window(bp=50), genes, variants).mask.toarray()
        )


@pytest.mark.parametrize(("gene", "variant"), [("chrM", "MT"), (1.0, "1"), (1, "chr1"), ("CHRX", "X")])
def test_names_of_one_chromosome(gene: Any, variant: str) -> None:
    """The same rule as for regions, and numbers of tables with gaps."""
    genes = pd.DataFrame({"chrom": [gene, np.nan], "start": [5, 6], "end": [9, 9]}, index=["g", "h"])
    variants = pd.DataFrame({"chrom": [variant], "pos": [7]}, index=["v"])
    assert find_cis(dl.cis_window(bp=0), genes, variants).mask.toarray().tolist() == [[1], [0]]


def test_bad_input() -> None:
    genes, variants = genes_at(1), variants_at(1, 30)
    with pytest.raises(TypeError, match=r"list of names, got the text 'g1'; use \['g1'\]"):
        dl.cis_window("g1")
    for bp in (-1, 1.5, True, "1Mb"):
        with pytest.raises(ValueError, match="bp must be a whole number"):
            dl.cis_window(bp=bp)
    with pytest.raises(ValueError, match="repeats 'g1'"):
        dl.cis_window(["g1", "g2", "g1"])
    turned = pd.DataFrame({"chrom": "1", "start": [9, 1], "end": [5, 9]}, index=["g1", "g2"])
    near = pd.DataFrame({"chrom": "1", "pos": [1, 20]})
    with pytest.raises(ValueError, match=r"starts where it ends or before.*'g1' of var of the cells"):
        find_cis(dl.cis_window(bp=3), turned, near)
    assert find_cis(dl.cis_window(["g2"], bp=3), turned, near).slices == {"g2": slice(0, 1)}
    with pytest.raises(ValueError, match="is empty"):
        dl.cis_window([])
    with pytest.raises(KeyError, match=r"no column 'start', 'end'.*'chrom'.*positions="):
        find_cis(dl.cis_window(), genes[["chrom"]], variants)
    with pytest.raises(KeyError, match=r"no column 'pos'"):
        find_cis(dl.cis_window(), genes, variants[["chrom"]])
    with pytest.raises(KeyError, match=r"no genes named 'TP53'"):
        find_cis(dl.cis_window(["g1", "TP53"]), genes, variants)
    unplaced = genes.astype({"start": float})
    unplaced.loc["g1", "start"] = np.nan
    with pytest.raises(KeyError, match=r"'g1' have no position"):
        find_cis(dl.cis_window(["g1"]), unplaced, variants)
    assert "g1" not in find_cis(dl.cis_window(), unplaced, variants).slices
    with pytest.raises(ValueError, match=r"Their chromosomes are '7'.*genome build"):
        find_cis(dl.cis_window(), genes.assign(chrom="chr7"), variants)
