"""Makes .venv: donorloader, editable, with every extra, at the versions of constraints.txt. Run through setup.sh.

A stamp in .venv says what it was made from. The same inputs: nothing is done. No stamp: an earlier set-up was cut
short, so .venv is made anew. A lock makes a second call at the same time wait for the first. `--check` only says, by
its exit status, whether .venv is up to date.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "donorloader-setup"
INPUTS = (ROOT / "pyproject.toml", ROOT / "constraints.txt")


def stamp() -> str:
    """What .venv is made from. The folder counts: an editable install and its commands hold its path."""
    inputs = b"".join(path.read_bytes() for path in INPUTS)
    return f"{ROOT}\n{hashlib.sha256(inputs).hexdigest()}\n"


def found_stamp() -> str:
    """What the .venv that is there was made from; empty where no earlier set-up finished."""
    return STAMP.read_text() if VENV_PYTHON.exists() and STAMP.is_file() else ""


def commands() -> tuple[list[str], list[str]]:
    """The commands that make .venv and that fill it: uv's where uv is on PATH, else pip's."""
    wanted = ["--constraint", "constraints.txt", "--editable", ".[dev]"]
    if uv := shutil.which("uv"):
        make = [uv, "venv", "--quiet", "--seed", "--no-project", "--python", sys.executable, str(VENV)]
        fill = [uv, "pip", "install", "--python", str(VENV_PYTHON), *wanted]
    else:
        make = [sys.executable, "-m", "venv", str(VENV)]
        pip = [str(VENV_PYTHON), "-m", "pip"]
        if importlib.util.find_spec("ensurepip") is None:  # some systems cut it off: use the pip beside this Python
            make.insert(3, "--without-pip")
            pip = [sys.executable, "-m", "pip", "--python", str(VENV_PYTHON)]
        fill = [*pip, "install", "--disable-pip-version-check", *wanted]
    return make, fill


def set_up(lock: int) -> None:
    make, fill = commands()
    steps = [fill]
    if not found_stamp().startswith(f"{ROOT}\n"):
        if VENV.exists():
            print("setup: .venv is not one that an earlier set-up here finished: making it anew", flush=True)
            shutil.rmtree(VENV)
        steps = [make, fill]
    STAMP.unlink(missing_ok=True)
    print("setup: installing into .venv; the first time this takes some minutes and about 6 GB", flush=True)
    for step in steps:
        # They hold the lock too: killing this process alone must not let another set-up in beside them.
        subprocess.run(step, cwd=ROOT, check=True, pass_fds=[lock])
    STAMP.write_text(stamp())
    print("setup: done", flush=True)


def main() -> int:
    if "--check" in sys.argv:
        return found_stamp() != stamp()
    # The lock is on a file that is there anyway, and never written; it ends with the last process that holds it.
    with open(ROOT / "constraints.txt", "r+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: waiting for another set-up of this folder", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if found_stamp() != stamp():
            try:
                set_up(lock.fileno())
            except subprocess.CalledProcessError as error:
                print(f"setup: this command failed: {' '.join(error.cmd)}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                print("setup: cut short; run it again to begin anew", file=sys.stderr)
                return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
