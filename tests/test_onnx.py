"""The cases by which ONNX defines its operator Attention (opset 23, 24, 25), on every backend.

The data are those of ``onnx.backend.test.case.node.attention``, made in memory; no model is run. Every case
comes twice there: as a node, and, named ``..._expanded``, as the graph of simpler operators that a runtime
may put in the node's place. For a library that has no graph the two are one call with the same inputs and
outputs. So the nodes are run, and a test sees that each expanded case has a node with the same data.

Every output that a case asks for is compared, with the tolerances of ONNX's own runner.
"""

from __future__ import annotations

import collections
import importlib
from typing import Any, NamedTuple

import numpy as np
import onnx_adapter
import pytest

onnx = pytest.importorskip("onnx", minversion="1.23", reason="ONNX's own cases need onnx>=1.23")

#: Opset -> number of cases; as many expanded ones come with them. Other releases may have more.
CASES_PER_OPSET = {23: 69, 24: 13, 25: 11}

EXPANDED = "_expanded"

#: ONNX compares results of this type with two units in the last place.
RTOL_BFLOAT16 = 2.0**-6


class Case(NamedTuple):
    """A node with its data; inputs and outputs by their names in the operator's description."""

    name: str
    opset: int
    attributes: dict[str, Any]
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    rtol: float
    atol: float


def collected() -> dict[str, Any]:
    """ONNX's test cases of Attention by name, nodes and expanded ones.

    ``collect_testcases("Attention")`` would make the data of all operators first, and throw them away.
    """
    importlib.import_module("onnx.backend.test.case.node.attention")
    registry = importlib.import_module("onnx.backend.test.case.node")._NodeTestCases
    return {case.name: case for case in registry if case.name.startswith("test_attention")}


def opset(case: Any) -> int:
    """The version of the standard operators that a case is about."""
    [version] = [entry.version for entry in case.model.opset_import if entry.domain in ("", "ai.onnx")]
    return version


def by_name(names: tuple[str, ...], used: Any, arrays: Any) -> dict[str, np.ndarray]:
    """Arrays by the operator's names; a node calls what it leaves out an empty string."""
    present = [name for name, own_name in zip(names, used, strict=False) if own_name]
    return dict(zip(present, arrays, strict=True))


def read(case: Any) -> Case:
    """Take a node's test case apart."""
    [node] = case.model.graph.node
    assert node.op_type == "Attention"
    [(inputs, outputs)] = case.data_sets
    return Case(
        case.name,
        opset(case),
        {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute},
        by_name(onnx_adapter.INPUTS, node.input, inputs),
        by_name(onnx_adapter.OUTPUTS, node.output, outputs),
        case.rtol,
        case.atol,
    )


COLLECTED = collected()
CASES = [read(case) for name, case in COLLECTED.items() if EXPANDED not in name]


def assert_similar(got: np.ndarray, want: np.ndarray, case: Case, what: str, backend: Any) -> None:
    """Compare an output as ONNX's runner does."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    rtol = case.rtol
    if want.dtype == np.float16 and backend.name == "cuda":
        rtol = max(rtol, 2.0**-9)  # weights are rounded to the type of q, as a matrix unit multiplies them
    if want.dtype.name == "bfloat16":
        rtol = max(rtol, RTOL_BFLOAT16)
        got, want = got.astype(np.float32), want.astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=case.atol, err_msg=what)


@pytest.mark.parametrize("case", CASES, ids=[f"{case.opset}-{case.name}" for case in CASES])
def test_attention(backend, case):
    got = onnx_adapter.evaluate(case.attributes, case.inputs, case.outputs.keys(), backend)
    for name, want in case.outputs.items():
        assert_similar(got[name], want, case, name, backend)


def test_no_case_is_missing():
    counts = collections.Counter(case.opset for case in CASES)
    for version, count in CASES_PER_OPSET.items():
        assert counts[version] >= count, f"opset {version}: {counts[version]} cases instead of {count}"


def test_expanded_cases_hold_the_same_data():
    """What is collected and not run: exactly one expanded case for each that is run."""
    expanded = {name: case for name, case in COLLECTED.items() if EXPANDED in name}
    assert expanded.keys() == {case.name + EXPANDED for case in CASES}
    for name, case in expanded.items():
        original = COLLECTED[name.removesuffix(EXPANDED)]
        assert opset(case) == opset(original)
        for ours, theirs in zip(original.data_sets[0], case.data_sets[0], strict=True):
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(one, other, strict=True)
