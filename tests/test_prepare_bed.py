"""A `.bed` prepared: its two-bit calls are turned as they lie where all are wanted, else bed-reader reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from bed_reader import open_bed, to_bed

import donorloader as dl
from _prepare import read_genotypes
from donorloader.genotypes._selection import Selection
from donorloader.genotypes._transpose import transpose
from donorloader.genotypes.readers._bed import BedReader

if TYPE_CHECKING:
    from pathlib import Path

N_VARIANTS = 40
#: Chromosome 1 but for variants 10, 11 (they leave a gap in it) and the last four.
CHROMOSOMES = ["1"] * 10 + ["2"] * 2 + ["1"] * 24 + ["3"] * 4


def write_bed(folder: Path, n_donors: int) -> Path:
    """Calls at random, a tenth of them missing, and any bits past the last donor."""
    rng = np.random.default_rng(n_donors)
    calls = rng.integers(0, 3, (n_donors, N_VARIANTS)).astype(np.int8)
    calls[rng.random(calls.shape) < 0.1] = -127
    properties = {
        "iid": [f"d{i}" for i in range(n_donors)],
        "sid": [f"rs{i}" for i in range(N_VARIANTS)],
        "chromosome": CHROMOSOMES,
        "bp_position": np.arange(N_VARIANTS) + 1,
        "allele_1": ["A"] * N_VARIANTS,
        "allele_2": ["C"] * N_VARIANTS,
    }
    path = folder / "panel.bed"
    to_bed(path, calls, properties=properties)
    content = np.fromfile(path, dtype=np.uint8)
    if n_donors % 4:
        last = content[3:].reshape(N_VARIANTS, -1)[:, -1]
        last |= rng.integers(0, 256, N_VARIANTS, dtype=np.uint8) << np.uint8(2 * (n_donors % 4))
        content.tofile(path)
    return path


def expected(bed: Path) -> np.ndarray:
    """(n_donors, N_VARIANTS) as bed-reader reads them."""
    with open_bed(bed) as file:
        return np.maximum(file.read(dtype="int8"), -1)


def cells() -> ad.AnnData:
    return ad.AnnData(np.ones((2, 2), np.float32), obs=pd.DataFrame({"donor_id": ["d0", "d0"]}, index=["a", "b"]))


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, int]]:
    """How blocks are read, of twelve variants of five donors: the way, first variant, end, how many."""
    seen: list[tuple[str, int, int, int]] = []
    read_packed, read_block = BedReader.read_packed, BedReader.read_block

    def packed(self: BedReader, start: int, stop: int) -> Any:
        seen.append(("packed", start, stop, stop - start))
        return read_packed(self, start, stop)

    def block(self: BedReader, variants: Any, samples: Any) -> Any:
        seen.append(("bed-reader", variants[0], variants[-1] + 1, variants.size))
        return read_block(self, variants, samples)

    monkeypatch.setattr(BedReader, "read_packed", packed)
    monkeypatch.setattr(BedReader, "read_block", block)
    monkeypatch.setattr("donorloader.genotypes._transpose._BLOCK_BYTES", 12 * 5)
    return seen


def turned(bed: Path, samples: Any = slice(None), **wanted: Any) -> tuple[np.ndarray, np.ndarray]:
    """Values of the donors and variants that are kept, and which variants these are."""
    reader = BedReader(bed)
    rows = np.arange(len(reader.ids))[samples]
    selection = Selection.checked(**wanted)
    with transpose(reader, bed.with_name("scratch"), samples=rows, selection=selection, memory=10**7) as source:
        assert source.packed is not None
        values = source.read(np.arange(rows.size), slice(0, source.n_variants))
        return values, source.var()["pos"].to_numpy() - 1


def test_a_bed_is_prepared(tmp_path: Path, ways: list[Any]) -> None:
    bed = write_bed(tmp_path, 5)
    genotypes = read_genotypes(dl.prepare(cells(), bed, out=tmp_path / "study", bags=False).genotypes)
    assert {way for way, *_ in ways} == {"packed"}
    calls = expected(bed)
    np.testing.assert_array_equal(genotypes.X, calls)
    assert genotypes.obs_names.tolist() == [f"d{i}" for i in range(5)]
    there = calls >= 0
    frequency = np.where(there, calls, 0).sum(0) / np.where(there.any(0), 2 * there.sum(0), np.nan)
    np.testing.assert_allclose(genotypes.var["counted_freq"], frequency, rtol=1e-6)
    np.testing.assert_allclose(genotypes.var["missing_rate"], (~there).mean(0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("n_donors", [1, 3, 4, 5, 33])
def test_all_of_it_is_turned_as_it_lies(
    tmp_path: Path, n_donors: int, ways: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("donorloader.genotypes._transpose._BLOCK_BYTES", 12 * n_donors)
    bed = write_bed(tmp_path, n_donors)
    values, _ = turned(bed)
    assert sorted(ways) == [
        ("packed", 0, 12, 12),
        ("packed", 12, 24, 12),
        ("packed", 24, 36, 12),
        ("packed", 36, 40, 4),
    ]
    assert (values == -1).any()
    np.testing.assert_array_equal(values, expected(bed))


@pytest.mark.parametrize(
    ("regions", "blocks"),
    [
        (["3"], [("packed", 36, 40, 4)]),
        (["1:13-35"], [("packed", 12, 24, 12), ("packed", 24, 35, 11)]),
        (["1"], [("bed-reader", 0, 14, 12), ("packed", 14, 26, 12), ("packed", 26, 36, 10)]),
        (["1:20-25", "3"], [("bed-reader", 19, 40, 10)]),
    ],
)
def test_parts_of_it_are_where_they_are_consecutive(
    tmp_path: Path, regions: list[str], blocks: list[Any], ways: list[Any]
) -> None:
    bed = write_bed(tmp_path, 5)
    values, columns = turned(bed, regions=regions)
    assert sorted(ways) == blocks
    assert len(columns) == sum(n for *_, n in blocks)
    np.testing.assert_array_equal(values, expected(bed)[:, columns])


@pytest.mark.parametrize(
    ("samples", "wanted"), [([0, 4], {}), (slice(None), {"maf": 0.2}), (slice(None), {"max_missing": 0.1})]
)
def test_bed_reader_reads_what_is_chosen_by_donor_or_by_call(
    tmp_path: Path, samples: Any, wanted: dict[str, Any], ways: list[Any]
) -> None:
    bed = write_bed(tmp_path, 5)
    values, columns = turned(bed, samples, **wanted)
    assert {way for way, *_ in ways} == {"bed-reader"}
    assert sum(n for *_, n in ways) == N_VARIANTS
    assert (len(columns) == N_VARIANTS) == (not wanted)
    np.testing.assert_array_equal(values, expected(bed)[samples][:, columns])


def test_a_file_that_is_cut_off_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("donorloader.genotypes._transpose._BLOCK_BYTES", 12 * 5)
    bed = write_bed(tmp_path, 5)
    reader = BedReader(bed)
    for n_bytes in (bed.stat().st_size - 1, 3 + 12 * 2, 3):
        with bed.open("r+b") as file:
            file.truncate(n_bytes)
        with pytest.raises(ValueError, match=r"panel\.bed' has become shorter"):
            transpose(reader, tmp_path / "scratch", samples=np.arange(5), selection=Selection(), memory=10**6)
    assert not (tmp_path / "scratch").exists()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read_packed(0, 4)
