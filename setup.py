"""Packaging: the Python packages, and the native lane kernel as a plain shared library (no Python headers, no framework needed)."""

import sys
import warnings

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext


class BuildKernel(build_ext):
    """Build native/lanes.c; an installation without a compiler goes on without it and says so."""

    def get_ext_filename(self, fullname):
        # Loaded through ctypes, so it carries no Python version in its name.
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, extension):
        return []  # no PyInit function

    def build_extension(self, extension):
        try:
            super().build_extension(extension)
        except Exception as error:  # the compilers' own exceptions differ between setuptools versions
            message = f"scalecom_hvd: the native kernel was not built ({error}); the slower plain-torch kernel will be used"
            warnings.warn(message, stacklevel=1)
            print(message, file=sys.stderr)

    def copy_extensions_to_source(self):
        built = self.extensions
        self.extensions = [e for e in built if self._was_built(e)]
        super().copy_extensions_to_source()
        self.extensions = built

    def _was_built(self, extension):
        import os

        return os.path.exists(os.path.join(self.build_lib, self.get_ext_filename(extension.name)))


setup(
    packages=find_packages(include=["scalecom_hvd", "scalecom_hvd.*"]),
    package_data={"scalecom_hvd.native": ["*.c", "*.h"]},
    ext_modules=[
        Extension(
            "scalecom_hvd.native._lanes",
            ["scalecom_hvd/native/lanes.c"],
            # Never -ffast-math: it drops NaN tests, and at link time it sets flush-to-zero for the whole process.
            # -ffp-contract=off: a fused multiply-add would round otherwise than NumPy and the plain-torch kernel.
            extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
            depends=["scalecom_hvd/native/lanes_template.h"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernel},
)
