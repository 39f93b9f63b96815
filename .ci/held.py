"""Do the distributions hold what they should? python .ci/held.py FOLDER, with one .tar.gz and one
.whl in it.

The source distribution has to hold every file under version control, the wheel every file below
npt/ except the embedded model, which is 7 MB.
"""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

MODEL = "npt/demo/tiny/"
MOST_BYTES = 665_000


def main(folder: Path) -> int:
    (archive,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    tracked = set(
        subprocess.run(
            ["git", "ls-files"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    )
    with tarfile.open(archive) as opened:
        source = {
            member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()
        }
    with zipfile.ZipFile(wheel) as opened:
        installed = set(opened.namelist())
    lost = [f"{archive.name} lacks {path}" for path in sorted(tracked - source)]
    lost += [
        f"{wheel.name} lacks {path}"
        for path in sorted(tracked - installed)
        if path.startswith("npt/") and not path.startswith(MODEL)
    ]
    if (size := wheel.stat().st_size) > MOST_BYTES:
        lost.append(f"{wheel.name} has {size:,} bytes, more than {MOST_BYTES:,}")
    strange = sorted(
        path
        for path in installed
        if path.startswith(MODEL) or (not path.startswith("npt/") and ".dist-info/" not in path)
    )
    lost += [f"{wheel.name} installs {path}" for path in strange]
    print(
        "\n".join(lost)
        if lost
        else f"{archive.name} holds {len(source)} files, {wheel.name} {len(installed)}"
    )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
