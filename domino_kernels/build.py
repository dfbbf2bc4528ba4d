"""What this installation holds: `print(domino_kernels.build_info())`."""

import re
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from domino_kernels.version import __version__

# A statically linked CUDA runtime needs at least the driver that came with it (NVIDIA's release
# notes: CUDA 12.x runs on R525 by minor-version compatibility, 13.x on R580).
_DRIVER_MINIMUM = {12: 525, 13: 580}


@dataclass(frozen=True)
class BuildInfo:
    """Facts about the build and this machine. Gathering them initialises no CUDA."""

    version: str
    commit: str
    path: str
    mode: str  # "cuda", "cpu", or "none" where the extension was never built
    cuda_version: str | None
    cuda_archs: tuple[str, ...]
    driver_minimum: int | None  # major number of the driver, e.g. 580
    backends: dict[str, str]  # "cpu" | "cuda" | "triton" -> "on", or "off: why"

    def __str__(self):
        lines = [
            f"domino-kernels {self.version} (commit {self.commit or 'unknown'})",
            f"path           {self.path}",
            f"build mode     {self.mode}",
            f"CUDA           {self.cuda_version or 'none'}",
            f"architectures  {' '.join(self.cuda_archs) or 'none'}",
        ]
        if self.driver_minimum:
            lines.append(f"driver         R{self.driver_minimum} or newer")
        lines += [f"{name:<14} {state}" for name, state in self.backends.items()]
        return "\n".join(lines)


def build_info() -> BuildInfo:
    """Version, commit, build mode, CUDA version, architectures, and why a backend is off."""
    package = Path(__file__).resolve().parent
    try:
        from domino_kernels import _build_info as built
    except ImportError:
        built = None
    if built is None or util.find_spec("domino_kernels._C") is None:
        why = f"off: the extension is not built in {package}; run: pip install ."
        if (package.parent / "setup.py").is_file():  # and not where `pip install .` puts it
            why = (
                f"off: {package} is the source folder, not built; for an installed package leave "
                f"{package.parent}, to build here run: python setup.py build_ext --inplace"
            )
        backends = {"cpu": why, "cuda": why, "triton": _triton()}
        return BuildInfo(__version__, "", str(package), "none", None, (), None, backends)
    minimum = None
    if built.cuda_version:
        minimum = _DRIVER_MINIMUM.get(int(built.cuda_version.split(".")[0]))
    backends = {"cpu": "on", "cuda": _cuda(built, minimum), "triton": _triton()}
    return BuildInfo(
        __version__,
        built.commit,
        str(package),
        built.mode,
        built.cuda_version,
        tuple(built.cuda_archs),
        minimum,
        backends,
    )


def _cuda(built, minimum):
    if built.mode != "cuda":
        return f"off: built for the CPU alone ({built.reason}); DOMINO_BUILD=cuda pip install ."
    # The kernel module's own file: asking the CUDA driver would initialise it and break fork.
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "off: no NVIDIA driver is loaded on this machine"
    found = re.search(r"\s(\d+)\.[\d.]+\s", text)
    if found and minimum and int(found[1]) < minimum:
        return f"off: driver R{found[1]}, but CUDA {built.cuda_version} needs R{minimum} or newer"
    return "on"


def _triton():
    try:
        return f"on (triton {metadata.version('triton')})"
    except metadata.PackageNotFoundError:
        return "off: triton is not installed"
