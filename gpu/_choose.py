"""Which kernel computes a call: the modules that plan are asked in turn; the first that takes it says how.

The generic kernel takes everything.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import _decode, _forward_fma, _forward_mma, _forward_wgmma, _operations, _plan
from ._plan import Plan, Problem, Step, Variant


def plan(problem: Problem) -> Plan:
    """Return how a problem is computed."""
    found = _plan_of(problem)
    return found._replace(steps=_plan.for_call(problem, found.steps))


def _plan_of(problem: Problem) -> Plan:
    if len(_plan.families_of(problem)) > 1:
        return _mixed(problem)
    for module in () if problem.wide_scores else (_decode, _forward_wgmma, _forward_mma, _forward_fma):
        found: Plan | None = module.plan(problem)
        if found is not None:
            return found
    return _plan.generic(problem)


def _mixed(problem: Problem) -> Plan:
    """Return the plan of a call with sequences of both families: each kernel leaves the others alone."""
    kernel, tile, rows, steps = _prefill(problem)
    found = None if problem.wide_scores else _decode.decode_steps(problem)
    if found is None:
        small, name = _plan.generic_steps(problem, "decode"), "generic"
    else:
        small, name = found, "decode_mma"
    return Plan(
        f"{kernel}+{name}", "prefill+decode", (*steps, *small), tile, rows, small[0].splits,
        (
            f"kernel: {kernel} for sequences of many rows, {name} for those of few",
            f"splits: {steps[0].splits.max_splits} of many rows, {small[0].splits.max_splits} of few",
        ),
    )  # fmt: skip


def _prefill(problem: Problem) -> tuple[str, int, int, tuple[Step, ...]]:
    """Return (kernel, keys of a tile, rows of a block, launches) for the sequences of many rows."""
    for module, kernel in (
        (_forward_wgmma, "forward_wgmma"),
        (_forward_mma, "forward_mma"),
        (_forward_fma, "forward_fma"),
    ):
        if not problem.wide_scores and module.takes(problem):
            step = module.prefill_step(problem)
            return kernel, *module.tile_of(problem), _plan.with_merge(problem, step, "prefill")
    return "generic", _plan.GENERIC_TILE, _plan.GENERIC_WARPS, _plan.generic_steps(problem, "prefill")


def variants() -> Iterator[Variant]:
    """Yield every kernel that may be compiled, but for expressions of callers."""
    for module in (_plan, _decode, _forward_wgmma, _forward_mma, _forward_fma, _operations):
        yield from module.variants()
