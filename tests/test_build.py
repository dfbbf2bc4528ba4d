"""The package as a build: what it links, what the archives hold, what an import does."""

import ast
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import domino_kernels
from domino_kernels import _C

ROOT = Path(__file__).resolve().parent.parent
CSRC = sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
KERNELS = [path for path in CSRC if path.suffix == ".cu" and path.parent.name != "common"]


def run(*command, cwd=ROOT, env=None, check=True):
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def python(code, **kwargs):
    """Runs code in a fresh interpreter that imports the same domino_kernels as this one."""
    path = os.pathsep.join(p for p in sys.path if p)
    return run(sys.executable, "-c", code, env={"PYTHONPATH": path}, **kwargs).stdout


# --- the extension ---------------------------------------------------------------------------


def test_extension_links_neither_torch_nor_cuda():
    linked = run("ldd", _C.__file__).stdout
    assert "libc.so" in linked
    assert not re.search(r"libtorch|libc10|libcuda|libcudart|libgomp", linked), linked


def test_cuda_runtime_stays_private():
    """Torch loads its own libcudart into the global scope: ours must not bind to that one."""
    symbols = run("nm", "-D", _C.__file__).stdout
    assert "PyInit__C" in symbols
    assert not re.search(r"\b_*cuda\w+", symbols)


def test_csrc_never_includes_torch():
    for path in CSRC:
        assert not re.search(r"#include\s*[<\"](torch|ATen|c10)/", path.read_text()), path


def test_stub_lists_every_bound_name_and_keyword():
    stub = ast.parse((ROOT / "domino_kernels/_C.pyi").read_text())
    functions = {n.name: n.args for n in stub.body if isinstance(n, ast.FunctionDef)}
    constants = {n.target.id for n in stub.body if isinstance(n, ast.AnnAssign)}
    bound = {name for name in dir(_C) if not name.startswith("__")}
    assert bound == set(functions) | constants
    for name, arguments in functions.items():
        signature = re.search(rf"{name}\((.*)\) ->", getattr(_C, name).__doc__)[1]
        stubbed = [a.arg for a in (*arguments.args, *arguments.kwonlyargs)]
        assert re.findall(r"(\w+):", signature) == stubbed, f"_C.pyi: {name}"


def nvcc():
    """The compiler that setup.py would take."""
    code = "import setuptools; setuptools.setup = lambda **k: None; import setup; "
    found = python(code + "print(setup.find_nvcc() or '')", cwd=ROOT).strip()
    return found or pytest.skip("no nvcc")


# Bytes of the worst entry, in the form that was timed (bench/NOTES.md); every other file: none.
SPILLS = {
    "accepted_path": 4,
    # 256 units, 16 warps with servers: 176 stored, 456 loaded; the forms of batch 64 24 and 20
    "draft_chain_block": 456,
    "draft_chain_certify": 80,  # the screen of more than 224 columns, in front of its loop
    "draft_chain_certify_early": 152,  # what scores marked rows; in front of its loops 76
    "draft_chain_finish": 100,
    "draft_chain_markov": 24,  # of rank 256
    "draft_chain_pool": 44,  # the form for many rows; the other 16
    "draft_chain_team": 12,  # the general form
    "verify_chain": 24,  # the walk of the block rule
    # launches of 80 registers, to fit beside the one in front: the form with pools
    "verify_tree": 72,
    # judges and readers share 64 registers, and the judges spill; verify_draw of 80 registers 184
    "verify_cut": 368,
    "verify_dense": 528,  # the same with rows of q, outside its loops
    "verify_listed": 184,  # outside its loops
    # of rows that go by value; the others' kernels 192 at most, with two blocks a row
    "verify_nucleus": 1822,
    "verify_nucleus_dense": 1834,
    "verify_nucleus_draws": 716,
    "verify_plain": 1774,
    "verify_plain_dense": 1798,
    "verify_plain_draws": 716,
    "verify_ranked": 748,  # of rows that go by value; the others' kernels 16
    "verify_row": 392,  # what a race leaves open; the kernels 132 and 216, outside their loops
}


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: p.stem)
def test_kernels_compile_for_sm_90a_with_no_more_spills_than_timed(path, tmp_path):
    command = [
        nvcc(),
        "-std=c++17",
        "-O3",
        "-DNDEBUG",
        "-I",
        ROOT / "csrc",
        "-arch=sm_90a",
        "-cubin",
    ]
    report = run(*command, "-Xptxas", "-v", "-o", tmp_path / "out.cubin", path).stderr
    entry = None
    for line in report.splitlines():
        if compiling := re.search(r"Compiling entry function '(\S+)'", line):
            entry = compiling[1]
        for count in re.findall(r"(\d+) bytes spill", line):
            assert int(count) <= SPILLS.get(path.stem, 0), f"{entry}: {line.strip()}"
    assert entry, f"no kernel in {path}"


def test_gpus_without_code_of_their_own_are_launched_as_sm_80(tmp_path):
    """The driver compiles sm_80's code for them: launchers must not ask for clusters there."""
    source = tmp_path / "generation.cu"
    for built, expected in (((8, 12), {8: 8, 9: 8, 12: 12}), ((9,), {9: 9, 11: 8})):
        cases = "\n".join(
            f"static_assert(domino::generation({major}) == {taken});"
            for major, taken in expected.items()
        )
        source.write_text(f'#include "common/launch.h"\n{cases}\n')
        defined = f"-DDOMINO_GENERATIONS={sum(1 << major for major in built)}u"
        run(nvcc(), "-std=c++17", defined, "-I", ROOT / "csrc", "-fatbin", "-o", os.devnull, source)


def test_launchers_know_what_was_compiled():
    commands = ROOT / "build" / f"cuda-{sys.implementation.cache_tag}" / "compile_commands.json"
    if not commands.exists():
        pytest.skip("no CUDA build in this folder")
    generations = 0
    for arch in domino_kernels.build_info().cuda_archs:
        number, suffix = re.match(r"(\d+)([af]?)", arch).groups()
        if (number, suffix) != ("90", ""):  # wgmma and the copy engine need 90a
            generations |= 1 << int(number) // 10
    defined = set(re.findall(r"-DDOMINO_GENERATIONS=(\d+)u", commands.read_text()))
    assert defined == {str(generations)}


# --- importing it ----------------------------------------------------------------------------


def test_import_and_build_info_without_torch():
    code = """
import sys
sys.modules["torch"] = None  # any import of torch fails
import domino_kernels as k
print(k.build_info())
try:
    k.gru_step
except ImportError:
    print("torch is needed here")
"""
    shown = python(code)
    assert f"domino-kernels {domino_kernels.__version__}" in shown
    assert re.search(r"^build mode +(cuda|cpu)$", shown, re.M)
    assert re.search(r"^cuda +(on|off: \S+)", shown, re.M)
    assert "torch is needed here" in shown


IMPORT_EVERYTHING = """
import importlib, pkgutil, torch
def forbidden(*args, **kwargs):
    raise AssertionError("an import asked for CUDA")
for name in ("_lazy_init", "init", "is_available", "device_count", "get_device_capability",
             "get_device_properties", "current_device"):
    setattr(torch.cuda, name, forbidden)
import domino_kernels, domino_draft
for package in (domino_kernels, domino_draft):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
for name in domino_kernels.__all__:
    getattr(domino_kernels, name)
assert not torch.cuda.is_initialized()
"""


def test_import_touches_no_cuda():
    python(IMPORT_EVERYTHING)


@pytest.mark.gpu
def test_fork_after_import():
    """A forked child can use CUDA only where nothing before the fork initialised it."""
    code = """
import os
import torch, domino_kernels, domino_draft
domino_kernels.build_info()
domino_kernels.gru_step
child = os.fork()
if child == 0:
    ones = torch.ones(3, 1, device="cuda")
    domino_kernels.gru_step(ones[:1], ones[:1], ones, ones)
    torch.cuda.synchronize()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    python(code)


# --- building it -----------------------------------------------------------------------------


def test_sdist_holds_every_source(tmp_path):
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    wanted = [str(path.relative_to(ROOT)) for path in CSRC]
    wanted += ["CMakeLists.txt", "setup.py", "pyproject.toml", "LICENSE", "domino_kernels/_C.pyi"]
    wanted += ["domino_kernels/py.typed", "python/domino_draft/__init__.py"]
    assert not set(wanted) - names
    assert not [name for name in names if name.endswith(".so") or "_build_info" in name]


@pytest.mark.parametrize("mode, message", [("cuda", "no nvcc in"), ("gpu", "expected auto, cuda")])
def test_a_build_that_cannot_be_says_why(mode, message):
    env = {"DOMINO_BUILD": mode, "CUDA_HOME": "/nonexistent", "CUDACXX": "", "PATH": "/nonexistent"}
    done = run(sys.executable, "setup.py", "build_ext", env=env, check=False)
    assert done.returncode != 0
    assert message in done.stderr


def test_build_without_nvcc(tmp_path):
    """Twins alone, from a copy of the sources: it builds, says what is off, and computes."""
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for name in ("csrc", "domino_kernels", "python"):
        for path in (ROOT / name).rglob("*"):
            if (
                path.is_file()
                and path.suffix not in (".so", ".pyc")
                and "_build_info" not in path.name
            ):
                copy = tmp_path / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    bins = tmp_path / "bin"
    bins.mkdir()
    for tool in ("c++", "g++", "gcc", "cc", "ld", "as", "ar", "ranlib", "cmake", "ninja"):
        where = Path(sys.executable).parent / tool
        found = where if where.exists() else Path("/usr/bin") / tool
        if found.exists():
            (bins / tool).symlink_to(found)
    env = {"PATH": str(bins), "CUDA_HOME": "/nonexistent", "CUDACXX": "", "CUDA_PATH": ""}
    env |= {"DOMINO_BUILD": "auto"}
    built = run(sys.executable, "setup.py", "build_ext", "--inplace", cwd=tmp_path, env=env)
    assert "'mode': 'cpu'" in built.stdout
    code = """
import domino_kernels as k, torch
from domino_kernels import _C, torch_library
print(k.__file__, k.build_info(), sep="\\n")
ones = torch.ones(3, 1)
print(k.gru_step(ones[:1], ones[:1], ones, ones))
try:
    torch_library.check_status("gru_step", -2)
except RuntimeError as error:
    print(error)
"""
    shown = run(sys.executable, "-c", code, cwd=tmp_path, env={"PYTHONPATH": ""}).stdout
    assert str(tmp_path) in shown
    assert "cuda           off: built for the CPU alone (no nvcc found)" in shown
    assert "tensor([[" in shown
    assert "gru_step: no CUDA kernels in this build (CUDA backend off: built for the CPU" in shown


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "cpu"])
def test_wheel_from_build_isolation_works_without_torch(mode, tmp_path):
    """sdist, a wheel from it under build isolation, an environment with nothing else in it."""
    env = {"DOMINO_BUILD": mode, "DOMINO_CUDA_ARCHS": "90a-real", "PYTHONPATH": ""}
    pip = [sys.executable, "-m", "pip", "-q"]
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, archive, env=env)
    (wheel,) = tmp_path.glob("domino_kernels-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(re.fullmatch(r"domino_kernels/_C\..*\.so", name) for name in names)
    for name in (
        "domino_kernels/_build_info.py",
        "domino_kernels/py.typed",
        "domino_kernels/_C.pyi",
    ):
        assert name in names
    assert "domino_draft/__init__.py" in names
    assert not [n for n in names if n.startswith(("tests/", "bench/", "csrc/"))]
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    inside = tmp_path / "venv/bin/python"
    run(inside, "-m", "pip", "-q", "install", "--no-deps", wheel)
    code = "import domino_kernels as k; print(k.build_info())"
    shown = run(inside, "-c", code, cwd=tmp_path, env=env).stdout
    assert str(tmp_path) in shown
    assert re.search(r"^cpu +on$", shown, re.M)
