"""`pyflash simulate`: the page holds what `trace` returns, to the bit, and says what it cannot show.

What the page does with it in a browser is tested in ``tests/browser``.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import webbrowser
import zipfile

import numpy as np
import pytest
from simulated import Page, expected_trace

import pyflash
from pyflash import simulate
from pyflash.__main__ import main
from pyflash.simulate import _data


@pytest.fixture(scope="module")
def default_page():
    inputs = simulate.random_inputs(0)
    return Page(simulate.page(inputs), inputs)


@pytest.fixture(scope="module")
def small_page():
    """Of float16 arrays whose counts are no powers of two."""
    rng = np.random.default_rng(5)
    inputs = simulate.Inputs(
        *(rng.standard_normal(shape).astype(np.float16) for shape in ((3, 5), (7, 5), (7, 2))), "x"
    )
    return Page(simulate.page(inputs), inputs)


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


def arrays(queries=3, keys=5, head_dim=4, head_dim_v=2, dtype=np.float64):
    rng = np.random.default_rng(1)
    shapes = {"q": (queries, head_dim), "k": (keys, head_dim), "v": (keys, head_dim_v)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


# --- the data ---


def test_every_position_of_the_controls_has_its_trace(small_page):
    """All of them, each against a call of `trace` that is put together here."""
    seen = set()
    for view in ("tiles", "pages", "decoding"):
        for n in range(1, 8):
            largest = -(-n // 4) if view == "decoding" else n
            for tile in range(1, largest + 1):
                for causal in (False, True):
                    for masked, guard in ((False, True), (True, True), (True, False)):
                        seen.add(small_page.check(view, n, tile, causal, masked, guard))
    assert seen == set(small_page.data["runs"])


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("view", "num_keys", "tile"), [("tiles", 16, 4), ("pages", 15, 3), ("decoding", 13, 2), ("tiles", 16, 16)]
)
def test_default_page(default_page, view, num_keys, tile, causal, guard):
    default_page.check(view, num_keys, tile, causal, masked=True, guard=guard)


def test_pages_do_not_change_a_bit(default_page):
    """The page says so: both views show the same trace, and the pages beside it are those of `trace`."""
    runs = default_page.data["runs"]
    paged = [name for name in runs if name.startswith("pages/")]
    assert paged
    for name in paged:
        assert runs[name] == runs[name.replace("pages/", "tiles/")]
    for name, pages in default_page.data["pages"].items():
        n, tile = map(int, name.split("/"))
        trace = expected_trace(default_page.inputs, default_page.data, "pages", n, tile)
        assert [tuple(step) for step in pages] == [step.pages for step in trace.steps]


def test_what_the_masked_tile_shows(default_page):
    """The later half of the queries sees nothing of the first tile: NaN for good without the guard."""
    guarded, unguarded = (
        expected_trace(default_page.inputs, default_page.data, "tiles", 16, 4, masked=True, guard=guard)
        for guard in (True, False)
    )
    np.testing.assert_array_equal(
        np.isneginf(guarded.steps[0].scores).all(axis=1), [False, False, True, True]
    )
    assert guarded.error < 1e-15
    for step in unguarded.steps:
        np.testing.assert_array_equal(np.isnan(step.out).all(axis=1), [False, False, True, True])


def test_numbers_are_stored_once(default_page):
    count = len(base64.b64decode(default_page.data["numbers"])) // 8
    assert count == len(default_page.numbers) < 200_000
    assert len(default_page.text) < 2_000_000


def test_equal_seeds_give_equal_pages():
    """Not across machines: the last bits are those of NumPy's matrix product."""
    one, same, other = (simulate.random_inputs(seed) for seed in (3, 3, 4))
    for a, b, c in zip(one[:3], same[:3], other[:3], strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, c)
    few = one._replace(k=one.k[:4], v=one.v[:4])
    assert simulate.page(few) == simulate.page(few)


def test_one_query_one_key():
    inputs = simulate.Inputs(np.ones((1, 1)), np.ones((1, 1)), np.full((1, 1), 2.0), "x")
    page = Page(simulate.page(inputs), inputs)
    for view in ("tiles", "pages", "decoding"):
        page.check(view, 1, 1, causal=True, masked=False, guard=True)
        page.check(view, 1, 1, causal=False, masked=True, guard=False)


# --- the page ---


def test_page_is_self_contained(default_page):
    """No address of a network, and a policy that would stop one."""
    text = default_page.text
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|\burl\(|\bfetch\(|XMLHttpRequest|WebSocket", text)
    assert set(re.findall(r"\b(?:src|href)=\"([^\"]*)\"", text)) == {"data:,", "#stage"}
    assert "@@" not in text


def test_page_has_every_source(default_page):
    from importlib import resources

    from pyflash.simulate import _page

    folder = resources.files("pyflash.simulate").joinpath("page")
    names = {entry.name for entry in folder.iterdir()}
    assert names == {"page.html", "questions.json", *_page.STYLES, *_page.SCRIPTS}
    for name in (*_page.STYLES, *_page.SCRIPTS):
        assert folder.joinpath(name).read_text(encoding="utf-8") in default_page.text


def test_page_sources_are_short():
    from importlib import resources

    for entry in resources.files("pyflash.simulate").joinpath("page").iterdir():
        assert len(entry.read_text(encoding="utf-8").splitlines()) <= 500, entry.name


def test_a_file_name_cannot_end_the_data():
    inputs = simulate.Inputs(*arrays().values(), source="</script><b>&.npz")
    page = Page(simulate.page(inputs), inputs)
    assert page.data["source"] == inputs.source
    assert "</script><b>" not in page.text


def test_questions(small_page):
    pattern = r'<script type="application/json" id="questions">(.*?)</script>'
    (text,) = re.findall(pattern, small_page.text, re.DOTALL)
    questions = json.loads(text)
    assert len(questions) == 7
    for question in questions:
        assert sum(option.get("right", False) for option in question["options"]) == 1
        assert all(option["text"] and len(option["why"]) > 40 for option in question["options"])
        controls = {"ranks", "schedule"} if question["show"]["view"] == "ring" else {"tile", "masked"}
        assert set(question["show"]) == {"view", "causal", "step", *controls}


# --- arrays ---


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_arrays_of_a_file(tmp_path, dtype):
    given = arrays(dtype=dtype)
    inputs = simulate.inputs_of_file(save(tmp_path / "a.npz", **given, more=np.zeros(3)))
    for name, array in given.items():
        np.testing.assert_array_equal(getattr(inputs, name), array)
        assert getattr(inputs, name).dtype == dtype
    assert inputs.source == "a.npz"


def test_the_largest_arrays_are_taken(tmp_path):
    given = arrays(queries=simulate.MAX_QUERIES, keys=simulate.MAX_KEYS, head_dim_v=simulate.MAX_HEAD_DIM_V)
    assert len(simulate.inputs_of_file(save(tmp_path / "a.npz", **given)).k) == 24


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": None}, r"npz: found .*a\.npz with k, v, expected an .npz file with arrays q, k and v: no q"),
        (
            {"q": None, "k": None, "v": None},
            r"with nothing, expected an .npz file with arrays q, k and v: no q, k, v",
        ),
        ({"q": np.zeros(4)}, r"q: found shape \(4,\), expected shape \(seqlen, head_dim\)"),
        ({"q": np.zeros((9, 4))}, r"q: found 9 queries, expected 1 to 8: a page holds every trace of them"),
        ({"q": np.zeros((0, 4))}, r"q: found 0 queries, expected 1 to 8"),
        ({"q": np.zeros((3, 4), int)}, r"q: found dtype int64, expected one of float64, "),
        ({"q": np.full((3, 4), np.nan)}, r"q: found NaN or infinity \(float64\), expected finite numbers"),
        (
            {"q": np.array([[None]])},
            r"npz: found .*, expected an .npz file with arrays q, k and v \(Object arrays cannot be loaded",
        ),
        ({"k": np.zeros((25, 4)), "v": np.zeros((25, 2))}, r"k: found 25 keys, expected 1 to 24"),
        ({"k": np.zeros((0, 4)), "v": np.zeros((0, 2))}, r"k: found 0 keys, expected 1 to 24"),
        (
            {"k": np.zeros((5, 3))},
            r"k: found shape \(5, 3\), expected \(seqlen_kv, head_dim\), .* q, \(3, 4\)",
        ),
        ({"q": np.zeros((3, 0)), "k": np.zeros((5, 0))}, r"k: found shape \(5, 0\)"),
        ({"v": np.zeros((5, 2), np.float32)}, r"v: found dtype float32, expected float64, the dtype of k"),
        ({"v": np.zeros((4, 2))}, r"v: found shape \(4, 2\), expected .* the 5 keys of k"),
        ({"v": np.zeros((5, 9))}, r"v: found 9 columns, expected 1 to 8"),
        ({"q": np.full((3, 4), 1e300), "k": np.full((5, 4), 1e300)}, r"npz: found scores that overflow"),
    ],
)
def test_bad_arrays(tmp_path, capsys, changes, message):
    given = {name: array for name, array in {**arrays(), **changes}.items() if array is not None}
    output = tmp_path / "page.html"
    path = save(tmp_path / "a.npz", **given)
    assert main(["simulate", "--npz", str(path), "--output", str(output), "--no-open"]) == 2
    error = capsys.readouterr().err
    assert re.match(f"pyflash: .*{message}", error) and error.count("\n") == 1
    assert not output.exists()


def test_bad_files(tmp_path, capsys):
    def refused(path):
        assert main(["simulate", "--npz", str(path), "--no-open", "--output", str(tmp_path / "x.html")]) == 2
        error = capsys.readouterr().err
        assert error.startswith("pyflash: npz: found ") and error.count("\n") == 1
        return error

    assert "No such file" in refused(tmp_path / "none.npz")
    assert "a file that can be read" in refused(tmp_path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    assert "a single array" in refused(tmp_path / "one.npy")
    for content in (b"", b"PK\x03\x04 broken", b"text"):
        (tmp_path / "broken.npz").write_bytes(content)
        assert "expected an .npz file with arrays q, k and v (" in refused(tmp_path / "broken.npz")
    np.savez_compressed(tmp_path / "a.npz", **arrays())
    whole = (tmp_path / "a.npz").read_bytes()
    damaged = whole.index(b"PK\x01\x02") - 20  # in the numbers of the last array
    for place, byte in ((6, 1), (8, 99), (damaged, whole[damaged] ^ 255)):  # encrypted, packed strangely
        (tmp_path / "broken.npz").write_bytes(_changed(whole, place, byte))
        refused(tmp_path / "broken.npz")
    told = {"descr": "<f8", "fortran_order": False, "shape": (10**13, 8)}
    header = b"\x93NUMPY\x01\x00\x76\x00" + repr(told).encode()
    with zipfile.ZipFile(tmp_path / "broken.npz", "w") as file:
        for name in "qkv":
            file.writestr(f"{name}.npy", header.ljust(127) + b"\n")
    refused(tmp_path / "broken.npz")


def _changed(content, place, byte):
    """Change a byte of an archive; one of the first file's header also in the directory."""
    found = bytearray(content)
    found[place] = byte
    if place < 30:
        found[content.index(b"PK\x01\x02") + place + 2] = byte
    return bytes(found)


def test_a_failure_leaves_the_page_that_is_there(tmp_path, capsys, monkeypatch):
    path, page = save(tmp_path / "a.npz", **arrays()), tmp_path / "p.html"
    page.write_text("kept")
    link = tmp_path / "link.html"
    link.symlink_to(page)

    def full(self, content):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_bytes", full)
        assert main(["simulate", "--npz", str(path), "--no-open", "--output", str(page)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert page.read_text() == "kept"
    assert main(["simulate", "--npz", str(path), "--no-open", "--output", str(link)]) == 0
    assert link.is_symlink() and page.read_bytes().startswith(b"<!doctype html>")
    assert {x.name for x in tmp_path.iterdir()} == {"a.npz", "p.html", "link.html"}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names are text")
def test_a_name_that_is_no_text(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff.npz")
    save(path, **arrays())
    page = tmp_path / "p.html"
    assert main(["simulate", "--npz", str(path), "--no-open", "--output", str(page)]) == 0
    assert "?.npz" in page.read_text(encoding="utf-8")


# --- the command ---


def test_command(tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: bool(opened.append(url)) or True)
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "--npz", str(save(tmp_path / "a.npz", **arrays()))]) == 0
    page = tmp_path / "pyflash-simulator.html"
    assert opened == [page.as_uri()]
    written = capsys.readouterr()
    assert re.fullmatch(r"pyflash-simulator\.html: 0\.\d MB, a\.npz, 3 queries, 5 keys\n", written.out)
    assert written.err == ""
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_no_browser_is_a_line_not_an_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    page = tmp_path / "p.html"
    path = save(tmp_path / "a.npz", **arrays())
    assert main(["simulate", "--npz", str(path), "--output", str(page)]) == 0
    assert capsys.readouterr().err == f"pyflash: found no browser to open {page} with: open it yourself\n"


def test_no_open(tmp_path, monkeypatch):
    monkeypatch.setattr(webbrowser, "open", lambda url: pytest.fail("opened"))
    path = save(tmp_path / "a.npz", **arrays())
    assert main(["simulate", "--npz", str(path), "--output", str(tmp_path / "p.html"), "--no-open"]) == 0


@pytest.mark.parametrize("output", ["", "none/page.html", "."])
def test_bad_output_is_found_before_the_work(tmp_path, capsys, monkeypatch, output):
    monkeypatch.setattr(_data, "run", lambda *_: pytest.fail("traced"))
    assert main(["simulate", "--no-open", "--output", str(tmp_path / output)]) == 2
    assert re.match(
        r"pyflash: output: found .*, expected a file name in a folder that exists\n", capsys.readouterr().err
    )


def test_output_that_cannot_be_written(tmp_path, capsys):
    path = save(tmp_path / "a.npz", **arrays())
    output = "/dev/full" if sys.platform == "linux" else str(tmp_path / ("x" * 300))
    assert main(["simulate", "--npz", str(path), "--no-open", "--output", output]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pyflash: output: found {output}, expected a file that can be written (")


def test_seed(tmp_path, capsys):
    assert main(["simulate", "--seed", "-1", "--no-open", "--output", str(tmp_path / "p.html")]) == 2
    assert capsys.readouterr().err == "pyflash: seed: found -1, expected an integer, at least 0\n"
    with pytest.raises(SystemExit) as caught:
        main(["simulate", "--seed", "1", "--npz", "a.npz"])
    assert caught.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_from_the_command_line(tmp_path):
    """As a user starts it, warnings being errors."""
    page = tmp_path / "p.html"
    result = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-m",
            "pyflash",
            "simulate",
            "--seed",
            "7",
            "--no-open",
            "--output",
            page,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    text = page.read_text(encoding="utf-8")
    assert "random numbers, seed 7" in text
    assert pyflash.__version__ in text
