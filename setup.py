"""Builds domino_kernels._C with CMake + ninja. No Torch and no GPU needed; without nvcc, CPU twins.

DOMINO_BUILD=auto|cuda|cpu    auto (default): CUDA where an nvcc is found
DOMINO_CUDA_ARCHS             CMake architecture list, default below, cut to what the nvcc knows
MAX_JOBS                      parallel compilations, default: the cores
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
ARCHS = "80-real;86-real;89-real;90a-real;100f-real;120f-real;80-virtual"


def output(*command):
    """stdout + stderr of a command, '' where it cannot run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


def find_nvcc():
    """The toolkit's own nvcc, or None. CMake misreads a wrapper script, so ask it where it is."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    usual = "/usr/local/cuda" if home is None else home
    tried = os.environ.get("CUDACXX"), home and f"{home}/bin/nvcc", shutil.which("nvcc")
    for nvcc in filter(None, [*tried, f"{usual}/bin/nvcc"]):
        plan = output(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull)
        if here := re.search(r"^#\$ _HERE_=(.+)$", plan, re.M):
            return str(Path(here[1].strip()) / "nvcc")
    return None


def known_archs(nvcc, version, wanted):
    """The entries of `wanted` that this nvcc compiles; 'f' (family) targets came with CUDA 12.9."""
    codes = set(re.findall(r"sm_(\d+)", output(nvcc, "--list-gpu-code")))
    family = tuple(map(int, version.split("."))) >= (12, 9)
    parts = [(a, re.fullmatch(r"(\d+)([af]?)(-real|-virtual)?", a)) for a in wanted.split(";") if a]
    return [a for a, m in parts if m and m[1] in codes and (m[2] != "f" or family)]


class CMakeBuild(build_ext):
    def run(self):
        mode = os.environ.get("DOMINO_BUILD", "auto")
        if mode not in ("auto", "cuda", "cpu"):
            sys.exit(f"DOMINO_BUILD: got {mode!r}, expected auto, cuda or cpu")
        nvcc = find_nvcc() if mode != "cpu" else None
        if mode == "cuda" and nvcc is None:
            sys.exit("DOMINO_BUILD=cuda: no nvcc in CUDACXX, CUDA_HOME, PATH or /usr/local/cuda")
        info = {"mode": "cuda" if nvcc else "cpu", "cuda_version": None, "cuda_archs": []}
        info["reason"] = "" if nvcc else "DOMINO_BUILD=cpu" if mode == "cpu" else "no nvcc found"
        if nvcc:
            info["cuda_version"] = re.search(r"release (\d+\.\d+)", output(nvcc, "--version"))[1]
            wanted = os.environ.get("DOMINO_CUDA_ARCHS", ARCHS)
            info["cuda_archs"] = known_archs(nvcc, info["cuda_version"], wanted)
            dropped = [a for a in wanted.split(";") if a and a not in info["cuda_archs"]]
            if dropped:
                print(f"domino_kernels: this nvcc does not know {dropped}; left out")
            if not info["cuda_archs"]:
                sys.exit(f"DOMINO_CUDA_ARCHS: {nvcc} knows none of {wanted!r}")
        print(f"domino_kernels: building {info}")
        self.compile(nvcc, info["cuda_archs"])
        dirty = "+dirty" if output("git", "status", "--porcelain", "-uno") else ""
        info["commit"] = output("git", "rev-parse", "--short=12", "HEAD").strip() + dirty
        lines = ['"""Written by setup.py."""\n', *(f"{k} = {v!r}\n" for k, v in info.items())]
        (self.package_folder() / "_build_info.py").write_text("".join(lines))

    def package_folder(self):
        return Path(self.get_ext_fullpath("domino_kernels._C")).resolve().parent

    def compile(self, nvcc, archs):
        import pybind11

        # a virtual environment's own tools first: it may be used without being activated
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        cmake, ninja = shutil.which("cmake", path=path), shutil.which("ninja", path=path)
        # not build_temp: an editable install gets a fresh one, and would compile all again
        mode = "cuda" if nvcc else "cpu"
        build = ROOT / "build" / f"{mode}-{sys.implementation.cache_tag}"
        target = self.package_folder()
        target.mkdir(parents=True, exist_ok=True)
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_MAKE_PROGRAM": ninja,
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY": target,
            "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "DOMINO_CUDA": "ON" if nvcc else "OFF",
        }
        if nvcc:
            options |= {"CMAKE_CUDA_COMPILER": nvcc, "CMAKE_CUDA_ARCHITECTURES": ";".join(archs)}
        flags = [f"-D{key}={value}" for key, value in options.items()]
        subprocess.run([cmake, "-S", ROOT, "-B", build, "-G", "Ninja", *flags], check=True)
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        subprocess.run([cmake, "--build", build, "-j", jobs], check=True)


setup(
    packages=find_packages(include=["domino_kernels*"]) + find_packages("python"),
    package_dir={"domino_draft": "python/domino_draft"},
    package_data={"domino_kernels": ["py.typed", "*.pyi"], "domino_draft": ["py.typed"]},
    ext_modules=[Extension("domino_kernels._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
