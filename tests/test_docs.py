"""The documentation tells the truth: its map is complete, its code runs, and nothing in it is of one machine alone."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from bed_reader import to_bed
from scipy import sparse
from typer.testing import CliRunner

import donorloader as dl
from donorloader.cli import app

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "donorloader"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ABOUT_300_LINES = 320


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


# ---- the map of modules


def modules() -> list[str]:
    """Every module as the map writes it: `cells/` stands for the package's own `__init__.py`."""
    paths = (path.relative_to(SOURCES) for path in SOURCES.rglob("*.py"))
    return sorted(f"{p.parent}/" if p.name == "__init__.py" and p.parent.name else str(p) for p in paths)


def mapped_modules() -> list[str]:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("## Map of the modules", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)


def test_map_lists_every_module_and_no_other() -> None:
    listed = mapped_modules()
    assert sorted(listed) == modules()


@pytest.mark.parametrize("module", sorted(SOURCES.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCES)))
def test_module_is_short_and_says_what_it_is(module: Path) -> None:
    lines = module.read_text().splitlines()
    assert len(lines) <= ABOUT_300_LINES, f"{module} has {len(lines)} lines: split it, one noun a file"
    assert lines, f"{module} is empty"
    assert lines[0].startswith('"""'), f"{module} lacks a docstring"


# ---- the code in the pages


@dataclass(frozen=True)
class Snippet:
    """A fenced block of a page: Python code, or a console session."""

    page: Path
    line: int
    language: str
    code: str


FENCE = re.compile(
    r"(?P<mark><!-- no-test: [^\n]+ -->\n)?^```(?P<language>python|console)\n(?P<code>.*?)^```", re.M | re.S
)


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text()
    return [
        Snippet(page, text.count("\n", 0, found.start("code")) + 1, found["language"], found["code"])
        for found in FENCE.finditer(text)
        if not found["mark"]
    ]


def commands(session: str) -> list[list[str]]:
    """Calls of `donorloader prepare` and `donorloader inspect` in a console session."""
    lines = [line for line in session.replace("\\\n", " ").splitlines() if line.startswith("$ donorloader ")]
    calls = [shlex.split(line, comments=True)[2:] for line in lines]
    return [call for call in calls if call[0] in {"prepare", "inspect"}]


@pytest.fixture(scope="session")
def raw_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the pages speak of: runs of cells, a PLINK panel and a smaller one, tables of donors, a study."""
    folder = tmp_path_factory.mktemp("raw")
    rng = np.random.default_rng(0)
    donors = [f"donor{i:02}" for i in range(12)]
    genes = pd.DataFrame(index=[f"gene{i}" for i in range(30)])
    for run in (1, 2):
        counts = rng.poisson(1.0, size=(400, len(genes))).astype(np.float32)
        obs = pd.DataFrame(
            {
                "donor_id": rng.choice(donors, size=len(counts)),
                "cell_type": pd.Categorical(rng.choice(["B", "T"], size=len(counts))),
                "n_counts": counts.sum(axis=1),
            },
            index=[f"run{run}_cell{i}" for i in range(len(counts))],
        )
        ad.AnnData(sparse.csr_matrix(counts), obs=obs, var=genes).write_h5ad(folder / f"run{run}.h5ad")

    calls = rng.integers(0, 3, size=(len(donors), 40)).astype(np.int8)
    calls[rng.random(calls.shape) < 0.02] = -127
    variants = {"sid": [f"rs{i}" for i in range(40)], "chromosome": ["1"] * 40, "bp_position": np.arange(1, 41)}
    alleles = {"allele_1": ["A"] * 40, "allele_2": ["G"] * 40}
    to_bed(folder / "panel.bed", calls, properties={"fid": ["0"] * 12, "iid": donors, **variants, **alleles})
    fewer = ad.AnnData(calls[:9], obs=pd.DataFrame(index=donors[:9]), var=pd.DataFrame(index=variants["sid"]))
    fewer.write_h5ad(folder / "panel_of_fewer.h5ad")
    (folder / "donor_map.tsv").write_text("donor00\tdonor01\n")
    donor_table = pd.DataFrame({"disease": ["case", "control"] * 6, "age": range(40, 52)}, index=donors)
    donor_table.to_csv(folder / "donors.csv", index_label="donor_id")
    dl.prepare([folder / "run1.h5ad", folder / "run2.h5ad"], folder / "panel.bed", out=folder / "study", progress=False)
    return folder


@pytest.fixture
def beside_raw_files(raw_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own that holds these files, as the working directory."""
    for path in raw_files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=page_id)
def test_snippets_run(page: Path, beside_raw_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if re.search(r"\bout ?=? ?\"?study\b", page.read_text()):  # the page prepares the study itself
        (beside_raw_files / "study").unlink()
    namespace: dict[str, object] = {"__name__": "snippet"}
    for snippet in snippets(page):
        if snippet.language == "python":
            padding = "\n" * (snippet.line - 1)  # so that a traceback names the line of the page
            exec(compile(padding + snippet.code, page, "exec"), namespace)
            continue
        for command in commands(snippet.code):
            result = CliRunner().invoke(app, command)
            assert result.exit_code == 0, f"{page_id(page)}:{snippet.line}: {shlex.join(command)}\n{result.output}"


def test_readme_has_a_place_for_the_measured_table() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.index("<!-- benchmarks:start -->") < text.index("<!-- benchmarks:end -->")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not re.match(r"https?:", target):
            assert (page.parent / target).exists(), f"{page_id(page)} links to {target}, which does not exist"


# ---- nothing of one machine alone

# Put together here, so that this file does not hold them.
FOREIGN = [
    *("/" + folder for folder in ("work/", "root/", "tmp/v/", "tmp/uvenv")),
    *("pypi" + ".org", "files.python" + "hosted.org", "download.py" + "torch.org", "registry.npm" + "js.org"),
]


def repository_files() -> list[Path]:
    """What git tracks, or would: everything that is not ignored."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_machine_or_a_registry() -> None:
    files = repository_files()
    if not files:
        pytest.skip("not a git checkout: no list of the repository's files")
    found = [
        f"{path.relative_to(ROOT)}: {foreign}"
        for path in files
        for foreign in FOREIGN
        if foreign in path.read_text(encoding="utf-8", errors="ignore")
    ]
    assert not found


def test_constraints_pin_versions_and_nothing_else() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[a-z0-9.]+", pin) for pin in pins)
