"""The feature table of README.md and the facts behind it in docs/features.md.

A cell of pyflash is a list of tests: "yes" is written only where every one of them exists. The cells of
other systems are facts about one version each, with the place where they were read.

    python tools/feature_table.py           rewrite both pages
    python tools/feature_table.py --check   fail if a page is stale or a test is missing
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

#: When the sources below were read.
READ_ON = "30 November 2026"

CELLS = ("yes", "part", "no", "?")

BEGIN, END = "<!-- {name}: written by {writer} -->", "<!-- end of {name} -->"


class System(NamedTuple):
    """Another system: the head of its column, and what was read."""

    short: str
    name: str
    source: str


SYSTEMS = (
    System(
        "FA2",
        "FlashAttention-2",
        "flash-attention 2.8.4, commit 0251105a of 15 August 2026: flash_attn/flash_attn_interface.py, "
        "csrc/flash_attn/flash_api.cpp, README.md (the CUDA part)",
    ),
    System(
        "FA3",
        "FlashAttention-3",
        "same commit: hopper/flash_attn_interface.py, hopper/flash_api.cpp",
    ),
    System(
        "FA4",
        "FlashAttention-4",
        "same commit: flash_attn/cute/interface.py, flash_attn/cute/mask.py",
    ),
    System(
        "FI",
        "FlashInfer",
        "FlashInfer 0.6.18, commit fb28d724 of 22 August 2026: prefill.py, decode.py, cascade.py, page.py, "
        "rope.py, mla, jit/utils.py, include/flashinfer/attention/variants.cuh",
    ),
    System(
        "SDPA",
        "PyTorch scaled_dot_product_attention",
        "PyTorch 2.13.0: docstring of torch.nn.functional.scaled_dot_product_attention; "
        "torch.nn.attention.bias and .varlen count as part",
    ),
    System(
        "Flex",
        "PyTorch FlexAttention",
        "PyTorch 2.13.0: torch/nn/attention/flex_attention.py, torch/_inductor/kernel/flex, "
        "torch/nn/attention/experimental/_paged_attention.py",
    ),
    System(
        "ORT",
        "ONNX Runtime",
        "ONNX Runtime main: docs/ContribOperators.md (commit 004b79ed), docs/OperatorKernels.md (commit "
        "001d12d2), dates not known; ONNX 1.23.2: description of the operator Attention",
    ),
    System(
        "ggml",
        "ggml, the library of llama.cpp",
        "ggml 0.21.0, commit d99724f2 of 21 August 2026: include/ggml.h (ggml_flash_attn_ext), src/ggml.c, "
        "src/ggml-cpu/ops.cpp, src/ggml-cuda/fattn.cu",
    ),
    System(
        "MLX",
        "MLX",
        "MLX 0.32.2, commit 846d1762 of 22 August 2026: mlx.fast.scaled_dot_product_attention in "
        "python/src/fast.cpp, mlx/fast.cpp, mlx/backend/metal/scaled_dot_product_attention.cpp",
    ),
    System(
        "JAX",
        "JAX jax.nn.dot_product_attention",
        "JAX 0.11.1, commit cec06d11 of 8 August 2026: jax/_src/nn/functions.py; its implementation 'xla' "
        "where the two differ",
    ),
)


class Feature(NamedTuple):
    """One row: the tests that show it in pyflash, and the others' cells in the order of `SYSTEMS`."""

    name: str
    tests: tuple[str, ...]  # "file::function", in tests/
    others: str
    note: str = ""


FEATURES = (
    Feature(
        "causal, last query at last key",
        ("test_masks.py::test_visible_keys", "test_masks.py::test_causal_rows_of_the_contract"),
        "yes yes yes yes part part yes part yes part",
        "SDPA: torch.nn.attention.bias.causal_lower_right. JAX: is_causal is aligned to the first key.",
    ),
    Feature(
        "causal, first query at first key",
        ("test_masks.py::test_options_that_mean_the_same", "test_masks.py::test_visible_keys"),
        "no no part part yes part yes part part yes",
        "ORT: Attention without a cache.",
    ),
    Feature(
        "position of queries, per sequence",
        ("test_masks.py::test_offset_of_each_sequence", "test_masks.py::test_offsets_and_lengths_together"),
        "no no part part part part part part part part",
        "ORT: the length of the past only.",
    ),
    Feature(
        "window, left and right",
        ("test_masks.py::test_sweep_of_windows", "test_masks.py::test_visible_keys"),
        "yes yes yes part part part part part part yes",
        "FI: a right side only with one backend. SDPA: varlen_attn. ORT: a left side.",
    ),
    Feature(
        "first keys stay beside a window",
        (
            "test_masks.py::test_sink_tokens_do_not_pass_the_causal_end_nor_a_span_nor_the_length",
            "test_masks.py::test_random_combinations",
        ),
        "no no part part part part part part part part",
        "FA3: its kernels know sink_token_length, its Python functions do not.",
    ),
    Feature(
        "chunked local attention",
        ("test_spans.py::test_dense_calls", "test_spans.py::test_packed_calls"),
        "no yes part part part part part part part part",
        "FA3: attention_chunk, forward only.",
    ),
    Feature(
        "prefix-LM",
        ("test_spans.py::test_dense_calls", "test_spans.py::test_packed_calls"),
        "no no part part part part part part part part",
    ),
    Feature(
        "documents in one sequence",
        ("test_spans.py::test_documents", "test_spans.py::test_dense_calls"),
        "yes yes yes yes part part part part part part",
        "FA2, FA3, FA4, FI: as packed sequences.",
    ),
    Feature(
        "left padding",
        ("test_spans.py::test_dense_calls",),
        "part part part part part part part part part part",
        "FA2: cache_leftpad, not with pages. FA3: cache_leftpad, of caches. ORT: mask_index of the operator "
        "Attention of com.microsoft.",
    ),
    Feature(
        "valid lengths",
        (
            "test_masks.py::test_lengths_of_a_dense_cache",
            "test_nonfinite.py::test_what_lies_behind_the_length_stays_unseen",
        ),
        "yes yes yes yes part part yes part part yes",
        "SDPA: varlen_attn.",
    ),
    Feature(
        "bool mask",
        ("test_score_terms.py::test_ranks_and_broadcasting", "test_score_terms.py::test_strides"),
        "no no part part yes part yes part yes yes",
        "FI: without an axis for heads. ggml: 16-bit floats that are added.",
    ),
    Feature(
        "causal and a mask in one call",
        ("test_random.py::test_random_calls", "test_user_functions.py::test_with_every_other_term"),
        "no no no no no part yes part no yes",
        "FA4: mask_mod takes the place of causal and window. FI: causal counts only without a mask. SDPA and "
        "MLX refuse both.",
    ),
    Feature(
        "tree of draft tokens",
        ("test_tree.py::test_trees", "test_tree.py::test_a_tree_behind_pages"),
        "no no part part part part part part part part",
    ),
    Feature(
        "softcap",
        (
            "test_score_terms.py::test_every_term_in_both_families",
            "test_score_terms.py::test_softcap_of_small_and_huge_scores",
        ),
        "yes yes yes yes no part yes yes no no",
    ),
    Feature(
        "ALiBi with the caller's slopes",
        (
            "test_score_terms.py::test_alibi_is_the_same_in_prefill_and_decode",
            "test_score_terms.py::test_slopes_of_any_size_and_type",
        ),
        "yes no part part part part part part part part",
        "FI and ggml: slopes by formula; ggml multiplies distances that are in its mask.",
    ),
    Feature(
        "bias that broadcasts",
        (
            "test_score_terms.py::test_ranks_and_broadcasting",
            "test_score_terms.py::test_a_bias_of_any_type_beside_any_type",
        ),
        "no no part part yes part yes part yes yes",
        "pyflash reads it with zero strides and never expands it; of the others that was not looked at. "
        "ggml: over batch and heads only.",
    ),
    Feature(
        "learned sinks",
        ("test_score_terms.py::test_sinks_of_any_size", "test_score_terms.py::test_sinks_given_to_the_merge"),
        "no no yes yes no no yes yes yes no",
        "ORT: GroupQueryAttention, PagedAttention. FI: not with every backend.",
    ),
    Feature(
        "functions of the user",
        ("test_user_functions.py::test_functions", "test_user_functions.py::test_packed_and_paged"),
        "no no yes part no yes no no no no",
        "FA4: score_mod not on compute capability 8. FI: variants in CUDA, compiled at run time. pyflash: "
        "NumPy functions, C pointers, on a GPU C++ expressions.",
    ),
    Feature(
        "log-sum-exp returned",
        (
            "test_attention.py::test_shapes_and_types",
            "test_splits_and_merge.py::test_what_any_call_returns_can_be_merged",
        ),
        "yes yes yes yes part part no no no yes",
        "SDPA: varlen_attn. Flex: not on a CPU.",
    ),
    Feature(
        "entropy, key mass, top-k",
        ("test_stats.py::test_terms", "test_stats.py::test_paged", "test_stats.py::test_last_queries"),
        "no no no no no part part no no no",
        "Flex: the largest score of each row. ORT: the whole score matrix as an output.",
    ),
    Feature(
        "rows without keys are 0",
        (
            "test_empty.py::test_rows_that_see_nothing",
            "test_score_terms.py::test_rows_that_a_term_leaves_without_keys",
        ),
        "yes yes ? ? part yes ? yes no no",
        "SDPA: so on a CPU in 2.13 (tried), not in its documentation. ggml: read in its CPU code. MLX "
        "(unfused) and JAX put a large negative number in place of hidden scores, so such a row is a mean.",
    ),
    Feature(
        "hidden NaN stays hidden",
        (
            "test_nonfinite.py::test_what_no_row_sees_leaves_no_trace",
            "test_nonfinite.py::test_a_bad_token_reaches_the_rows_that_see_it_and_no_other",
            "test_stats.py::test_hidden_keys_may_be_nan",
            "test_cascade.py::test_hidden_keys_may_be_nan",
        ),
        "? ? ? ? no ? ? part no no",
        "SDPA: NaN behind a bool mask reached every row on a CPU in 2.13 (tried). ggml: its loop over single "
        "keys skips them, its tiles add -inf to their scores. MLX (unfused) and JAX multiply all values by "
        "the weights.",
    ),
    Feature(
        "grouped key/value heads",
        ("test_attention.py::test_shapes_and_types", "test_attention.py::test_query_counts_in_both_families"),
        "yes yes yes yes yes yes yes yes yes yes",
    ),
    Feature(
        "values of another width",
        ("test_attention.py::test_widths",),
        "no part yes yes yes yes yes part yes no",
        "FA3: some pairs. ggml: on CUDA some pairs.",
    ),
    Feature(
        "any head width",
        ("test_attention.py::test_widths", "test_storage.py::test_odd_widths"),
        "part part part ? yes part ? part yes yes",
        "FA2, FA3: multiples of 8 up to 256. FA4: up to 256, fewer on compute capability 10. Flex: at "
        "least 16 on a GPU. ggml: on CUDA a list of widths.",
    ),
    Feature(
        "latent cache (MLA)",
        (
            "test_storage.py::test_a_latent_cache",
            "test_storage.py::test_a_latent_cache_in_pages",
            "test_layouts.py::test_values_are_a_part_of_the_keys",
        ),
        "no part part yes ? ? part part ? no",
        "pyflash: v is a view of k; converted keys serve as values too. FA3: qv, Hopper. FA4: qv, Blackwell. "
        "ORT: PagedAttention on CUDA. ggml: 576 and 512 on CUDA.",
    ),
    Feature(
        "packed sequences",
        (
            "test_varlen.py::test_against_the_oracle",
            "test_varlen.py::test_each_sequence_has_the_bits_it_has_alone",
        ),
        "yes yes yes yes part part part no no no",
        "SDPA: varlen_attn, on CUDA. ORT: PackedMultiHeadAttention, PagedAttention.",
    ),
    Feature(
        "pages behind a table",
        (
            "test_paged.py::test_against_the_oracle",
            "test_paged.py::test_stale_entries_of_the_table_are_not_read",
        ),
        "yes yes part yes part part part no no no",
        "FA4: not on compute capability 8.0 and 12.0. SDPA: varlen_attn. Flex: experimental. ORT: CUDA only.",
    ),
    Feature(
        "pages of any size",
        ("test_paged.py::test_any_page_size_has_the_bits_of_dense",),
        "no yes ? ? ? ? ? no no no",
        "FA2: multiples of 256.",
    ),
    Feature(
        "places or heads first in a cache",
        ("test_paged.py::test_pools_with_heads_before_places", "test_storage.py::test_pages"),
        "? ? ? yes ? ? no no no no",
        "FA2, FA3, FA4: a strided view may do.",
    ),
    Feature(
        "prompt chunks beside single tokens",
        ("test_paged.py::test_packed_queries", "test_reproducibility.py::test_mixed_families_in_one_call"),
        "yes yes yes yes part part part no no no",
        "SDPA: varlen_attn. ORT: PagedAttention, CUDA only.",
    ),
    Feature(
        "append, rotary in both styles",
        (
            "test_append.py::test_rotation",
            "test_append.py::test_places",
            "test_append_quantised.py::test_rotation_comes_before_the_codes",
        ),
        "yes yes no part no no yes no no no",
        "FI: in one call for float8, else two. ORT: GroupQueryAttention.",
    ),
    Feature(
        "shared prefix read once (cascade)",
        ("test_cascade.py::test_prefix_is_read_once_for_all_alike", "test_cascade.py::test_terms"),
        "no no no yes no no no no no no",
    ),
    Feature(
        "split keys, exact merge to call",
        (
            "test_splits_and_merge.py::test_num_splits",
            "test_splits_and_merge.py::test_parts_merge_to_the_whole",
        ),
        "part yes yes yes part part ? part ? no",
        "FA2, SDPA (varlen_attn), Flex, ggml: split inside, no merge to call.",
    ),
    Feature(
        "float8 cache",
        ("test_storage.py::test_every_type_and_scale", "test_append_quantised.py::test_values_of_every_type"),
        "no part part yes part part yes no no ?",
        "FA3, FA4: queries too, one scale per sequence and head. SDPA: an experimental function. Flex: types "
        "are taken, scales are not.",
    ),
    Feature(
        "int8 cache",
        ("test_storage.py::test_every_type_and_scale", "test_append_quantised.py::test_values_of_every_type"),
        "no no no ? no ? yes yes no no",
        "ORT: GroupQueryAttention, PagedAttention. ggml: q8_0.",
    ),
    Feature(
        "int4 cache",
        ("test_storage.py::test_every_type_and_scale", "test_append_quantised.py::test_values_of_every_type"),
        "no no no part no no yes yes no no",
        "FI: a 4-bit float (NVFP4). ggml: q4_0.",
    ),
    Feature(
        "a scale per token and head",
        (
            "test_storage.py::test_every_type_and_scale",
            "test_append_quantised.py::test_places_of_codes_and_of_written_scales",
        ),
        "no no no part no part no part no no",
        "FI: per 16 elements of NVFP4. Flex: of keys, by a score_mod. ggml: per 32 elements.",
    ),
    Feature(
        "float64",
        (
            "test_attention.py::test_shapes_and_types",
            "test_append.py::test_conversion_to_the_type_of_the_cache",
        ),
        "no no no no yes ? no no ? no",
        "ORT: its CPU operator takes float32 and float16. JAX: softmax is in float32.",
    ),
    Feature(
        "same bits: threads, batch, pages",
        (
            "test_reproducibility.py::test_options_and_any_number_of_threads",
            "test_reproducibility.py::test_options_and_a_sequence_alone",
            "test_reproducibility.py::test_options_and_a_prompt_continued_from_a_cache",
            "test_paged.py::test_any_page_size_has_the_bits_of_dense",
            "test_random.py::test_random_calls_keep_their_bits",
        ),
        "? ? part part part ? ? no ? ?",
        "FA4: seqlen_k_per_split. FI: fixed_split_size. SDPA: varlen_attn with num_splits=1, across batches. "
        "ggml: on a CPU one query's keys are cut by the number of threads. pyflash: with default splits "
        "and tiles, on a GPU with batch_invariant.",
    ),
    Feature(
        "runs on a CPU",
        (
            "test_backends.py::test_numpy_arrays_go_to_the_c_kernels",
            "test_attention.py::test_shapes_and_types",
        ),
        "no no no no yes part yes yes yes yes",
        "Flex: inference only.",
    ),
    Feature(
        "needs no framework",
        ("test_layering.py::test_import_needs_only_numpy",),
        "no no no no no no part part no no",
        "pyflash: NumPy, and cffi for C, CuPy for a GPU. ORT: arrays of NumPy, but a model around the "
        "operator. ggml: a C library, with tensors of its own.",
    ),
    Feature(
        "runs on a GPU",
        (
            "test_cuda_device.py::test_arrays_of_cupy",
            "test_cuda_device.py::test_arrays_of_torch",
            "test_cuda_device.py::test_c_and_cuda_agree",
            "test_cuda_device.py::test_a_graph_follows_contents_and_lengths",
            "test_cuda_sources.py::test_kernel_compiles",
        ),
        "yes yes yes yes yes yes yes yes yes yes",
        "pyflash: CUDA, compute capability 7.5 or newer. The shared suite runs there as backend cuda; where "
        "there is no GPU, the kernels are compiled and emulated (make test-cuda).",
    ),
    Feature(
        "gradients",
        (),
        "yes yes yes no yes part ? no yes yes",
        "Flex: not on a CPU. ggml: ggml_flash_attn_back is of an older operator.",
    ),
)


def existing_tests() -> set[str]:
    """Return all tests of the suite as ``file::function``, read from the sources."""
    found = set()
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {
            f"{path.name}::{node.name}"
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        }
    return found


def problems() -> Iterator[str]:
    """Yield what is wrong with the data above."""
    tests = existing_tests()
    for feature in FEATURES:
        yield from (f"{feature.name}: no test {test}" for test in feature.tests if test not in tests)
        cells = feature.others.split()
        if len(cells) != len(SYSTEMS) or not set(cells) <= set(CELLS):
            yield f"{feature.name}: {feature.others!r} does not have one of {CELLS} for each other system"
    names = [feature.name for feature in FEATURES]
    yield from (f"{name} stands twice" for name in sorted({n for n in names if names.count(n) > 1}))


def table(rows: list[list[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table that is aligned as plain text too."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = ["-" * width for width in widths]
    for row in (rows[0], rule, *rows[1:]):
        yield "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) + " |"


def feature_table() -> Iterator[str]:
    """Yield the lines of README's table."""
    rows = [["", "pyflash", *(system.short for system in SYSTEMS)]]
    for feature in FEATURES:
        rows.append([feature.name, "yes" if feature.tests else "no", *feature.others.split()])
    yield from table(rows)


def sources() -> Iterator[str]:
    """Yield what was read, system by system."""
    yield f"Read on {READ_ON}."
    yield ""
    for system in SYSTEMS:
        yield f"* **{system.short}**, {system.name}: {system.source}."


def evidence() -> Iterator[str]:
    """Yield the notes and the tests of each feature."""
    for feature in FEATURES:
        yield f"**{feature.name}**"
        yield ""
        if feature.note:
            yield f"* {feature.note}"
        yield from (f"* `{test}`" for test in feature.tests)
        if not feature.tests:
            yield "* Not in pyflash yet."
        yield ""


def replaced(text: str, name: str, lines: Iterable[str], writer: str = "tools/feature_table.py") -> str:
    """Return a page with the part between two marks written anew."""
    begin, end = BEGIN.format(name=name, writer=writer), END.format(name=name)
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"the marks {begin!r} and {end!r} have to stand once each")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return "\n".join([before + begin, "", *lines, "", end]).replace("\n\n\n", "\n\n") + after


def pages() -> dict[Path, str]:
    """Return both pages as they should be."""
    readme, features = ROOT / "README.md", ROOT / "docs" / "features.md"
    text = features.read_text(encoding="utf-8")
    text = replaced(text, "sources", sources())
    return {
        readme: replaced(readme.read_text(encoding="utf-8"), "feature table", feature_table()),
        features: replaced(text, "evidence", evidence()),
    }


def main(arguments: list[str] | None = None) -> int:
    """Write or check the pages; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is wrong")
    options = parser.parse_args(arguments)
    found = list(problems())
    for path, text in pages().items():
        if path.read_text(encoding="utf-8") == text:
            continue
        if options.check:
            found.append(f"{path.relative_to(ROOT)} is stale: run python tools/feature_table.py")
        else:
            path.write_text(text, encoding="utf-8")
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
