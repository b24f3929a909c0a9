"""Files of genotypes: every value of a small panel in every format, against alleles counted one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from _panels import FIDS, IDS, N_RECORDS, SmallPanel, _write_bcf, small_panel, vcf_text, write_panel
from donorloader.genotypes._selection import Selection
from donorloader.genotypes._transpose import TransposedRows, transpose
from donorloader.genotypes._unpacking import unpack
from donorloader.genotypes.readers import open_variants

if TYPE_CHECKING:
    from pathlib import Path

    from donorloader.genotypes.readers import VariantReader

KINDS = ["bed", "pgen", "bgen", "vcf", "vcf.gz", "bcf", "vcz2", "vcz3"]
DIPLOID = {"bed": {"multiallelic": True, "haploid": True}, "pgen": {"haploid": True}}
#: Granted so that the turned panel is kept in memory, and in a file.
MEMORY = {"memory": 10**6, "file": 600}

ALL = np.arange(len(IDS))


@pytest.fixture(scope="module")
def panels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[SmallPanel, Path]]:
    """The panel as each format holds it, and its file."""
    made = {}
    for kind in KINDS:
        panel = small_panel().without(**DIPLOID.get(kind, {}))
        made[kind] = panel, write_panel(panel, tmp_path_factory.mktemp(kind.replace(".", "_")), kind)
    return made


def turn(reader: VariantReader, path: Path, memory: int = 10**6, samples: Any = ALL, **wanted: Any) -> TransposedRows:
    return transpose(
        reader, path / "scratch", samples=np.asarray(samples), selection=Selection.checked(**wanted), memory=memory
    )


def as_float(values: np.ndarray) -> np.ndarray:
    """Missing as NaN, whatever the type."""
    return np.where(values < 0, np.nan, values) if values.dtype.kind == "i" else values


@pytest.mark.parametrize("kind", KINDS)
def test_every_value(panels: dict[str, tuple[SmallPanel, Path]], kind: str) -> None:
    panel, path = panels[kind]
    reader = open_variants(path)
    assert reader.ids.tolist() == IDS
    assert reader.dtype == (np.float32 if kind == "bgen" else np.int8)
    var = reader.var()
    records = [(c, p, i, a) for c, p, i, a in zip(panel.chrom, panel.pos, panel.ids, panel.alleles, strict=True)]
    expected = [(c, p, i, {a[0], alt}) for c, p, i, a in records for alt in a[1:]]
    columns = (var[name] for name in ("chrom", "pos", "id", "a0", "a1"))
    assert [(c, p, i, {a0, a1}) for c, p, i, a0, a1 in zip(*columns, strict=True)] == expected
    assert var["counted"].tolist() == var["a1"].tolist()
    if kind != "bed":
        assert var["a0"].tolist() == [a[0] for _, _, _, a in records for _ in a[1:]]
    assert var.index.is_unique
    assert var.index[3].startswith("1:40:")
    assert [name for name in var.index if name.startswith("rs7")] == []  # its id is another's too
    blocks = [
        reader.read_block(np.arange(start, min(start + 9, reader.n_variants)), ALL).values
        for start in range(0, reader.n_variants, 9)
    ]
    values = np.concatenate(blocks)
    assert values.dtype == reader.dtype
    np.testing.assert_array_equal(as_float(values.T), panel.expected(var))
    # some donors, some variants, and back to the start of the file
    some, donors = np.array([0, 4, 12, 13, reader.n_variants - 1]), np.array([1, 2, 9])
    np.testing.assert_array_equal(
        as_float(reader.read_block(some, donors).values.T), panel.expected(var)[np.ix_(donors, some)]
    )
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read_block(some, ALL)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(data=st.data())
def test_turned_and_selected(
    panels: dict[str, tuple[SmallPanel, Path]], tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    """Any selection at once, in blocks of any size, against the same conditions put to the expected values."""
    panel, path = panels[kind]
    reader = open_variants(path)
    var = reader.var()
    samples = sorted(data.draw(st.sets(st.sampled_from(range(len(IDS))), min_size=3)))
    wanted: dict[str, Any] = {
        "maf": data.draw(st.sampled_from([None, 0.1, 0.3])),
        "max_missing": data.draw(st.sampled_from([None, 0.0, 0.2])),
    }
    keep = np.ones(len(var), dtype=bool)
    if data.draw(st.booleans()):
        wanted["regions"] = ["chr2:330-400", "X", "1:10-250"]
        pos, chrom = var["pos"].to_numpy(), var["chrom"].astype(str).to_numpy()
        keep = (chrom == "X") | ((chrom == "2") & (pos >= 330) & (pos <= 400)) | ((chrom == "1") & (pos <= 250))
    if data.draw(st.booleans()):
        chosen = data.draw(st.sets(st.sampled_from(list(var.index)), min_size=20))
        wanted["variants"] = sorted(chosen)
        keep &= np.isin(var.index, wanted["variants"])
    expected = panel.expected(var)[samples]
    copies = np.zeros(expected.shape)
    lookup = {p: i for i, p in enumerate(panel.pos)}
    for j, p in enumerate(var["pos"]):
        copies[:, j] = (panel.calls[lookup[p]][samples] >= 0).sum(axis=1)
    copies[np.isnan(expected)] = 0
    with np.errstate(invalid="ignore"):
        frequency = np.nansum(expected, axis=0) / copies.sum(axis=0)
    if wanted["maf"] is not None:
        keep &= np.minimum(frequency, 1 - frequency) >= wanted["maf"] - 1e-9
    if wanted["max_missing"] is not None:
        keep &= np.isnan(expected).mean(axis=0) <= wanted["max_missing"] + 1e-9
    folder = tmp_path_factory.mktemp("turned")
    memory = data.draw(st.sampled_from([600, 1200, 10**6]))
    if reader.dtype.kind == "f":
        memory *= 4
    if not keep.any():
        with pytest.raises(ValueError, match="leave none"):
            turn(reader, folder, memory, samples, **wanted)
        return
    with turn(reader, folder, memory, samples, **wanted) as rows:
        assert rows.ids.tolist() == [IDS[i] for i in samples]
        assert rows.obs().index.tolist() == rows.ids.tolist()
        assert rows.n_variants == keep.sum()
        pd.testing.assert_frame_equal(rows.var().astype(str), var[keep].astype(str))
        values = rows.read(np.arange(len(samples)), slice(0, rows.n_variants))
        np.testing.assert_array_equal(as_float(values), expected[:, keep])
        columns = np.arange(rows.n_variants)[::-2]
        some = rows.read(np.array([2, 0, 2]), columns)
        assert some.flags.c_contiguous
        np.testing.assert_array_equal(as_float(some), expected[:, keep][[2, 0, 2]][:, columns])
        assert rows.names(columns).tolist() == var.index[keep][columns].tolist()
        if rows.packed is not None:
            np.testing.assert_array_equal(
                unpack(rows.packed[np.arange(len(samples))], slice(0, rows.n_variants)), values
            )
    assert list(folder.iterdir()) == []
    reader.close()


@pytest.mark.parametrize("where", MEMORY)
def test_the_scratch_file_goes(panels: dict[str, tuple[SmallPanel, Path]], tmp_path: Path, where: str) -> None:
    reader = open_variants(panels["bed"][1])
    rows = turn(reader, tmp_path, MEMORY[where])
    assert [file.name for file in tmp_path.iterdir()] == (["scratch"] if where == "file" else [])
    rows.close()
    rows.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="closed"):
        rows.read(np.array([0]), slice(0, 1))


def test_the_scratch_file_goes_when_reading_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_panel(small_panel(), tmp_path, "vcz3")
    reader = open_variants(path)
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(reader, "read_block", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        turn(reader, tmp_path / "folder", MEMORY["file"])
    assert list((tmp_path / "folder").iterdir()) == []


def test_more_than_two_copies_are_kept_plain(tmp_path: Path) -> None:
    """Ploidy 4: counts up to 4, which two bits do not hold."""
    header = '##fileformat=VCFv4.2\n##contig=<ID=1>\n##FORMAT=<ID=GT,Number=1,Type=String,Description="g">\n'
    header += "#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\tFORMAT\ta\tb\n"
    lines = [f"1\t{i + 1}\tr{i}\tA\tC\t.\t.\t.\tGT\t0/1\t0/0\n" for i in range(9)]
    lines.append("1\t10\tr9\tA\tC\t.\t.\t.\tGT\t1/1/1/1\t0/./1/1\n")
    (tmp_path / "p.vcf").write_text(header + "".join(lines))
    reader = open_variants(tmp_path / "p.vcf")
    with turn(reader, tmp_path, samples=[0, 1], maf=0.1) as rows:
        assert rows.packed is not None
        expected = [[1] * 9 + [4], [0] * 9 + [-1]]
        np.testing.assert_array_equal(rows.read(np.arange(2), slice(0, 9)), np.array(expected)[:, :9])
        assert rows.n_variants == 9  # of the tenth, everybody called has nothing but ALT
    with turn(reader, tmp_path, samples=[0, 1]) as rows:
        assert rows.packed is None
        assert rows.dtype == np.int8
        np.testing.assert_array_equal(rows.read(np.arange(2), slice(0, 10)), expected)


@pytest.mark.parametrize("kind", ["vcf", "bcf", "vcz2", "vcz3"])
def test_dosages_of_calls_and_dosages(panels: dict[str, tuple[SmallPanel, Path]], kind: str) -> None:
    panel, path = panels[kind]
    reader = open_variants(path, read_dosages=True)
    values = reader.read_block(np.arange(reader.n_variants), ALL).values
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values.T, panel.expected(reader.var()) * 0.75 + 0.25)
    reader.close()


@pytest.mark.parametrize("kind", ["vcf", 2, 3])
@pytest.mark.parametrize("n_alts", [1, 2])
def test_one_dosage_for_several_alleles_is_of_none(tmp_path: Path, kind: str | int, n_alts: int) -> None:
    """`DS` with Number=1, or with fewer numbers than a record has ALT alleles."""
    given = np.array([[[0.5, 0.25], [1.0, 0.75]], [[1.5, 0.125], [0.0, 1.0]]], dtype=np.float32)[:, :, :n_alts]
    alts = ["G", "G,T" if n_alts == 1 else "G,T,C"]
    if kind == "vcf":
        path = tmp_path / "d.vcf"
        rows = [
            "\t".join(
                ["1", str(i), ".", "A", alt, ".", ".", ".", "DS", *(",".join(map(str, v)) for v in values.tolist())]
            )
            for i, (alt, values) in enumerate(zip(alts, given[:, :, : 1 if n_alts == 1 else 2], strict=True), start=1)
        ]
        path.write_text(
            "##fileformat=VCFv4.2\n##contig=<ID=1>\n"
            f'##FORMAT=<ID=DS,Number={"A" if n_alts > 1 else 1},Type=Float,Description="Dosage">\n'
            + "\t".join(["#CHROM", "POS", "ID", "REF", "ALT", "QUAL", "FILTER", "INFO", "FORMAT", "a", "b\n"])
            + "".join(f"{row}\n" for row in rows)
        )
    else:
        path = tmp_path / "d.vcz"
        group = zarr.open_group(str(path), mode="w", zarr_format=kind)  # type: ignore[arg-type] # 2 or 3
        text = np.dtypes.StringDType()
        arrays = {
            "call_DS": given[:, :, 0] if n_alts == 1 else given,
            "variant_position": np.array([1, 2]),
            "variant_contig": np.array([0, 0]),
            "variant_allele": np.array([["A", *f"{alt},,".split(",")[:3]] for alt in alts], dtype=text),
            "contig_id": np.array(["1"], dtype=text),
            "sample_id": np.array(["a", "b"], dtype=text),
        }
        for name, values in arrays.items():
            array = group.create_array(name, shape=values.shape, dtype=values.dtype)
            array[...] = values
    reader = open_variants(path, read_dosages=True)
    values = reader.read_block(np.arange(reader.n_variants), np.arange(2)).values
    assert reader.n_variants == 2 + n_alts
    np.testing.assert_array_equal(values[0], given[0, :, 0])
    assert np.isnan(values[1:]).all()
    assert "1 records with several ALT alleles have one dosage for all of these together" in " ".join(reader.notes)
    assert "'1:2:A:G'" in reader.notes[-1]
    reader.close()


def test_a_record_without_calls(tmp_path: Path) -> None:
    text = vcf_text(small_panel()).splitlines()
    record = next(i for i, line in enumerate(text) if line.startswith("1\t20\t"))
    text[record] = "\t".join([*text[record].split("\t")[:8], "DS", *["0.5"] * len(IDS)])
    (tmp_path / "panel.vcf").write_text("\n".join(text) + "\n")
    reader = open_variants(tmp_path / "panel.vcf")
    values = reader.read_block(np.arange(3), ALL).values.T.astype(float)
    values[values < 0] = np.nan
    expected = small_panel().expected(reader.var().iloc[:3])
    expected[:, 1] = np.nan
    np.testing.assert_array_equal(values, expected)
    reader.close()


def test_dosages_of_a_pgen(tmp_path: Path) -> None:
    import pgenlib

    given = np.array([[0.25, 1.5, -9, 2.0], [0.0, 1.0, 0.75, -9]], dtype=np.float32)
    writer = pgenlib.PgenWriter(bytes(tmp_path / "d.pgen"), 4, variant_ct=2, nonref_flags=False, dosage_present=True)
    for dosages in given:
        writer.append_dosages(dosages)
    writer.close()
    (tmp_path / "d.pvar").write_text("#CHROM\tPOS\tID\tREF\tALT\n1\t5\ta\tA\tG\n1\t6\tb\tC\tT\n")
    (tmp_path / "d.psam").write_text("#IID\na\nb\nc\nd\n")
    reader = open_variants(tmp_path / "d.pgen", read_dosages=True)
    with turn(reader, tmp_path, samples=range(4), maf=0.3) as rows:  # 3.75 of 6 copies, 1.75 of 6
        assert rows.names(slice(0, 9)).tolist() == ["a"]
    with turn(reader, tmp_path, samples=range(4)) as rows:
        assert rows.packed is None
        np.testing.assert_array_equal(
            rows.read(np.arange(4), slice(0, 2)), np.where(given < 0, np.nan, given).T.astype(np.float32)
        )


@pytest.mark.parametrize("phased", [False, True])
def test_probabilities_of_a_bgen(tmp_path: Path, phased: bool) -> None:
    """Expected copies of each allele, by hand; halves, so that 8 bits hold them nearly."""
    import bgen

    unphased = np.array([[0.5, 0, 0, 0.5, 0, 0], [0, 0, 0.25, 0, 0.75, 0], [np.nan] * 6])
    haplotypes = np.array([[0.5, 0.5, 0, 0, 0, 1], [0, 1, 0, 0.25, 0.5, 0.25], [np.nan] * 6])
    expected = [[0.0, 1.25, np.nan], [0.5, 0.75, np.nan]]  # AA or AT; GG or GT
    if phased:
        expected = [[0.5, 1.5, np.nan], [1.0, 0.25, np.nan]]
    with bgen.BgenWriter(tmp_path / "p.bgen", 3, samples=["a", "b", "c"]) as file:
        file.add_variant("v", "rs1", "1", 9, ["A", "G", "T"], haplotypes if phased else unphased, phased=phased)
    reader = open_variants(tmp_path / "p.bgen")
    assert reader.var()["a1"].tolist() == ["G", "T"]
    np.testing.assert_allclose(reader.read_block(np.arange(2), np.arange(3)).values, expected, atol=0.005)


def test_a_compressed_pvar(tmp_path: Path) -> None:
    from numcodecs import zstd

    panel = small_panel().without(haploid=True)
    path = write_panel(panel, tmp_path, "pgen")
    plain = open_variants(path).var()
    pvar = path.with_suffix(".pvar")
    (tmp_path / "panel.pvar.zst").write_bytes(zstd.compress(pvar.read_bytes()))
    pvar.unlink()
    pd.testing.assert_frame_equal(open_variants(path).var().astype(str), plain.astype(str))


def test_a_pgen_beside_tables_of_plink_1(tmp_path: Path) -> None:
    panel = small_panel().without(multiallelic=True, haploid=True)
    path = write_panel(panel, tmp_path, "pgen")
    expected = open_variants(path).var()
    records = zip(panel.chrom, panel.pos, panel.ids, panel.alleles, strict=True)
    path.with_suffix(".bim").write_text("".join(f"{c} {i} 0 {p} {a[1]} {a[0]}\n" for c, p, i, a in records))
    path.with_suffix(".fam").write_text("".join(f"0 {i} 0 0 0 -9\n" for i in IDS))
    path.with_suffix(".pvar").unlink()
    path.with_suffix(".psam").unlink()
    reader = open_variants(path)
    pd.testing.assert_frame_equal(reader.var().astype(str), expected.astype(str))
    np.testing.assert_array_equal(
        as_float(reader.read_block(np.arange(len(expected)), ALL).values.T), panel.expected(expected)
    )


def test_ids_of_a_sample_file(tmp_path: Path) -> None:
    import bgen

    with bgen.BgenWriter(tmp_path / "p.bgen", 2) as file:
        file.add_variant("v", "rs1", "1", 9, ["A", "G"], np.eye(3)[:2])
    (tmp_path / "p.sample").write_text("ID_1 ID_2 missing\n0 0 0\nfamily one 0\nfamily two 0\n")
    assert open_variants(tmp_path / "p.bgen").ids.tolist() == ["one", "two"]


def test_a_bgzipped_vcf(tmp_path: Path) -> None:
    panel = small_panel()
    path = _write_bcf(panel, tmp_path, mode="wz")
    reader = open_variants(path)
    values = reader.read_block(np.arange(reader.n_variants), ALL).values
    np.testing.assert_array_equal(as_float(values.T), panel.expected(reader.var()))
    reader.close()
    path.write_bytes(path.read_bytes()[:-28])
    with pytest.raises(ValueError, match=r"panel\.vcf\.gz.*cut off"):
        open_variants(path)


@pytest.mark.parametrize("kind", ["bed", "pgen"])
def test_families(tmp_path: Path, kind: str) -> None:
    path = write_panel(small_panel().without(**DIPLOID[kind]), tmp_path, kind)
    reader = open_variants(path, id_by="fid_iid")
    assert reader.ids.tolist() == [f"{fid}_{iid}" for fid, iid in zip(FIDS, IDS, strict=True)]
    table = reader.obs()
    sexes = {0: None, 1: "male", 2: "female"}
    assert [s if isinstance(s, str) else None for s in table["sex"]] == [sexes[i % 3] for i in range(len(IDS))]
    phenotype = [float(30 + i) for i in range(len(IDS))] if kind == "pgen" else [[np.nan, 1, 2][i % 3] for i in ALL]
    np.testing.assert_array_equal(table["phenotype"], phenotype)


def test_notes(panels: dict[str, tuple[SmallPanel, Path]], tmp_path: Path) -> None:
    reader = open_variants(panels["vcf"][1])
    with turn(reader, tmp_path, maf=0.1, max_missing=0.2, regions=["1", "2", "X", "X:1-5", "2:1"]) as rows:
        text = "\n".join(rows.notes)
    assert "2 records with several ALT alleles became one variant per ALT allele" in text
    assert "'rs12', 'rs33'" in text
    assert "5 variants have calls of one copy, which count 0 or 1 (chromosome X)" in text
    assert "2 of 5 regions hold no variant: 'X:1-5', '2:1'" in text
    assert f"Of {N_RECORDS + 2} variants read, " in text
    assert "with more than 0.2 of the calls missing" in text
    assert "with a minor allele frequency below 0.1 were left out" in text
    assert "(chromosome X)" in "\n".join(open_variants(panels["pgen"][1]).notes)
    assert open_variants(panels["bed"][1]).notes == []


@pytest.mark.parametrize("kind", ["bed", "pgen"])
def test_tables_as_other_writers_leave_them(
    panels: dict[str, tuple[SmallPanel, Path]], tmp_path: Path, kind: str
) -> None:
    """With a byte order mark, lines of comments and empty ones before the table, and ends of lines of Windows."""
    plain = panels[kind][1]
    expected = open_variants(plain)
    for suffix in (".bed", ".bim", ".fam") if kind == "bed" else (".pgen", ".pvar", ".psam"):
        data = plain.with_suffix(suffix).read_bytes()
        if suffix not in (".bed", ".pgen"):
            before = "\n##of another writer\n" if kind == "pgen" else "\n"
            data = b"\xef\xbb\xbf" + before.encode() + data
            data = data.replace(b"\n", b"\r\n")
        (tmp_path / f"panel{suffix}").write_bytes(data)
    reader = open_variants(tmp_path / f"panel.{kind}")
    assert reader.ids.tolist() == IDS
    pd.testing.assert_frame_equal(reader.var(), expected.var())
    pd.testing.assert_frame_equal(reader.obs(), expected.obs())
    expected.close()
    reader.close()
