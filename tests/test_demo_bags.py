"""The demo of bags, small: it must foretell the disease of unseen donors, from the right cells, and without a leak."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from bed_reader import open_bed
from rich.console import Console
from typer.testing import CliRunner, Result

import donorloader as dl
import donorloader.demo
from donorloader.cli import app
from donorloader.demo import BagResult, BagSettings, run_bags_demo
from donorloader.demo._bags_model import AttentionModel
from donorloader.demo._bags_run import split_donors
from donorloader.demo._bags_simulate import simulate_bags
from donorloader.demo._bags_train import fit_bags, open_bags, rank_auc, score_bags

SMALL = BagSettings(
    donors=400, cells=10_000, genes=80, variants=100, candidates=10, pools=2, programme=14, strength=0.9
)
EPOCHS = 15
SEED = 3


@dataclass(frozen=True)
class Demo:
    result: BagResult
    printed: str
    study: dl.Study
    raw: Path
    table: pd.DataFrame


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    text = io.StringIO()
    result = run_bags_demo(
        folder / "out",
        EPOCHS,
        SEED,
        folder / "bags.png",
        genotypes=True,
        settings=SMALL,
        console=Console(file=text, width=100),
    )
    raw = folder / "out" / "raw"
    table = pd.read_csv(raw / "donors.tsv", sep="\t", index_col="donor_id")
    return Demo(result, text.getvalue(), dl.open_study(folder / "out" / "study"), raw, table)


def test_disease_of_unseen_donors_is_foretold(demo: Demo) -> None:
    cells = demo.result.cells
    assert cells.held_out.auc > 0.8
    assert demo.result.means.auc < 0.75  # the mean over cells does not tell it
    assert cells.held_out.auc > demo.result.means.auc + 0.15
    assert cells.epochs[-1].loss < 0.75 * cells.epochs[0].loss
    _, held_out = split_donors(demo.table, SEED)
    assert sorted(cells.held_out.donors.index) == sorted(held_out)
    found = cells.held_out.donors["disease"]
    assert found.to_dict() == demo.table.loc[found.index, "disease"].to_dict()


def test_genotypes_help(demo: Demo) -> None:
    assert demo.result.genotypes is not None
    assert demo.result.genotypes.held_out.auc > demo.result.cells.held_out.auc + 0.03


def test_attention_finds_the_signal_cells(demo: Demo) -> None:
    held_out = demo.result.cells.held_out
    assert 0.04 < held_out.cells["signal"].mean() < 0.12
    assert held_out.attention_auc > 0.85
    assert held_out.attention_ratio > 4


def test_labels_of_other_donors_teach_nothing(demo: Demo) -> None:
    """The same bags and model, but labels permuted over the donors: what is left of the AUC would be a leak."""
    train, held_out = split_donors(demo.table, SEED)
    permuted = demo.table.assign(disease=np.random.default_rng(5).permutation(demo.table["disease"]))
    model, _ = fit_bags(demo.study, permuted, train, None, epochs=EPOCHS, seed=SEED)
    assert abs(score_bags(model, demo.study, permuted, held_out, None).auc - 0.5) < 0.15
    assert abs(score_bags(model, demo.study, demo.table, held_out, None).auc - 0.5) < 0.25


def test_splits_share_no_donor(demo: Demo) -> None:
    train, held_out = split_donors(demo.table, SEED)
    assert not set(train) & set(held_out)
    assert set(train) | set(held_out) == set(demo.table.index)
    with open_bags(demo.study, demo.table, donors=train, max_cells=None) as loader:
        assert {donor for batch in loader for donor in batch["donors"]} == set(train)


def test_training_is_a_function_of_the_seed(demo: Demo) -> None:
    train, held_out = split_donors(demo.table, SEED)
    variants = dl.open_genotypes(demo.study.genotypes).names(slice(None))[:5]
    before = torch.get_num_threads()
    once, again = (
        score_bags(
            fit_bags(demo.study, demo.table, train, variants, epochs=1, seed=SEED)[0],
            demo.study,
            demo.table,
            held_out,
            variants,
        )
        for _ in range(2)
    )
    pd.testing.assert_frame_equal(once.donors, again.donors)
    pd.testing.assert_frame_equal(once.cells, again.cells)
    assert torch.get_num_threads() == before


def test_raw_files_are_as_described(demo: Demo) -> None:
    obs = pd.concat([ad.read_h5ad(path).obs for path in sorted(demo.raw.glob("*.h5ad"))])
    assert len(obs) == SMALL.cells
    per_donor = obs.groupby("donor_id", observed=True)["signal"].agg(["sum", "size"])
    assert set(per_donor.index) == set(demo.table.index)
    ill = demo.table.loc[per_donor.index, "disease"].to_numpy().astype(bool)
    assert (per_donor["sum"] > 0).to_numpy().tolist() == ill.tolist()
    share = per_donor["sum"][ill].sum() / per_donor["size"][ill].sum()
    assert SMALL.least < share < SMALL.most
    with open_bed(demo.raw / "panel.bed") as bed:
        assert list(bed.iid) == list(demo.table.index)
        assert bed.shape == (SMALL.donors, SMALL.variants)


def test_risk_variant_is_a_candidate_and_goes_with_the_disease(demo: Demo, tmp_path: Path) -> None:
    simulated = simulate_bags(tmp_path, SMALL, seed=SEED)
    assert simulated.panel.read_bytes() == (demo.raw / "panel.bed").read_bytes()
    assert simulated.risk_variant in simulated.candidates
    assert simulated.risk_variant in demo.printed
    with open_bed(simulated.panel) as bed:
        dosages = bed.read(np.s_[:, list(bed.sid).index(simulated.risk_variant)], dtype="int8").ravel()
    called = dosages >= 0
    assert rank_auc(dosages[called], demo.table["disease"][called]) > 0.75


def test_a_model_of_cells_never_sees_genotypes(demo: Demo) -> None:
    with open_bags(demo.study, demo.table) as loader:
        assert next(iter(loader))["donor_features"] is None


def test_attention_is_of_each_bag_alone() -> None:
    model = AttentionModel(genes=4, mean_dosage=None, generator=torch.Generator().manual_seed(0)).eval()
    counts = torch.arange(1.0, 25.0).reshape(6, 4) % 7 + 1

    def batch(X: torch.Tensor, sizes: list[int]) -> dict[str, torch.Tensor]:
        offsets = torch.tensor([0, *np.cumsum(sizes)])
        return {"X": X, "offsets": offsets, "donor_idx": torch.repeat_interleave(torch.tensor(sizes))}

    with torch.no_grad():
        log_odds, attention = model(batch(counts, [2, 4]))
        alone, _ = model(batch(counts[2:], [4]))
    torch.testing.assert_close(log_odds[1:], alone)
    torch.testing.assert_close(attention[:2].sum(), torch.tensor(1.0))
    torch.testing.assert_close(attention[2:].sum(), torch.tensor(1.0))


def test_a_missing_call_counts_as_the_mean() -> None:
    means = torch.tensor([0.5, 1.5])
    model = AttentionModel(genes=2, mean_dosage=means, generator=torch.Generator().manual_seed(0)).eval()
    batch = {"X": torch.ones(3, 2), "offsets": torch.tensor([0, 1, 2, 3]), "donor_idx": torch.arange(3)}
    with torch.no_grad():
        model.variant.copy_(torch.tensor([1.0, 10.0]))
        log_odds, _ = model({**batch, "donor_features": torch.tensor([[-1, 2], [1, -1], [-1, -1]], dtype=torch.int8)})
    torch.testing.assert_close(log_odds - log_odds[2], torch.tensor([5.0, 0.5, 0.0]))


def test_rank_auc() -> None:
    assert rank_auc([1, 2, 3, 4], [0, 0, 1, 1]) == 1
    assert rank_auc([4, 3, 2, 1], [0, 0, 1, 1]) == 0
    assert rank_auc([1, 1, 1], [0, 1, 1]) == 0.5
    assert rank_auc([1, 3, 2, 4], [0, 0, 1, 1]) == 0.75
    with pytest.raises(ValueError, match="both kinds, got 2 positive and 0 negative"):
        rank_auc([1, 2], [1, 1])


def test_picture_is_a_png(demo: Demo) -> None:
    from matplotlib.image import imread

    pixels = imread(demo.result.picture)
    height, width = pixels.shape[:2]
    assert width > 1500
    assert height > 500
    for panel in np.array_split(pixels[..., :3], 3, axis=1):
        assert panel.std() > 0.05  # each third has something on it


def test_what_is_printed(demo: Demo) -> None:
    assert demo.result.genotypes is not None
    for expected in (
        "10,000 cells × 80 genes, of 400 donors in 2 pools",
        "donor_features",
        "160 others are held out",
        f"mean over cells, ridge regression   {demo.result.means.auc:.3f}",
        f"attention, cells alone              {demo.result.cells.held_out.auc:.3f}",
        f"attention, cells and genotypes      {demo.result.genotypes.held_out.auc:.3f}",
        f"{demo.result.cells.held_out.attention_auc:.3f}",
        "bags.png",
    ):
        assert expected in demo.printed


def test_without_genotypes_none_are_prepared(tmp_path: Path) -> None:
    text = io.StringIO()
    settings = BagSettings(donors=40, cells=1_000, genes=30, variants=20, candidates=5, pools=2, programme=8)
    result = run_bags_demo(tmp_path / "out", 1, 0, tmp_path / "bags.png", settings=settings, console=Console(file=text))
    assert result.genotypes is None
    assert dl.open_study(tmp_path / "out" / "study").genotypes is None
    assert "donor_features" not in text.getvalue()
    assert "cells and genotypes" not in text.getvalue()
    assert result.picture.is_file()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"NO_COLOR": "1"})


def test_command_line_passes_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(donorloader.demo, "run_bags_demo", lambda **options: calls.append(options))
    picture = tmp_path / "p.png"
    assert run("demo", "--bags").exit_code == 0
    assert (
        run(
            *("demo", "--bags", "--genotypes", "-o", tmp_path, "--epochs", 3, "--seed", 4, "--picture", picture)
        ).exit_code
        == 0
    )
    assert calls == [
        {"out": None, "epochs": 10, "seed": 0, "picture": Path("donorloader-demo-bags.png"), "genotypes": False},
        {"out": tmp_path, "epochs": 3, "seed": 4, "picture": picture, "genotypes": True},
    ]


def test_genotypes_without_bags_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run_demo", "run_bags_demo"):
        monkeypatch.setattr(donorloader.demo, name, lambda **_: pytest.fail("the demo ran"))
    result = run("demo", "--genotypes")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: --genotypes belongs to the demo of bags: add --bags")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epochs": 0}, ValueError, "epochs must be a whole number from 1, got 0"),
        ({"picture": Path("demo.jpg")}, ValueError, "does not end in .png"),
        ({"out": Path(__file__).parent}, FileExistsError, "not an empty folder"),
    ],
)
def test_options_are_checked_first(
    options: dict[str, object], error: type[Exception], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=message):
        run_bags_demo(**options)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [("donors", 0), ("cells", 3), ("programme", 1), ("candidates", 501), ("least", 0.2), ("missing", -0.1)],
)
def test_settings_are_checked(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=str(value)):
        BagSettings(**{name: value})
