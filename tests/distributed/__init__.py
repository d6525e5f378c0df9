"""Tests that run between processes, by MPI."""
