"""Jobs that end badly end: the launcher is a child of this process. `make test-mpi` runs this by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

if "PYFLASH_TEST_MPI" not in os.environ:
    pytest.skip("run between processes, by make test-mpi", allow_module_level=True)

SECONDS = 60
MPIEXEC = Path(sys.executable).parent / "mpiexec"

JOB = """
import os, signal
import numpy as np
from mpi4py import MPI
from pyflash.distributed import _ring, ring_attention

comm = MPI.COMM_WORLD
attend = _ring.Steps.attend

def dying(self, held):
    if comm.rank == 1 and held.rank == 0:
        {death}
    return attend(self, held)

_ring.Steps.attend = dying
q = np.ones((1, 64, 2, 8), np.float32)
ring_attention(q, q, q, comm=comm)
print("not reached")
"""


def run(text: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "job.py"
    script.write_text(text)
    command = [str(MPIEXEC), "-n", "3", sys.executable, "-m", "mpi4py", str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.parametrize("death", ["os.kill(os.getpid(), signal.SIGKILL)", "os.abort()", "os._exit(3)"])
def test_a_rank_that_dies_ends_the_job(death, tmp_path):
    begin = time.monotonic()
    job = run(JOB.format(death=death), tmp_path)
    assert time.monotonic() - begin < SECONDS / 2
    assert job.returncode != 0 and "not reached" not in job.stdout
    if "_exit" not in death:  # of a process that ends by itself, without a word, MPICH says none either
        assert "BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES" in job.stdout + job.stderr


def test_an_error_ends_the_job_with_its_message_on_all_ranks(tmp_path):
    job = run(JOB.format(death='raise MemoryError("no scratch")'), tmp_path)
    assert job.returncode != 0 and "not reached" not in job.stdout
    assert "MemoryError: no scratch (on rank 1)" in job.stderr
