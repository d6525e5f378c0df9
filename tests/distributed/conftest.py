"""Tests here run under MPI alone, and all ranks run each of them together."""

from __future__ import annotations

import faulthandler

import pytest

#: A test that takes longer hangs: the rank says where and dies, and with it the job.
SECONDS = 120


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Let a test that fails on one rank fail on all of them; otherwise the next would begin out of step."""
    if "comm" not in pyfuncitem.fixturenames:
        return (yield)
    comm = pyfuncitem.funcargs["comm"]
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    error = None
    try:
        result = yield
    except BaseException as caught:
        error = caught
    failed = [rank for rank, it in enumerate(comm.allgather(error is not None)) if it]
    faulthandler.cancel_dump_traceback_later()
    if error is not None:
        raise error
    assert not failed, f"failed on ranks {failed}"
    return result


@pytest.fixture
def comm():
    """The communicator of all ranks."""
    mpi = pytest.importorskip("mpi4py.MPI")
    return mpi.COMM_WORLD
