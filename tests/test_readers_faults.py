"""Files of genotypes that cannot be read, and options that cannot be met: which file, what rule, what to do."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest

from _panels import IDS, _write_bcf, fam_lines, psam_text, small_panel, vcf_text, write_panel, write_vcz
from donorloader._panel import open_panel
from donorloader.genotypes._selection import Region, Selection
from donorloader.genotypes._transpose import transpose
from donorloader.genotypes.readers import open_variants

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULTS: dict[str, Any] = {
    "genotype_layer": None,
    "id_by": "iid",
    "multiallelic": "split",
    "layout": None,
    "dosage_type": None,
}
PANEL = small_panel()
PLAIN = PANEL.without(multiallelic=True, haploid=True)


def read_all(path: Path, **options: Any) -> None:
    reader = open_variants(path, **options)
    try:
        reader.read_block(np.arange(reader.n_variants), np.arange(len(reader.ids)))
    finally:
        reader.close()


def opened(path: Path, **wanted: Any) -> None:
    """Open a file with a selection, as `prepare` does before it writes anything."""
    selection = Selection.checked(**wanted)
    panel = open_panel(path, selection=selection, read_dosages=None, **DEFAULTS)
    assert panel is not None
    panel.close()


def cut(part: float) -> Callable[[bytes], bytes]:
    return lambda data: data[: int(len(data) * part)]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("pgen", cut(0.9)),
        ("pgen", lambda _: b"no pgen at all"),
        ("bgen", cut(0.9)),
        ("bgen", cut(0.02)),
        ("bgen", lambda _: b"no bgen at all, whatever its name is"),
        ("bgen", lambda data: data[:-300] + bytes(300)),
        ("vcf", lambda data: data[: data.rindex(b"\t", 0, len(data) * 2 // 3)]),
        ("vcf", lambda _: b"no vcf at all\n"),
        ("vcf.gz", cut(0.5)),
        ("bcf", cut(0.8)),
        ("bcf", lambda data: data[:-28]),
    ],
)
def test_damaged(tmp_path: Path, kind: str, change: Callable[[bytes], bytes]) -> None:
    path = write_panel(PLAIN, tmp_path, kind)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"panel\.{kind}'.*(again|version)"):
        read_all(path)


def test_a_vcf_that_ends_within_a_record_of_bgzf(tmp_path: Path) -> None:
    path = _write_bcf(PLAIN, tmp_path, "wz")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"panel\.vcf\.gz'.*cut off"):
        read_all(path)


@pytest.mark.parametrize("damage", ["missing", "length", "chunk", "empty", "contig -1", "contig 99"])
def test_damaged_vcz(tmp_path: Path, damage: str) -> None:
    path = write_vcz(PANEL, tmp_path, 3, leave_out=["call_genotype"] if damage == "missing" else [])
    says = "lacks call_genotype"
    if damage == "length":
        import zarr

        zarr.open_group(str(path))["variant_position"].resize((5,))
        says = r"do not fit together.*5 positions"
    elif damage == "chunk":
        chunk = next(file for file in (path / "call_genotype" / "c").rglob("*") if file.is_file())
        chunk.write_bytes(b"nonsense")
        says = "cannot be read as VCF Zarr"
    elif damage.startswith("contig"):
        import zarr

        number = int(damage.split()[1])
        zarr.open_group(str(path))["variant_contig"][3] = number
        says = rf"1 variants of .* have other numbers, the first, at position 3, {number}\."
    elif damage == "empty":
        path = tmp_path / "empty.vcz"
        path.mkdir()
        says = "cannot be read as VCF Zarr"
    with pytest.raises(ValueError, match=says):
        read_all(path)


@pytest.mark.parametrize(
    ("kind", "suffix", "says"),
    [("pgen", ".pvar", r"\.pvar \(or \.pvar\.zst, \.bim\)"), ("pgen", ".psam", r"\.psam \(or \.fam\)")],
)
def test_a_companion_is_absent(tmp_path: Path, kind: str, suffix: str, says: str) -> None:
    path = write_panel(PLAIN, tmp_path, kind)
    path.with_suffix(suffix).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{says}.*panel\{suffix}' does not exist"):
        open_variants(path)


@pytest.mark.parametrize("kind", ["bed", "pgen", "bgen", "vcf", "vcf.gz", "bcf", "vcz"])
def test_no_such_file(tmp_path: Path, kind: str) -> None:
    with pytest.raises(FileNotFoundError, match=rf"none\.{kind}' does not exist"):
        open_variants(tmp_path / f"none.{kind}")


@pytest.mark.parametrize("suffix", [".bim", ".fam", ".pvar", ".psam"])
@pytest.mark.parametrize("late", [False, True])
def test_tables_that_are_no_text(tmp_path: Path, suffix: str, late: bool) -> None:
    path = write_panel(PLAIN, tmp_path, "bed" if suffix in (".bim", ".fam") else "pgen")
    table = path.with_suffix(suffix)
    text = (
        table.read_text().replace("NA", "Zoë" if late else "NA") if suffix in (".fam", ".psam") else table.read_text()
    )
    data = (text.replace("rs60", "rsé") if late else text).encode("latin-1" if late else "utf-8")
    table.write_bytes(data if late else gzip.compress(data))
    with pytest.raises(ValueError, match=rf"panel\{suffix}' is not text in UTF-8 .*Unpack it"):
        open_variants(path)


@pytest.mark.parametrize("name", ["x.bim", "x.fam", "x.pvar", "x.psam", "x.pvar.zst"])
def test_a_companion_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"Name the \.({'bed' if name[2] in 'bf' else 'pgen'}) of"):
        open_variants(Path(name))


@pytest.mark.parametrize(
    ("kind", "library", "extra"), [("pgen", "pgenlib", "pgen"), ("bgen", "bgen", "bgen"), ("bcf", "cyvcf2", "vcf")]
)
def test_a_library_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, library: str, extra: str
) -> None:
    path = write_panel(PLAIN, tmp_path, kind)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"'{library}'.*pip install 'donorloader\[{extra}\]'"):
        open_variants(path)


class TestIds:
    @pytest.mark.parametrize("file", ["panel.fam", "panel.psam"])
    def test_repeated(self, tmp_path: Path, file: str) -> None:
        path = write_panel(PLAIN, tmp_path, "bed" if file.endswith("fam") else "pgen")
        repeated = ["7", "7", "007", "007", *IDS[4:]]
        text = fam_lines(ids=repeated) if file.endswith("fam") else psam_text().replace("NA\t", "7\t", 1)
        if file.endswith("psam"):
            text = "#IID\n" + "".join(f"{i}\n" for i in repeated)
        (tmp_path / file).write_text(text)
        with pytest.raises(ValueError, match=rf"{file}' has more than one row for '7', '007'.*fid_iid"):
            open_variants(path)

    def test_repeated_in_a_bgen(self, tmp_path: Path) -> None:
        import bgen

        with bgen.BgenWriter(tmp_path / "p.bgen", 3, samples=["a", "b", "a"]) as file:
            file.add_variant("v", "rs1", "1", 9, ["A", "G"], np.eye(3))
        with pytest.raises(ValueError, match=r"p\.bgen' has more than one row for 'a'"):
            open_variants(tmp_path / "p.bgen")

    def test_repeated_in_a_vcf(self, tmp_path: Path) -> None:
        (tmp_path / "p.vcf").write_text(vcf_text(PANEL, ids=["a", "a", *IDS[2:]]))
        with pytest.raises(ValueError, match=r"p\.vcf'"):
            open_variants(tmp_path / "p.vcf")

    def test_no_families(self, tmp_path: Path) -> None:
        path = write_panel(PLAIN, tmp_path, "pgen")
        path.with_suffix(".psam").write_text("#IID\n" + "".join(f"{i}\n" for i in IDS))
        with pytest.raises(ValueError, match=r"every FID in .*panel\.psam"):
            open_variants(path, id_by="fid_iid")

    @pytest.mark.parametrize(
        ("sample", "says"),
        [
            (None, r"does not hold the ids.*p\.sample' does not exist"),
            ("ID_1 ID_2\n0 0\na a\n", "of 2 donors, but .* names 1"),
            ("a a\nb b\nc c\n", "two lines of names and types"),
            ("ID_1 ID_2\n0 0\na x\nb x\n", "more than one row for 'x'"),
        ],
    )
    def test_sample_file(self, tmp_path: Path, sample: str | None, says: str) -> None:
        import bgen

        with bgen.BgenWriter(tmp_path / "p.bgen", 2) as file:
            file.add_variant("v", "rs1", "1", 9, ["A", "G"], np.eye(3)[:2])
        if sample is not None:
            (tmp_path / "p.sample").write_text(sample)
        with pytest.raises((ValueError, FileNotFoundError), match=says):
            open_variants(tmp_path / "p.bgen")


def test_bgen_of_version_1_1(tmp_path: Path) -> None:
    import bgen

    with bgen.BgenWriter(tmp_path / "p.bgen", 3, samples=["a", "b", "c"], layout=1, compression="zlib") as file:
        file.add_variant("v", "rs1", "1", 9, ["A", "G"], np.eye(3))
    with pytest.raises(ValueError, match=r"1\.2 and 1\.3 are read, but .*p\.bgen' is of version 1\.1.*Rewrite"):
        open_variants(tmp_path / "p.bgen")


@pytest.mark.parametrize("kind", ["pgen", "bgen", "vcf", "vcz2"])
def test_several_alleles_are_not_wanted(tmp_path: Path, kind: str) -> None:
    path = write_panel(PANEL.without(haploid=kind == "pgen"), tmp_path, kind)
    with pytest.raises(ValueError, match=r"2 records of .*panel.* have several: 'rs12', 'rs33'.*multiallelic='split'"):
        open_variants(path, multiallelic="error")


class TestTables:
    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("##only a comment\n", "starts with #CHROM"),
            ("#CHROM\tPOS\tID\tALT\n1\t5\ta\tG\n", "lacks REF"),
            ("#CHROM\tPOS\tID\tREF\tALT\n1\tfive\ta\tA\tG\n", r"Column 2 .*'five' in line 2"),
            ("#CHROM\tPOS\tID\tREF\tALT\n1\t5\ta\tA\n", r"panel\.pvar' is not a table of 5 columns"),
            ("#CHROM\tPOS\tID\tREF\tALT\n", "names no variant|has none"),
            ("#CHROM\tPOS\tID\tREF\tALT\n1\t5\ta\tA\tG\n", "cannot be read as a .pgen of 11 donors and 1 variants"),
        ],
    )
    def test_pvar(self, tmp_path: Path, text: str, says: str) -> None:
        path = write_panel(PLAIN, tmp_path, "pgen")
        path.with_suffix(".pvar").write_text(text)
        with pytest.raises(ValueError, match=says):
            open_variants(path)

    def test_a_vcf_without_calls(self, tmp_path: Path) -> None:
        lines = [line for line in vcf_text(PANEL).splitlines(keepends=True) if not line.startswith("##FORMAT=<ID=GT")]
        (tmp_path / "p.vcf").write_text("".join(lines))
        with pytest.raises(ValueError, match=r"no GT among its FORMAT fields \(DS\)\. Use read_dosages=True"):
            open_variants(tmp_path / "p.vcf")

    def test_a_vcz_without_dosages(self, tmp_path: Path) -> None:
        path = write_vcz(PANEL, tmp_path, 3, leave_out=["call_DS"])
        with pytest.raises(ValueError, match=r"lacks call_DS.*Leave read_dosages out"):
            open_variants(path, read_dosages=True)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_panel(PLAIN, tmp_path_factory.mktemp("bed"), "bed")


class TestSelection:
    @pytest.mark.parametrize(
        ("wanted", "says"),
        [
            ({"regions": ["1:5-50", "9", "chr10:3"]}, r"regions '9', 'chr10:3' are .*panel\.bed.*It has '1', '2', 'X'"),
            ({"variants": ["rs1", "rsx", "nope"]}, r"'rsx', 'nope'.*look like 'rs0', 'rs1', 'rs2'"),
            ({"samples": ["7", "77"]}, r"panel\.bed' does not have: '77'.*look like '7', '007', 'NA'"),
        ],
    )
    def test_unknown_names(self, bed: Path, wanted: dict[str, Any], says: str) -> None:
        with pytest.raises(KeyError, match=says):
            opened(bed, **wanted)

    def test_nothing_is_left(self, bed: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="regions and variants leave none of the 59 variants"):
            opened(bed, regions="1", variants=["rs60"])
        reader = open_variants(bed)
        with pytest.raises(ValueError, match=r"filters leave none.*Of 1 variants read, 1 with a minor.*Loosen maf"):
            transpose(
                reader,
                tmp_path / "scratch",
                samples=np.arange(3),
                selection=Selection.checked(variants=["rs21"], maf=0.01),
                memory=10**6,
            )
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("wanted", "says"),
        [
            ({"regions": "1:9-3"}, "ends where it starts or after, got '1:9-3'"),
            ({"regions": "1:a-b"}, "chr:start-end, got '1:a-b'"),
            ({"maf": 0.7}, "maf must be from 0 to 0.5, got 0.7"),
            ({"maf": float("nan")}, "maf must be"),
            ({"max_missing": -0.1}, "max_missing must be from 0 to 1, got -0.1"),
            ({"samples": []}, "samples names no samples"),
            ({"variants": "no_such_file.txt"}, r"file of variants 'no_such_file\.txt' does not exist"),
        ],
    )
    def test_wrong_values(self, wanted: dict[str, Any], says: str) -> None:
        with pytest.raises((ValueError, FileNotFoundError), match=says):
            Selection.checked(**wanted)
        with pytest.raises(TypeError, match="maf must be a number"):
            Selection.checked(maf="0.1")  # type: ignore[arg-type]

    def test_files_of_names(self, tmp_path: Path) -> None:
        file = tmp_path / "names.txt"
        file.write_text("a\n\n b \na\n")
        assert Selection.checked(samples=file, variants=str(file)).samples == ("a", "b")
        for text, says in (("a b\n", "one name a line"), ("\n", "names no samples")):
            file.write_text(text)
            with pytest.raises(ValueError, match=says):
                Selection.checked(samples=file)

    def test_regions(self) -> None:
        assert Region.parse("chr1:1,000-2,000") == Region("chr1:1,000-2,000", "chr1", 1000, 2000)
        assert Region.parse("X:5") == Region("X:5", "X", 5, 5)
        assert Region.parse("2").stop > 10**12


class TestOptionsWithoutEffect:
    def test_of_files(self, tmp_path: Path) -> None:
        for kind, options, says in [
            ("vcf", {"id_by": "fid_iid"}, "id_by='fid_iid' chooses ids of PLINK files"),
            ("bed", {"read_dosages": True}, r"read_dosages=True .*\.bed holds hard calls"),
            ("bgen", {"read_dosages": False}, r"read_dosages=False .*\.bgen holds probabilities"),
            ("bed", {"multiallelic": "join"}, "multiallelic must be one of .*'join'"),
        ]:
            path = write_panel(PLAIN, tmp_path, kind)
            with pytest.raises(ValueError, match=says):
                open_variants(path, **options)

    def test_of_an_anndata(self) -> None:
        selection = Selection.checked(maf=0.1, regions=["1"])
        for genotypes, remedy in ((ad.AnnData(np.zeros((2, 2))), "Subset an AnnData"), (None, "Leave it out")):
            with pytest.raises(ValueError, match=f"read_dosages, regions, maf tells what to read.*{remedy}"):
                open_panel(genotypes, selection=selection, read_dosages=True, **DEFAULTS)


def test_a_budget_that_is_too_small(tmp_path: Path) -> None:
    reader = open_variants(write_panel(PLAIN, tmp_path, "bed"))
    with pytest.raises(ValueError, match=r"too small.*11 donors need 440 bytes, and 100 are left"):
        transpose(reader, tmp_path / "s", samples=np.arange(11), selection=Selection(), memory=100)


def test_a_full_disk_is_seen_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import donorloader.genotypes._scratch as module

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    reader = open_variants(write_panel(PLAIN, tmp_path, "bed"))
    monkeypatch.setattr(module, "_reserve", full)
    with pytest.raises(OSError, match="No space left"):
        transpose(reader, tmp_path / "scratch", samples=np.arange(11), selection=Selection(), memory=600)
    assert not (tmp_path / "scratch").exists()


def test_gzip_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "p.vcf.gz").write_bytes(gzip.compress(b"not a vcf\n"))
    with pytest.raises(ValueError, match=r"p\.vcf\.gz' cannot be read as a VCF"):
        open_variants(tmp_path / "p.vcf.gz")
