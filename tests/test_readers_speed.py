"""Preparing a thousand donors × a million variants, against bed-reader reading the same file once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parent.parent


def test_a_million_variants(tmp_path: Path) -> None:
    """As the benchmark `prepare` measures it."""
    call = [sys.executable, "-m", "benchmarks.preparing", "1000000", "3"]
    environment = os.environ | {"DONORLOADER_BENCH_DIR": str(tmp_path)}
    done = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    seen = json.loads(done.stdout.splitlines()[-1])
    ours, theirs, peak = median(seen["ours_s"]), median(seen["theirs_s"]), seen["peak_mb"]
    print(f"prepare {ours:.1f} s, bed-reader {theirs:.1f} s, peak {peak:,.0f} MB")
    assert peak < 1.5 * 2**30 / 1e6
    assert ours <= 2 * theirs
