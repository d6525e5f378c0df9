"""Compute the coefficients of the polynomials in c_src/kernels/exp2.h and c_src/kernels/amx.h.

Minimises the largest relative error of ``1 + c1 f + ... + cn f^n`` against ``2^f`` on
[-1/2, 1/2], by Lawson's reweighted least squares on Chebyshev nodes, in 50-digit arithmetic.
The constant is held at exactly 1, so that 2^0 is 1 and a rescaling by 2^0 changes nothing.
A degree with an ``m`` behind it is for ``2^f - 1`` without the constant, its error relative to that:
what tanh needs near 0. One with a ``u`` is for the interval [0, 1], what is left above an integer.

    python tools/exp2_polynomial.py [degree ...]      (needs mpmath)
"""

import sys

import mpmath as mp


def fit(
    degree: int, minus_one: bool, middle: mp.mpf, nodes: int = 200, rounds: int = 60
) -> tuple[list[mp.mpf], mp.mpf]:
    """Return the coefficients c1..cn on [middle - 1/2, middle + 1/2] and the largest relative error."""
    points = [middle + mp.cos(mp.pi * (i + mp.mpf(1) / 2) / nodes) / 2 for i in range(nodes)]
    target = [mp.mpf(2) ** f for f in points]
    unit = [t - 1 if minus_one else t for t in target]
    weights = [mp.mpf(1) / nodes] * nodes
    coefficients: list[mp.mpf] = []
    for _ in range(rounds):
        rows = mp.matrix(degree, degree)
        right = mp.matrix(degree, 1)
        for f, t, u, w in zip(points, target, unit, weights, strict=True):
            basis = [f**k / u for k in range(1, degree + 1)]
            residual = (t - 1) / u
            for a in range(degree):
                right[a] += w * basis[a] * residual
                for b in range(degree):
                    rows[a, b] += w * basis[a] * basis[b]
        coefficients = list(mp.lu_solve(rows, right))
        errors = [
            abs((1 + sum(c * f ** (k + 1) for k, c in enumerate(coefficients)) - t) / u)
            for f, t, u in zip(points, target, unit, strict=True)
        ]
        weights = [w * e for w, e in zip(weights, errors, strict=True)]
        total = sum(weights)
        weights = [w / total for w in weights]
    return coefficients, max(errors)


if __name__ == "__main__":
    mp.mp.dps = 50
    for degree in sys.argv[1:] or ["5", "5u", "6m", "11"]:
        coefficients, error = fit(
            int(degree.rstrip("mu")), degree.endswith("m"), mp.mpf(degree.endswith("u")) / 2
        )
        print(f"degree {degree}: relative error {mp.nstr(error, 3)}")
        for k, c in enumerate(coefficients, 1):
            print(f"  c{k} = {float(c).hex()}  {mp.nstr(c, 20)}")
