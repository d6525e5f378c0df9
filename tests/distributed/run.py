"""One rank of the tests under MPI: ``mpiexec -n 3 python -m mpi4py tests/distributed/run.py -k name``.

With ``PYFLASH_TEST_GPUS=1`` each rank has a GPU of its own, and arrays travel by NCCL.
Rank 0 prints; what the others have to say is shown only where they fail.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

HERE = Path(__file__).parent


def main() -> int:
    os.environ["PYFLASH_TEST_MPI"] = "1"
    sys.path.insert(0, str(HERE.parent))
    arguments = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"--rootdir={HERE.parents[1]}",
        *sys.argv[1:],
    ]
    arguments.append(str(HERE / ("test_gpus.py" if "PYFLASH_TEST_GPUS" in os.environ else "test_ranks.py")))
    if MPI.COMM_WORLD.rank == 0:
        return int(pytest.main(arguments))
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = int(pytest.main(arguments))
    if code:
        print(f"rank {MPI.COMM_WORLD.rank}:\n{text.getvalue()}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
