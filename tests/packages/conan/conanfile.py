"""Conan 2: `conan create tests/packages/conan -s compiler.cppstd=20 --build=missing`, at the top of the sources."""

import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.files import copy, load


class LinattnConan(ConanFile):
    name = "linattn"
    description = "Exact linear attention on CPUs"
    license = "MIT"
    topics = ("linear-attention", "transformer", "eigen")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"  # to check the language; the package is the same for all
    no_copy_source = True

    def _sources(self):  # only where the recipe lies in them, that is, until it is exported
        return os.path.normpath(os.path.join(self.recipe_folder, "..", "..", ".."))

    def set_version(self):  # the version is written once
        header = load(self, os.path.join(self._sources(), "include", "linattn", "version.hpp"))
        self.version = ".".join(re.findall(r"#define LINATTN_VERSION_[A-Z]+ (\d+)", header))

    def export_sources(self):
        here, there = self._sources(), self.export_sources_folder
        for name in "LICENSE", "linattn-isa.cmake":
            copy(self, name, here, there)
        copy(self, "*.hpp", os.path.join(here, "include"), os.path.join(there, "include"))

    def requirements(self):
        self.requires("eigen/[>=3.4 <6]", transitive_headers=True)

    def validate(self):
        if self.settings.get_safe("compiler.cppstd"):
            check_min_cppstd(self, 20)

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        copy(self, "linattn-isa.cmake", self.source_folder, os.path.join(self.package_folder, "cmake"))
        copy(self, "*.hpp", os.path.join(self.source_folder, "include"), os.path.join(self.package_folder, "include"))

    def package_id(self):
        self.info.clear()

    def package_info(self):  # CMakeDeps names the target linattn::linattn by itself
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        self.cpp_info.set_property("cmake_build_modules", ["cmake/linattn-isa.cmake"])
