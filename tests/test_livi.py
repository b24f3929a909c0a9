"""LIVI's batches, against the naive look-up; and a small model of LIVI's form that trains on them."""

from __future__ import annotations

import ast
import inspect
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse

import donorloader as dl
from _data import donor_ids
from _faults import wait_until
from donorloader._buffers import BufferPool
from donorloader.integrations import _presence
from donorloader.integrations._livi_convert import LIVIConverter
from donorloader.integrations._presence import dense_counts, dense_counts_by_torch, presence, presence_by_torch

if TYPE_CHECKING:
    from _data import Cells, Store

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SNPS = [f"rs{i}" for i in range(9)]


def panel(dtype: str = "int8", *, missing: bool = False) -> ad.AnnData:
    """Counts of 0, 1 and 2 of 14 donors, one without cells, in another order than the cells' donors."""
    ids = [*reversed(donor_ids()), "without_cells"]
    counts = np.random.default_rng(3).integers(0, 3, (len(ids), len(SNPS))).astype(dtype)
    if missing:
        nothing = np.nan if counts.dtype.kind == "f" else -1
        counts[0, 1] = counts[4, 1] = counts[7, 5] = nothing
        counts[-1] = nothing  # of the donor without cells: does not count
    return ad.AnnData(counts, obs=pd.DataFrame(index=ids), var=pd.DataFrame(index=SNPS))


KNOWN = pd.DataFrame(
    [[1, 0, 1], [0, 1, 0], [0, 0, 1]], index=["rs7", "rs1", "rs5"], columns=["gene4", "gene0", "gene9"]
)


def batches(
    cells: Cells, *, genotypes: Any = None, loader: dict[str, Any] | None = None, **options: Any
) -> dl.LIVIBatches:
    options = {"covariates": ["cell_type", "run"], "known_cis": KNOWN, **options}
    variants = None if options["known_cis"] is None else list(KNOWN.index)
    genotypes = panel() if genotypes is None else genotypes
    opened = dl.DonorLoader(cells.path, genotypes, variants=variants, batch_size=32, **(loader or {}))
    return dl.LIVIBatches(opened, **options)


def check(batch: dict[str, Any], cells: Cells, genotypes: ad.AnnData, donors: list[str], absent: Any = 0.0) -> None:
    """Every field, looked up cell by cell; `absent` is what a missing call becomes, per variant."""
    rows = batch["index"].numpy()
    assert {k: v.dtype for k, v in batch.items() if k != "covariates"} == {
        "x": torch.float32,
        "y": torch.int64,
        "size_factor": torch.float32,
        "GT_cells": torch.float32,
        "known_cis": torch.int64,
        "index": torch.int64,
    }
    np.testing.assert_array_equal(batch["x"], cells.x[rows])
    assert [donors[code] for code in batch["y"]] == list(cells.donor[rows])
    np.testing.assert_array_equal(batch["size_factor"], cells.x[rows].sum(axis=1, keepdims=True))
    for name, codes in zip(("cell_type", "run"), batch["covariates"], strict=True):
        assert codes.dtype == torch.int64
        values = cells.obs[name].to_numpy()[rows]
        assert [sorted(set(cells.obs[name]))[code] for code in codes] == list(values)
    raw = genotypes[cells.donor[rows], list(KNOWN.index)].X.astype(float)
    missing = np.isnan(raw) | (raw < 0)
    expected = np.where(missing, np.broadcast_to(absent, raw.shape), raw > 0)
    np.testing.assert_allclose(batch["GT_cells"], expected, rtol=1e-6)
    for i, snp in enumerate(KNOWN.index):
        for j in range(cells.x.shape[1]):
            assert batch["known_cis"][i, j] == (KNOWN.loc[snp].get(f"gene{j}", 0))


@pytest.mark.parametrize(
    ("dtype", "to", "densify"),
    [("int8", "torch", False), ("int8", "numpy", True), ("int64", "numpy", False), ("float32", "torch", True)],
)
def test_every_field(store: Store, dtype: str, to: str, densify: bool) -> None:
    cells, genotypes = store.cells(3), panel(dtype)
    made = batches(cells, genotypes=genotypes, loader={"densify": densify, "to": to, "donor_rows": "window"})
    assert list(made.donor_categories) == sorted(set(cells.donor))
    assert made.covariates_dims == [4, 3]
    assert list(made.covariate_categories["run"]) == ["r0", "r1", "r2"]
    assert (made.n_genes, made.n_donors, made.n_cis_snps) == (11, 13, 3)
    assert made.missing_calls.tolist() == [0, 0, 0]
    seen = []
    for batch in made:
        check(batch, cells, genotypes, list(made.donor_categories))
        seen += batch["index"].tolist()
    assert sorted(seen) == list(range(cells.n_obs))
    assert len(made) == -(-cells.n_obs // 32)
    made.close()


@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize("missing", ["absent", "mean"])
def test_missing_calls(store: Store, missing: str, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    cells, genotypes = store.cells(3), panel(dtype, missing=True)
    with caplog.at_level(logging.WARNING, "donorloader.livi"):
        made = batches(cells, genotypes=genotypes, missing=missing)
    assert "3 of 39 genotype calls (7.69%) of 13 donors are missing, in 2 of 3 variants" in caplog.text
    assert made.missing_calls.to_dict() == {"rs7": 0, "rs1": 2, "rs5": 1}
    absent: Any = 0.0
    if missing == "mean":
        mine = genotypes[donor_ids(), list(KNOWN.index)].to_df().to_numpy(dtype=float)
        mine = np.where(mine < 0, np.nan, mine)
        absent = np.nanmean(np.where(np.isnan(mine), np.nan, mine > 0), axis=0)
    for batch in made:
        check(batch, cells, genotypes, list(made.donor_categories), absent)


def test_missing_calls_are_refused_unless_told_otherwise(store: Store) -> None:
    with pytest.raises(ValueError, match=r"3 of 39 genotype calls .* missing='absent'"):
        batches(store.cells(3), genotypes=panel(missing=True))
    fewer = panel()[[d for d in panel().obs_names if d != "d4"]].copy()
    with pytest.raises(ValueError, match=r"3 of 39 genotype calls .* are missing, in 3 of 3 variants"):
        batches(store.cells(3), genotypes=fewer, loader={"missing_donors": "nan"})
    none = panel("float32")
    none.X[:, 5] = np.nan
    with pytest.raises(ValueError, match="share of carriers of 'rs5' is unknown"):
        batches(store.cells(3), genotypes=none, missing="mean")


def test_pairs_and_no_cis(store: Store) -> None:
    cells = store.cells(3)
    pairs = [(snp, gene) for snp in KNOWN.index for gene in KNOWN.columns if KNOWN.loc[snp, gene]]
    assert torch.equal(batches(cells, known_cis=pairs).known_cis, batches(cells).known_cis)
    without = batches(cells, known_cis=None, covariates=[])
    assert without.covariates_dims is None
    assert without.n_cis_snps == 0
    assert list(next(iter(without))) == ["x", "y", "size_factor", "covariates", "index"]


def test_codes_of_a_model_trained_before(store: Store) -> None:
    cells = store.cells(3)
    order = ["elsewhere", *sorted(set(cells.donor), reverse=True)]
    made = batches(cells, donor_categories=order, loader={"donors": ["d3", "d10"]})
    for batch in made:
        assert [order[code] for code in batch["y"]] == list(cells.donor[batch["index"].numpy()])
    assert made.n_donors == 14
    with pytest.raises(ValueError, match="donor_categories lacks 'd10'"):
        batches(cells, donor_categories=["d3"], loader={"donors": ["d3", "d10"]})


def test_size_factors_from_obs(store: Store) -> None:
    cells = store.cells(3)
    with pytest.raises(ValueError, match="'row' is not in 1 cells"):
        batches(cells, size_factor="row")
    made = batches(cells, size_factor="row", loader={"cells_query": "row > 0"})
    for batch in made:
        assert batch["size_factor"].dtype == torch.float32
        np.testing.assert_array_equal(batch["size_factor"][:, 0], batch["index"])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"covariates": "run"}, TypeError, ["['run']"]),
        ({"covariates": ["age"]}, KeyError, ["'age'"]),
        ({"covariates": ["run", "run"]}, ValueError, ["comes again"]),
        (
            {"size_factor": "cell_type"},
            ValueError,
            ["numbers above 0", "'cell_type' is not in 181 cells", "row 0 with"],
        ),
        ({"known_cis": sparse.csr_matrix(KNOWN)}, TypeError, ["pairs of a variant and a gene", "csr_matrix"]),
        ({"known_cis": ["rs1", "rs5"]}, TypeError, ["pairs of a variant and a gene"]),
        ({"missing": "zero"}, ValueError, ["'absent'", "'zero'"]),
        ({"known_cis": KNOWN.iloc[:2]}, ValueError, ["'rs5'", "variants=list"]),
        ({"known_cis": KNOWN.rename(columns={"gene0": "gene77"})}, ValueError, ["'gene77'"]),
        ({"known_cis": KNOWN * 2}, ValueError, ["0 and 1", "2"]),
        ({"donor_categories": ["d1", "d1"]}, ValueError, ["'d1'"]),
        ({"loader": {"genotype_encoding": "standardized"}}, ValueError, ["'standardized'", "missing="]),
    ],
)
def test_errors(store: Store, options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        batches(store.cells(3), **options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("value", [0.5, -1.0, np.nan, np.inf])
@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_what_is_no_count_is_refused_at_once_and_wherever_it_is(layout: str, value: float) -> None:
    x = np.ones((600, 5), dtype=np.float32)
    obs = pd.DataFrame({"donor_id": ["a", "b"] * 300}, index=[f"c{i}" for i in range(600)])
    for row, early in ((3, True), (599, False)):
        wrong = x.copy()
        wrong[row, 2] = value
        adata = ad.AnnData(sparse.csr_matrix(wrong) if layout == "csr" else wrong, obs=obs)
        loader = dl.DonorLoader(adata, batch_size=50)
        if early:
            with pytest.raises(ValueError, match="likelihood is over counts"):
                dl.LIVIBatches(loader)
            continue
        with pytest.raises(ValueError, match="but row 599 of the cells has"):
            list(dl.LIVIBatches(loader))


@pytest.mark.parametrize("prefetch", [None, 2, 0])
def test_batches_are_made_ahead_of_the_loop(
    store: Store, monkeypatch: pytest.MonkeyPatch, prefetch: int | None
) -> None:
    """Not on the loop's thread, but where there are no others; and no more of them than may wait, as they are large."""
    made: list[str] = []
    convert = LIVIConverter.__call__

    def noted(self: LIVIConverter, batch: dict[str, Any]) -> dict[str, Any]:
        made.append(threading.current_thread().name)
        return convert(self, batch)

    monkeypatch.setattr(LIVIConverter, "__call__", noted)
    opened = batches(store.cells(3), loader={"prefetch": prefetch})
    passing = iter(opened)
    next(passing)
    if prefetch == 0:
        assert made == [threading.current_thread().name]
    else:
        ahead = 2 + (4 if prefetch is None else prefetch)  # with the one in hand, and one that waits to be put
        assert wait_until(lambda: len(made) == min(ahead, len(opened)))
        time.sleep(0.05)
        assert len(made) == min(ahead, len(opened))
        assert set(made) == {"donorloader-transform"}
        assert "transform" in opened.loader.timings().index
    assert 1 + sum(1 for _ in passing) == len(made) == len(opened)
    assert opened.state_dict() == opened.loader.state_dict()
    opened.close()


@pytest.mark.parametrize("n_variants", [1, 3, 64, 1001])
@pytest.mark.parametrize("dtype", ["bool", "int8", "float32"])
def test_presence_by_numpy(dtype: str, n_variants: int) -> None:
    rng = np.random.default_rng(n_variants)
    genotypes = rng.integers(0 if dtype == "bool" else -1, 3, (17, n_variants)).astype(dtype)
    rows, fill = rng.integers(0, 17, 90), rng.random(n_variants, dtype=np.float32)
    if dtype == "float32":
        genotypes[genotypes < 0] = np.nan
        genotypes[0] = np.linspace(0, 2, n_variants)  # dosages: the nearest count decides
    got = presence(genotypes, rows, fill, BufferPool())
    values = genotypes[rows].astype(float)
    expected = np.where(values >= 0.5, 1, np.where(values >= 0, 0, fill)).astype(np.float32)
    np.testing.assert_array_equal(got, expected)
    with pytest.MonkeyPatch.context() as patch:  # as large batches are
        patch.setattr(_presence, "LARGE", 0)
        np.testing.assert_array_equal(presence(genotypes, rows, fill, BufferPool()), expected)
    if dtype != "bool":  # as on a GPU
        by_torch = presence_by_torch(*map(torch.from_numpy, (genotypes, rows, fill)))
        np.testing.assert_array_equal(by_torch, expected)


def test_counts_stored_twice_are_added() -> None:
    twice = sparse.csr_matrix((np.float32([1, 2, 3]), [0, 0, 2], [0, 2, 3]), shape=(2, 3))
    x, sums, bad = dense_counts(twice, BufferPool())
    np.testing.assert_array_equal(x, [[3, 0, 0], [0, 0, 3]])
    np.testing.assert_array_equal(sums, [[3], [3]])
    assert bad == -1


@pytest.mark.parametrize("densify", [False, True])
def test_on_a_gpu_by_torch(store: Store, densify: bool) -> None:
    with dl.DonorLoader(store.cells(3).path, batch_size=64, densify=densify) as loader:
        batch = next(iter(loader))
    x, sums = dense_counts_by_torch(batch["X"])
    expected = store.cells(3).x[batch["index"].numpy()]
    assert (x.dtype, sums.dtype) == (torch.float32, torch.float32)
    np.testing.assert_array_equal(x, expected)
    np.testing.assert_array_equal(sums, expected.sum(axis=1, keepdims=True))


class SmallLIVI(torch.nn.Module):
    """Of LIVI's form: cell state, embeddings of donors and covariates, cis effects, negative binomial counts."""

    def __init__(self, x_dim: int, y_dim: int, n_cis_snps: int, covariates_dims: list[int], z_dim: int = 4):
        super().__init__()
        self.encode = torch.nn.Linear(x_dim, z_dim)
        self.decode = torch.nn.Linear(z_dim, x_dim)
        self.donor = torch.nn.Embedding(y_dim, x_dim)
        self.covariate = torch.nn.ModuleList([torch.nn.Embedding(n, x_dim) for n in covariates_dims])
        self.cis = torch.nn.Parameter(torch.zeros(n_cis_snps, x_dim))
        self.log_total = torch.nn.Parameter(torch.zeros(x_dim))

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        z = torch.softmax(self.encode(torch.log1p(batch["x"])), dim=1)
        out = self.decode(z) + self.donor(batch["y"]) + batch["GT_cells"] @ (batch["known_cis"] * self.cis)
        for embedding, codes in zip(self.covariate, batch["covariates"], strict=True):
            out = out + embedding(codes)
        mean = torch.softmax(out, dim=-1) * batch["size_factor"]
        total = self.log_total.exp()
        counts = torch.distributions.NegativeBinomial(total, probs=mean / (mean + total))
        return -counts.log_prob(batch["x"]).mean()


def test_a_model_of_its_form_learns(store: Store) -> None:
    torch.manual_seed(0)
    with dl.DonorLoader(store.cells(3).path, panel(), variants=list(KNOWN.index), batch_size=64) as loader:
        made = dl.LIVIBatches(loader, covariates=["cell_type", "run"], known_cis=KNOWN)
        model = SmallLIVI(made.n_genes, made.n_donors, made.n_cis_snps, made.covariates_dims)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
        means = []
        for _ in range(8):
            losses = []
            for batch in made:
                loss = model.loss(batch)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.item())
            means.append(np.mean(losses))
    assert np.isfinite(means).all()
    assert means[-1] < 0.8 * means[0], means
    assert (model.cis != 0).any(dim=0).nonzero().ravel().tolist() == [0, 4, 9]  # the genes with a known cis-eQTL


@pytest.mark.parametrize("script", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_examples_are_valid_python_with_options_that_exist(script: Path) -> None:
    tree = ast.parse(script.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    ours = [call for call in calls if isinstance(call.func.value, ast.Name) and call.func.value.id == "dl"]
    assert ours, f"{script} does not use donorloader"
    for call in ours:
        parameters = inspect.signature(getattr(dl, call.func.attr)).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            continue
        assert {k.arg for k in call.keywords if k.arg} <= set(parameters), ast.unparse(call)
