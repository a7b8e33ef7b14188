"""What pyproject.toml cannot say: the libaio extension is built where it can be; where not, one line says so."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent))

from libaio_ext import build

extensions = [ffi.distutils_extension(tmpdir="build/cffi") for ffi in build.kernels()] if build.has_compiler() else []
try:
    link = build.link_arguments()
except build.CannotBuild as why:
    print(f"tiered: the libaio backend is not built: {why}; posix serves. To get it: {build.INSTALL}", file=sys.stderr)
else:
    extensions.append(build.ffibuilder(link).distutils_extension(tmpdir="build/cffi"))
if build.has_compiler() and build.has_xxhash():
    extensions.append(build.disk_link().distutils_extension(tmpdir="build/cffi"))
elif build.has_compiler():
    print(f"tiered: the native disk link is not built: Python's serves. To get it: {build.INSTALL_XXHASH}", file=sys.stderr)
for extension in extensions:
    extension.optional = True  # a compiler that fails after all costs the backend or the kernels, not the package
setup(ext_modules=extensions)
