"""The demo, small: it must find the effects that were planted, and find them through the join."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import torch
from bed_reader import open_bed
from rich.console import Console

import donorloader as dl
from _prepare import read_genotypes
from donorloader.demo import DemoResult, StudySettings, run_demo
from donorloader.demo._model import CisModel
from donorloader.demo._simulate import simulate_study
from donorloader.demo._throughput import Throughput
from donorloader.demo._train import POOL, Fit, fit, mean_dosages

SMALL = StudySettings(donors=50, genotyped_only=3, cells=6_000, genes=150, variants=1_500, pools=3)
EPOCHS = 25
PAIR = ["gene", "variant", "effect"]


@dataclass(frozen=True)
class Demo:
    result: DemoResult
    printed: str
    study: dl.Study
    raw: Path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    text = io.StringIO()
    result = run_demo(
        folder / "out", EPOCHS, 3, folder / "demo.png", settings=SMALL, console=Console(file=text, width=100)
    )
    return Demo(result, text.getvalue(), dl.open_study(folder / "out" / "study"), folder / "out" / "raw")


def train(demo: Demo, genotypes: object, *, epochs: int = EPOCHS) -> Fit:
    """Train as the demo does, on given genotypes."""
    cis = demo.result.fit.effects[PAIR]
    variants = cis["variant"].unique()
    with dl.DonorLoader(
        demo.study.cells,
        genotypes,
        variants=variants,
        obs_columns=[POOL],
        densify=True,
        batch_size=512,
        chunk_size=64,
        preload_nchunks=32,
        seed=3,
    ) as loader:
        means = mean_dosages(dl.open_genotypes(genotypes), loader.donors, variants)
        return fit(loader, means, cis, pools=SMALL.pools, epochs=epochs, seed=3)


def test_planted_effects_are_recovered(demo: Demo) -> None:
    found = demo.result.fit
    assert len(found.planted) >= 20
    assert found.correlation > 0.8
    planted = found.planted
    slope = np.polyfit(planted["effect"], planted["estimate"], 1)[0]
    assert 0.6 < slope < 1.2  # not just in line with the truth, but of its size
    losses = [epoch.loss for epoch in found.epochs]
    assert len(losses) == EPOCHS
    assert losses[-1] < 0.9 * losses[0]


def test_genotypes_of_other_donors_recover_nothing(demo: Demo) -> None:
    """The same cells, model and genotypes, but each donor has another's row: only the join has changed."""
    genotypes = read_genotypes(demo.study.genotypes)
    shuffled = genotypes.copy()
    shuffled.obs_names = np.random.default_rng(5).permutation(np.asarray(genotypes.obs_names, dtype=object))
    assert abs(train(demo, shuffled).correlation) < 0.25


def test_training_is_a_function_of_the_seed(demo: Demo) -> None:
    once, again = (train(demo, demo.study.genotypes, epochs=2) for _ in range(2))
    np.testing.assert_array_equal(once.effects["estimate"], again.effects["estimate"])
    assert [epoch.loss for epoch in once.epochs] == [epoch.loss for epoch in again.epochs]


def test_torch_threads_are_as_before(demo: Demo) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(demo, demo.study.genotypes, epochs=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_picture_is_a_png(demo: Demo) -> None:
    from matplotlib.image import imread

    assert demo.result.picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = imread(demo.result.picture)
    height, width = pixels.shape[:2]
    assert width > 1500
    assert height > 500
    for panel in np.array_split(pixels[..., :3], 3, axis=1):
        assert panel.std() > 0.05  # each third has something on it


def test_what_is_printed(demo: Demo) -> None:
    for expected in (
        "6,000 cells × 150 genes, of 50 donors in 3 pools",
        "donor_features",
        "agree with the files",
        f"{demo.result.fit.correlation:.3f}",
        "cells alone",
        "cells per second",
        "demo.png",
    ):
        assert expected in demo.printed


def test_speeds_are_of_both_streams(demo: Demo) -> None:
    throughput = demo.result.throughput
    assert len(throughput.alone) == len(throughput.joined)
    assert min(*throughput.alone, *throughput.joined) > 0
    assert Throughput((1.0, 4.0, 2.0), (1.0, 1.0, 9.0)).ratio == 0.5


def test_raw_files_are_as_described(demo: Demo) -> None:
    pools = [ad.read_h5ad(path) for path in sorted(demo.raw.glob("*.h5ad"))]
    assert len(pools) == SMALL.pools
    cells_per_donor = sum(pool.obs["donor_id"].value_counts().reindex(range_of_ids(), fill_value=0) for pool in pools)
    assert cells_per_donor.sum() == SMALL.cells
    assert (cells_per_donor > 0).sum() == SMALL.donors
    assert cells_per_donor.max() > 5 * cells_per_donor[cells_per_donor > 0].median() / 2  # uneven
    categories = [tuple(pool.obs["donor_id"].cat.categories) for pool in pools]
    assert len(set(categories)) == SMALL.pools  # codes differ between files
    with open_bed(demo.raw / "panel.bed") as bed:
        assert set(bed.fid) == {"0"}
        assert bed.shape == (SMALL.donors + SMALL.genotyped_only, SMALL.variants)
        calls = bed.read(dtype="int8")
    assert 0.005 < (calls < 0).mean() < 0.02
    assert set(np.unique(calls)) == {-127, 0, 1, 2}


def range_of_ids() -> list[str]:
    return [f"D{number:03d}" for number in range(1, SMALL.donors + SMALL.genotyped_only + 1)]


def test_simulation_is_a_function_of_the_seed(demo: Demo, tmp_path: Path) -> None:
    simulated = simulate_study(tmp_path, SMALL, seed=3)
    assert simulated.panel.read_bytes() == (demo.raw / "panel.bed").read_bytes()
    for path in simulated.cell_files:
        once, again = ad.read_h5ad(demo.raw / path.name), ad.read_h5ad(path)
        assert (once.X != again.X).nnz == 0
        assert once.obs.equals(again.obs)
    assert simulated.cells_per_donor.sum() == SMALL.cells


def test_a_missing_call_counts_as_the_mean() -> None:
    model = CisModel(
        genes=3,
        pools=1,
        donors=["a", "b"],
        cis_gene=torch.tensor([0, 2, 2]),
        cis_variant=torch.tensor([0, 0, 1]),
        mean_dosage=torch.tensor([0.5, 1.5]),
        generator=torch.Generator().manual_seed(0),
    )
    with torch.no_grad():
        model.cis_effect.copy_(torch.tensor([1.0, 10.0, 100.0]))
        effects = model.cis(torch.tensor([[-1, 2], [1, -1], [-1, -1]], dtype=torch.int8))
    torch.testing.assert_close(effects, torch.tensor([[0.0, 0, 50], [0.5, 0, 5], [0, 0, 0]]))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epochs": 0}, ValueError, "epochs must be a whole number from 1, got 0"),
        ({"seed": -1}, ValueError, "seed must be a whole number from 0, got -1"),
        ({"picture": Path("demo.jpg")}, ValueError, "does not end in .png"),
        ({"picture": Path("nowhere/demo.png")}, FileNotFoundError, "does not exist"),
        ({"out": Path(__file__).parent}, FileExistsError, "not an empty folder"),
        ({"out": Path(__file__)}, FileExistsError, "not an empty folder"),
    ],
)
def test_options_are_checked_first(
    options: dict[str, object], error: type[Exception], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=message):
        run_demo(**options)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("name", "value"), [("donors", 0), ("cells", 3), ("planted", 1.5), ("missing", -0.1)])
def test_settings_are_checked(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=str(value)):
        StudySettings(**{name: value})
