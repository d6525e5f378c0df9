"""Which file may use what: the layers of docs/architecture.md, read from the sources themselves.

Python by its syntax trees, C and CUDA by their ``#include`` lines and by the names they mention.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
C_SRC = ROOT / "c_src"

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60  # without the docstring

# --- Python: units are the modules and subpackages of pyflash ---

#: Units that execute calls. They know neither each other nor anything above them.
BACKENDS = {"_reference", "_c", "gpu"}
#: Units that only a command imports; they may need extras.
COMMANDS = {"_demo", "_demo_memory", "bench"}
#: Units that hand calls to a backend. What is in none of these sets lies below them: checks,
#: registries and plain data, which know no backend.
ABOVE = {
    "__init__",
    "__main__",
    "_api",
    "_api_cache",
    "_api_stats",
    "_cache",
    "_cascade",
    "_reservation",
    "_runtime",
    "_trace",
    "distributed",
    "generate",
    "simulate",
    *COMMANDS,
}
#: Modules that only these units, or single modules, may import, at any time.
OWNED_BY = {
    "pyflash._pyflash_c": {"_c"},
    "cffi": {"_c", "_runtime"},
    "mpi4py": {"pyflash.distributed._mpi"},
    "cupy": {"_array_kinds", "pyflash.gpu._compile", "pyflash.gpu._device"},
}


def _python_files() -> dict[str, Path]:
    """Every module of the package, by the name it has once it is installed."""
    files = {}
    for package, folder in (("pyflash", ROOT / "pyflash"), ("pyflash.gpu", ROOT / "gpu")):
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            files[".".join(parts).removesuffix(".__init__")] = path
    return files


PYTHON_FILES = _python_files()


def unit(module: str) -> str:
    """The unit a module belongs to: ``pyflash.generate._model`` to ``generate``."""
    return module.split(".")[1] if "." in module else "__init__"


def _when_imported(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: not functions, not ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _when_imported(node)


def imports(module: str, *, when_imported: bool = False) -> set[str]:
    """The absolute names of all modules that a module imports, or of those it needs to be imported."""
    path = PYTHON_FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in _when_imported(tree) if when_imported else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in PYTHON_FILES else base for name in names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            found |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return found


@pytest.mark.parametrize("module", PYTHON_FILES)
def test_python_layers(module):
    mine = unit(module)
    theirs = {unit(name) for name in imports(module) if name.startswith("pyflash")} - {mine}
    forbidden = set() if mine in ABOVE else ABOVE | BACKENDS
    assert not theirs & forbidden, f"{module} imports {theirs & forbidden}, which lie above it"


@pytest.mark.parametrize("module", PYTHON_FILES)
def test_owned_modules(module):
    for owned, owners in OWNED_BY.items():
        if not {module, unit(module)} & owners:
            assert not {name for name in imports(module) if f"{name}.".startswith(f"{owned}.")}


@pytest.mark.parametrize("module", [name for name in PYTHON_FILES if unit(name) not in COMMANDS])
def test_import_needs_only_numpy(module):
    """Extras are imported where they are used, so that pyflash imports without them."""
    needed = {name.split(".")[0] for name in imports(module, when_imported=True)}
    assert needed <= {"numpy", "pyflash"} | sys.stdlib_module_names


def test_gpu_imports_relatively():
    """``import gpu`` works in the repository, where it makes a second copy of pyflash.gpu."""
    for path in [*PYTHON_FILES.values(), *(ROOT / "tests").glob("*.py")]:
        assert not re.search(r"^\s*(import|from) gpu\b", path.read_text(encoding="utf-8"), re.MULTILINE), path
    for path in (ROOT / "gpu").rglob("*.py"):
        assert "import pyflash" not in path.read_text(encoding="utf-8"), path


def test_no_import_cycles():
    graph = {name: imports(name, when_imported=True) & PYTHON_FILES.keys() for name in PYTHON_FILES}
    for name in graph:
        graph[name] -= {name, "pyflash"}  # a submodule always finds its package being imported
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("module", PYTHON_FILES)
def test_functions_are_short(module):
    for node in ast.walk(ast.parse(PYTHON_FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            lines = node.body[-1].end_lineno - first.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{module}.{node.name} has {lines} lines"


# --- C: layers are the folders of c_src ---

C_FILES = sorted(
    path.relative_to(C_SRC).as_posix() for path in C_SRC.rglob("*") if path.suffix in {".c", ".h"}
)

#: Folder -> the folders whose files it may include, besides its own.
MAY_INCLUDE = {
    "shared": set(),
    "simd": set(),
    "kernels": {"simd", "shared"},
    "dispatch": {"kernels", "shared"},
    "driver": {"abi", "dispatch", "kernels", "shared"},
    "abi": {"driver", "dispatch", "kernels", "shared"},
}
#: Folder -> the system headers it may include; a folder that is not here may include any.
MAY_INCLUDE_SYSTEM = {
    "shared": {"stdint.h"},
    "simd": {"stdint.h", "immintrin.h", "arm_neon.h", "math.h"},
    "kernels": {"stddef.h", "stdint.h", "math.h"},
}
#: Regular expression -> the files that may match it, comments left out. A folder stands for its files.
ONLY_IN = {
    r"\b(immintrin|arm_neon)\.h|\b_mm\w*_\w+|\b__m(128|256|512)\w*|\bv(ld|st)1q?_\w+|\bfloat(16|32|64)x\d": [
        "simd/"
    ],
    r"\b(malloc|calloc|realloc|free|aligned_alloc|posix_memalign)\s*\(": ["driver/"],
    r"\bomp\.h\b|#\s*pragma\s+omp\b|\bomp_\w+": ["driver/parallel.c"],
    r"\bpthread\w*|\bsched_\w+": ["driver/parallel.c"],
    r"\b(float|double)\b": ["abi/", "dispatch/", "driver/", "kernels/", "simd/"],
    r"\b(printf|fprintf|puts|abort|exit|getenv|assert)\s*\(": [],
    # cffi releases the GIL, so there is no state but the caller's and the pool of threads.
    r"^static\s+(?!inline\b|const\b)[^()]*[=;]": [
        "driver/parallel.c",
        "simd/amx_emulated.h",  # registers, in tests
    ],
}


def code(path: Path) -> str:
    """The text of a C file without its comments."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("file", C_FILES)
def test_c_layers(file):
    path, folder = C_SRC / file, file.split("/")[0]
    for system, included in re.findall(
        r'^\s*#\s*include\s+(?:<([^>]+)>|"([^"]+)")', code(path), re.MULTILINE
    ):
        if system:
            assert system in MAY_INCLUDE_SYSTEM.get(folder, {system}), f"{file} includes <{system}>"
            continue
        beside = path.parent / included
        target = (beside if beside.exists() else C_SRC / included).resolve().relative_to(C_SRC)
        allowed = {".", folder, *MAY_INCLUDE[folder]}
        assert target.parts[0] in allowed or target.parent == Path("."), f"{file} includes {included}"


@pytest.mark.parametrize("file", C_FILES)
def test_c_names(file):
    text = code(C_SRC / file)
    for pattern, places in ONLY_IN.items():
        if not any(file.startswith(place) for place in places):
            found = re.search(pattern, text, re.MULTILINE)
            assert not found, f"{file} uses {found[0]!r}, which belongs to {places or 'no file here'}"


def test_driver_names_no_kernel():
    """The driver reaches a kernel through the table of an instruction set, never by its symbol."""
    isas = re.findall(r"^PF_ISA\((\w+)", (C_SRC / "isa.def").read_text(encoding="utf-8"), re.MULTILINE)
    assert isas
    for path in (C_SRC / "driver").iterdir():
        assert not re.search(rf"\bpf_\w*_({'|'.join(isas)})\b", code(path)), path


# --- CUDA: the files of gpu/kernels, which may use each other and c_src/shared ---

KERNELS = ROOT / "gpu" / "kernels"
CUDA_FILES = sorted(path.name for path in KERNELS.iterdir())
#: Regular expression -> the files that may match it, comments left out.
CUDA_ONLY_IN = {
    # Every function with PTX has a twin in the emulator, and architectures differ in nothing else.
    r"\basm\b|\b__CUDA_ARCH__\b": ["ptx.cuh", "hopper.cuh"],
    # Which keys a row may see is said by c_src/shared/span.h, from what sequence.cuh hands it.
    r"\bwindow_(left|right)\b|\.span_(lo|hi)\b": ["call.cuh", "sequence.cuh"],
    # Blocks that have most to do begin first: an order, no mask.
    r"\bcausal\b": ["call.cuh", "sequence.cuh", "forward_fma.cu"],
    r"\b(malloc|free|printf|assert)\s*\(|\bnew\b": [],
    # Only a build that looks for waits without end has it.
    r"\b__trap\s*\(": ["hopper.cuh"],
}


def test_cuda_files_are_sources_and_headers():
    assert CUDA_FILES and {Path(file).suffix for file in CUDA_FILES} == {".cu", ".cuh"}


@pytest.mark.parametrize("file", CUDA_FILES)
def test_cuda_includes(file):
    """NVRTC gets one text without headers of its own: what is included lies here or is shared with C."""
    for line in re.findall(r"^\s*#\s*include\b.*", code(KERNELS / file), re.MULTILINE):
        found = re.fullmatch(r'\s*#\s*include\s+"(?:(shared/\w+\.(?:h|def))|(\w+\.cuh))"\s*', line)
        assert found, f"{file}: {line.strip()}"
        target = C_SRC / found[1] if found[1] else KERNELS / found[2]
        assert target.exists(), f"{file} includes {target.name}, which is not there"


@pytest.mark.parametrize("file", CUDA_FILES)
def test_cuda_names(file):
    text = code(KERNELS / file)
    for pattern, places in CUDA_ONLY_IN.items():
        if file not in places:
            found = re.search(pattern, text)
            assert not found, f"{file} uses {found[0]!r}, which belongs to {places or 'no file here'}"


def sources_named_by_plans() -> set[tuple[str, str | None]]:
    """Return the files, and the functions where they are constants, of all ``Source(...)`` in gpu."""
    found = set()
    for path in (ROOT / "gpu").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Source":
                file, function = (
                    arg.value if isinstance(arg, ast.Constant) else None for arg in node.args[:2]
                )
                found.add((file, function))
    return found


def test_every_kernel_is_planned():
    """A source that no plan names is dead, and one that does not exist fails at the first call."""
    named = sources_named_by_plans()
    assert {file for file, _ in named if file} == {file for file in CUDA_FILES if file.endswith(".cu")}
    for file, function in named:
        if file and function:
            assert re.search(rf"\b{function}\(", code(KERNELS / file)), f"{file} has no kernel {function}"


# --- every file ---

SUFFIXES = {".py", ".c", ".h", ".def", ".cu", ".cuh", ".toml", ".md", ".in"}
NAMES = {"Makefile", "run", "neon"}
FOLDERS = ("pyflash", "gpu", "c_src", "tests", "benchmarks", "examples", "docs", "tools", ".ci")
PROJECT_FILES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted(
        [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    )
    if path.is_file() and (path.suffix in SUFFIXES or path.name in NAMES)
]


def test_no_machine_paths():
    """Nothing depends on, or mentions, where things lie on one particular machine."""
    machine_path = re.compile(r"(?<![\w.$}])/(?:root|home|work|Users)/\w")
    for file in PROJECT_FILES:
        found = machine_path.search((ROOT / file).read_text(encoding="utf-8"))
        assert not found, f"{file} mentions {found[0]}..."


@pytest.mark.parametrize("file", [f for f in PROJECT_FILES if f.startswith(("pyflash/", "gpu/", "c_src/"))])
def test_files_are_short(file):
    lines = (ROOT / file).read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_FILE_LINES, f"{file} has {lines} lines: which responsibility can go?"
