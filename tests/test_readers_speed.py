"""Preparing a thousand donors × a million variants, against bed-reader reading the same file once."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

N_DONORS, N_VARIANTS = 1000, 1_000_000

MEASURE = """
    import json, resource, statistics, sys, time
    from pathlib import Path
    import anndata as ad, numpy as np, pandas as pd
    from bed_reader import open_bed, to_bed
    import donorloader as dl

    bed, folder = Path(sys.argv[1]), Path(sys.argv[2])
    cells = ad.AnnData(np.ones((2, 2), np.float32), obs=pd.DataFrame({"donor_id": ["d1", "d2"]}, index=["a", "b"]))
    small = folder / "small.bed"  # so that what is compiled at its first use is compiled
    to_bed(small, np.zeros((40, 40), np.int8), properties={"iid": [f"d{i}" for i in range(40)]})
    dl.prepare(cells, small, out=folder / "warm")
    ours, theirs, peak = [], [], None
    for _ in range(3):
        start = time.perf_counter()
        dl.prepare(cells, bed, out=folder / "study", overwrite=True)
        ours.append(time.perf_counter() - start)
        peak = peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        start = time.perf_counter()
        with open_bed(bed) as file:
            file.read(dtype="int8")
        theirs.append(time.perf_counter() - start)
    print(json.dumps({"ours": statistics.median(ours), "theirs": statistics.median(theirs), "peak": peak}))
"""


def write_bed(bed: Path) -> None:
    rng = np.random.default_rng(0)
    with bed.open("wb") as file:
        file.write(b"\x6c\x1b\x01")
        for _ in range(0, N_VARIANTS, 50_000):
            file.write(rng.integers(0, 256, (50_000, N_DONORS // 4), dtype=np.uint8).tobytes())
    bed.with_suffix(".fam").write_text("".join(f"0 d{i} 0 0 0 -9\n" for i in range(N_DONORS)))
    alleles = ["A\tG", "C\tT", "G\tA", "T\tC"]
    bed.with_suffix(".bim").write_text(
        "".join(f"{1 + i * 22 // N_VARIANTS}\trs{i}\t0\t{i + 1}\t{alleles[i % 4]}\n" for i in range(N_VARIANTS))
    )


def test_a_million_variants(tmp_path: Path) -> None:
    write_bed(tmp_path / "big.bed")
    call = [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path / "big.bed"), str(tmp_path)]
    measured = json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    print(
        f"prepare {measured['ours']:.1f} s, bed-reader {measured['theirs']:.1f} s, "
        f"peak {measured['peak'] / 2**30:.2f} GB"
    )
    assert measured["peak"] < 1.5 * 2**30
    assert measured["ours"] <= 2 * measured["theirs"]
