"""What genotypes become on their way out, against a few lines of numpy, from packed and from plain stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

import donorloader as dl
from donorloader.genotypes._unpacking import gather_packed
from donorloader.genotypes._write import write_genotypes

if TYPE_CHECKING:
    from pathlib import Path

N_DONORS, N_VARIANTS, N_CELLS = 23, 37, 400


def reference(calls: Any, encoding: str, missing: str | None) -> Any:
    """`calls` with NaN where missing."""
    p = np.nanmean(calls, axis=0) / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        out = {
            "dosage": calls,
            "count": calls,
            "presence": np.where(np.isnan(calls), np.nan, calls > 0),
            "standardized": np.where((p == 0) | (p == 1), calls * 0, (calls - 2 * p) / np.sqrt(2 * p * (1 - p))),
            "onehot": calls[:, :, None] == np.arange(3),
        }[encoding]
    fill: Any = {"dosage": np.nan, "count": -1, "presence": np.nan, "standardized": 0, "onehot": 0}[encoding]
    if missing is not None:
        mean = 2 * p if encoding == "dosage" else np.zeros_like(p)
        fill = {"nan": np.nan, "zero": 0, "error": fill, "mean": np.broadcast_to(mean, calls.shape)}[missing]
    gone = np.isnan(calls)
    return out if encoding == "onehot" else np.where(gone, fill, out)


@pytest.fixture(scope="module")
def calls() -> Any:
    rng = np.random.default_rng(4)
    calls = rng.choice([0.0, 1, 2, np.nan], (N_DONORS, N_VARIANTS), p=[0.4, 0.3, 0.2, 0.1])
    calls[:, 3], calls[:, 4] = 0, 2  # variants that do not vary
    return calls


@pytest.fixture(scope="module")
def cells() -> ad.AnnData:
    donors = np.random.default_rng(1).integers(0, N_DONORS, N_CELLS)
    obs = pd.DataFrame({"donor_id": [f"d{i}" for i in donors]}, index=[f"c{i}" for i in range(N_CELLS)])
    return ad.AnnData(np.ones((N_CELLS, 2), dtype=np.float32), obs=obs)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, calls: Any) -> dict[str, Any]:
    obs = pd.DataFrame(index=[f"d{i}" for i in range(N_DONORS)])
    var = pd.DataFrame(index=[f"v{i}" for i in range(N_VARIANTS)])
    hard = ad.AnnData(np.where(np.isnan(calls), -1, calls).astype(np.int8), obs=obs, var=var)
    folder = tmp_path_factory.mktemp("genotypes")
    for layout in ("packed", "plain", "both"):
        write_genotypes(dl.open_genotypes(hard), folder / layout, memory=10**8, layout=layout)
    floats = ad.AnnData(calls.astype(np.float32), obs=obs, var=var)
    return {"memory": hard, "float": floats} | {layout: folder / layout for layout in ("packed", "plain", "both")}


POSSIBLE = {
    "dosage": (None, "nan", "mean", "zero"),
    "count": (None, "zero"),
    "presence": (None, "nan", "zero"),
    "standardized": (None, "nan", "mean", "zero"),
    "onehot": (None, "zero"),
}


@pytest.mark.parametrize("kind", ["packed", "plain", "both", "memory", "float"])
@pytest.mark.parametrize("encoding", list(POSSIBLE))
def test_every_encoding(stores: dict[str, Any], cells: ad.AnnData, calls: Any, kind: str, encoding: Any) -> None:
    for missing in POSSIBLE[encoding]:
        for variants in (None, slice(5, 30), [9, 2, 36, 3, 4]):
            chosen = np.arange(N_VARIANTS)[slice(None) if variants is None else variants]
            expected = reference(calls, encoding, missing)[:, chosen]
            loader = dl.DonorLoader(
                cells,
                stores[kind],
                variants=variants,
                genotype_encoding=encoding,
                missing_calls=missing,
                batch_size=64,
                prefetch=0,
            )
            with loader:
                for batch in loader:
                    rows = [int(donor[1:]) for donor in batch["unique_donors"]]
                    features = batch["donor_features"].numpy()
                    assert features.dtype == (np.int8 if encoding in ("count", "onehot") else np.float32)
                    np.testing.assert_allclose(features, expected[rows], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["packed", "plain", "memory", "float"])
def test_a_missing_call_that_must_not_be(stores: dict[str, Any], cells: ad.AnnData, calls: Any, kind: str) -> None:
    for encoding in (None, "dosage", "count", "onehot", "standardized"):
        with dl.DonorLoader(
            cells, stores[kind], genotype_encoding=encoding, missing_calls="error", batch_size=16, prefetch=0
        ) as loader:
            first = next(iter(dl.DonorLoader(cells, batch_size=16, prefetch=0)))["unique_donors"]
            missing = np.isnan(calls[[int(d[1:]) for d in first]])
            donor, variant = first[np.argwhere(missing)[0][0]], np.argwhere(missing)[0][1]
            with pytest.raises(ValueError, match=rf"missing_calls='error'.*'{donor}'.*'v{variant}'"):
                next(iter(loader))
        complete = np.flatnonzero(~np.isnan(calls).any(axis=0))
        with dl.DonorLoader(
            cells, stores[kind], variants=complete, genotype_encoding=encoding, missing_calls="error", prefetch=0
        ) as loader:
            assert sum(len(batch["index"]) for batch in loader) == N_CELLS


@pytest.mark.parametrize("kind", ["packed", "plain", "memory"])
@pytest.mark.parametrize("encoding", [None, "dosage", "presence", "standardized"])
@pytest.mark.parametrize("missing", [None, "zero"])
def test_donors_without_genotypes_are_nan(
    stores: dict[str, Any], cells: ad.AnnData, calls: Any, kind: str, encoding: Any, missing: Any
) -> None:
    more = cells.copy()
    more.obs["donor_id"] = more.obs["donor_id"].astype(str).replace({"d3": "stranger", "d7": "unknown"})
    with dl.DonorLoader(
        more, stores[kind], genotype_encoding=encoding, missing_calls=missing, missing_donors="nan", prefetch=2
    ) as loader:
        [batch] = list(loader)
    for donor, row in zip(batch["unique_donors"], batch["donor_features"].numpy(), strict=True):
        if donor in ("stranger", "unknown"):
            assert np.isnan(row).all()
            continue
        stored = np.where(np.isnan(calls), -1 if missing is None else 0, calls)
        expected = stored if encoding is None else reference(calls, encoding, missing)
        np.testing.assert_allclose(row, expected[int(donor[1:])], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"genotype_encoding": "dosages"}, r"genotype_encoding must be one of 'dosage'.*'dosages'"),
        ({"missing_calls": "drop"}, r"missing_calls must be one of 'nan', 'mean'.*'drop'"),
        ({"genotype_encoding": "count", "missing_calls": "mean"}, r"'mean' cannot be had.*int8.*'zero'"),
        ({"genotype_encoding": "onehot", "missing_calls": "nan"}, r"'nan' cannot be had"),
        ({"missing_calls": "nan"}, r"'nan' cannot be had.*None of int8"),
        ({"genotype_encoding": "count", "missing_donors": "nan"}, r"rows of NaN.*'drop'"),
    ],
)
def test_what_cannot_be_had(stores: dict[str, Any], cells: ad.AnnData, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dl.DonorLoader(cells, stores["packed"], **options)


def test_without_genotypes_there_is_nothing_to_encode(cells: ad.AnnData) -> None:
    with pytest.raises(ValueError, match=r"genotype_encoding and missing_calls choose among genotypes"):
        dl.DonorLoader(cells, genotype_encoding="dosage", missing_calls="zero")


def test_dosages_are_no_calls(stores: dict[str, Any], cells: ad.AnnData) -> None:
    dosages = stores["float"].copy()
    dosages.X[2, 5] = 0.25
    for encoding in ("count", "presence", "onehot"):
        with (
            dl.DonorLoader(cells, dosages, genotype_encoding=encoding, prefetch=0) as loader,
            pytest.raises(ValueError, match=r"hard calls of 0, 1 or 2, but a genotype is 0.25.*'dosage'"),
        ):
            list(loader)


def test_frequencies_of_what_counts_no_allele(cells: ad.AnnData, stores: dict[str, Any]) -> None:
    scores = stores["float"].copy()
    scores.X[0, 0] = -3.5
    with pytest.raises(ValueError, match=r"genotypes from 0 to 2"):
        dl.DonorLoader(cells, scores, genotype_encoding="standardized")


@pytest.mark.parametrize("kind", ["packed", "plain"])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_rows_under_a_budget_are_the_same(
    tmp_path: Path, stores: dict[str, Any], cells: ad.AnnData, calls: Any, kind: str, prefetch: int
) -> None:
    row = 10 if kind == "packed" else N_VARIANTS
    expected = np.where(np.isnan(calls), -1, calls)
    for rows in (N_DONORS - 1, 12, 0):
        with dl.DonorLoader(
            cells,
            stores[kind],
            batch_size=8,
            chunk_size=4,
            preload_nchunks=4,
            genotype_memory=rows * row,
            prefetch=prefetch,
        ) as loader:
            for _ in range(2):
                for batch in loader:
                    chosen = [int(donor[1:]) for donor in batch["unique_donors"]]
                    np.testing.assert_array_equal(batch["donor_features"].numpy(), expected[chosen])
            reads = loader.genotype_reads
            assert 0 < reads.read < reads.needed
            assert reads.read_bytes == reads.read * row
    with (
        dl.DonorLoader(cells, stores[kind], batch_size=64, genotype_memory=5 * row, prefetch=prefetch) as loader,
        pytest.raises(ValueError, match=rf"rows of one batch: .* × {row} bytes.*it holds 5 rows"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("encoding", [None, *POSSIBLE])
def test_rows_that_lie_on_the_device(stores: dict[str, Any], cells: ad.AnnData, encoding: Any, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    for missing in (None, "zero", *(["mean"] if encoding == "dosage" else [])):
        for variants in (None, slice(5, 30), [9, 2, 36, 3, 4]):
            options = {"genotype_encoding": encoding, "missing_calls": missing, "variants": variants, "batch_size": 64}
            with (
                dl.DonorLoader(cells, stores["packed"], **options, device=device, genotypes_on_device=True) as there,
                dl.DonorLoader(cells, stores["packed"], **options) as here,
            ):
                for a, b in zip(there, here, strict=True):
                    assert a["donor_features"].device.type == device
                    assert a["donor_features"].dtype == b["donor_features"].dtype
                    np.testing.assert_array_equal(a["donor_features"].cpu(), b["donor_features"])


def test_donors_without_genotypes_on_the_device(stores: dict[str, Any], cells: ad.AnnData) -> None:
    more = cells.copy()
    more.obs["donor_id"] = more.obs["donor_id"].astype(str).replace({"d3": "stranger"})
    options = {"missing_donors": "nan", "device": "cpu", "donor_rows": "window"}
    batches = []
    for on_device in (True, False):
        with dl.DonorLoader(more, stores["packed"], genotypes_on_device=on_device, **options) as loader:
            batches += list(loader)
    np.testing.assert_array_equal(batches[0]["donor_features"], batches[1]["donor_features"])
    assert batches[0]["donor_features"].isnan().any()


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("packed", {}, "there is no device"),
        ("plain", {"device": "cpu"}, "not packed.*layout='packed'"),
        ("packed", {"device": "cpu", "missing_calls": "error"}, "on the host"),
    ],
)
def test_rows_that_cannot_lie_on_the_device(
    stores: dict[str, Any], cells: ad.AnnData, kind: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        dl.DonorLoader(cells, stores[kind], genotypes_on_device=True, **options)


def test_what_gathers_is_compiled_before_the_first_batch(
    stores: dict[str, Any], cells: ad.AnnData, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watched(*arguments: Any) -> None:
        seen.append([argument.dtype for argument in arguments if isinstance(argument, np.ndarray)])
        gather_packed(*arguments)

    monkeypatch.setattr("donorloader.genotypes._encoding.gather_packed", watched)
    with dl.DonorLoader(cells, stores["packed"], genotype_encoding="dosage", prefetch=0) as loader:
        assert len(seen) == 1
        next(iter(loader))
    assert len(seen) > 1
    assert all(dtypes == seen[0] for dtypes in seen)
