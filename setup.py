"""Packaging: the Python packages, and the native lane kernel as plain shared libraries.

The libraries need no Python headers and no framework. One library is for any caller. The other
offers the kernel as operations of TensorFlow. It looks up TensorFlow's symbols, and the kernel's,
when it is loaded. So one wheel serves every Python. `make dist` makes it a wheel for every Linux
with glibc, too.
"""

import sys
import warnings
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

LIBRARIES = {"_lanes": ["lanes.c"], "_tensorflow_ops": ["tensorflow_ops.c"]}
HEADERS = ("lanes", "lanes_template", "target_clones", "tensorflow_c_api")
# Never -ffast-math: it drops NaN tests, and at link time it sets flush-to-zero for the whole
# process. -ffp-contract=off: a fused multiply-add would round differently from NumPy and the
# frameworks' plain kernels. -fno-tree-loop-distribute-patterns: GCC would make `rep stos` of loops
# that set a tile's few numbers to zero, and so take half as long again.
FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fno-tree-loop-distribute-patterns"]


class BuildKernel(build_ext):
    """Build native/*.c. Without a compiler, the installation says so and goes on."""

    def get_ext_filename(self, fullname: str) -> str:
        # ctypes loads it, so its name carries no Python version.
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, extension: Extension) -> list[str]:
        return []  # no PyInit function

    def build_extension(self, extension: Extension) -> None:
        try:
            super().build_extension(extension)
        except Exception as error:  # its type differs between setuptools versions
            message = (
                f"scalecom_hvd: the native kernel was not built ({error}); the slower plain-torch "
                "kernel will be used"
            )
            warnings.warn(message, stacklevel=1)
            print(message, file=sys.stderr)

    def copy_extensions_to_source(self) -> None:
        all_of_them = self.extensions
        self.extensions = self.built()
        super().copy_extensions_to_source()
        self.extensions = all_of_them

    def built(self) -> list[Extension]:
        """The libraries that a compiler could make."""
        library = Path(self.build_lib)
        return [e for e in self.extensions if (library / self.get_ext_filename(e.name)).exists()]


class AnyPythonWheel(bdist_wheel):
    """A wheel for any Python 3, and for this platform if it holds libraries."""

    def get_tag(self) -> tuple[str, str, str]:
        built = self.get_finalized_command("build_ext").built()
        return "py3", "none", super().get_tag()[2] if built else "any"


setup(
    packages=find_packages(include=["scalecom_hvd", "scalecom_hvd.*"]),
    package_data={"scalecom_hvd": ["py.typed"], "scalecom_hvd.native": ["*.c", "*.h"]},
    ext_modules=[
        Extension(
            f"scalecom_hvd.native.{library}",
            [f"scalecom_hvd/native/{source}" for source in sources],
            extra_compile_args=FLAGS,
            depends=[f"scalecom_hvd/native/{header}.h" for header in HEADERS],
            optional=True,
        )
        for library, sources in LIBRARIES.items()
    ],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": AnyPythonWheel},
)
